"""Kernels of `jenga_kernels.state_replay` for one token of each request.

The scores of a token with those of its history are the same for all channels of a head. Most of the
work for them is the same for all heads of a group. One kernel computes them. The other reads
states, and nothing twice.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import (
    await_kernel_before,
    device_function,
    let_next_begin,
    rounded,
    rounded_product,
    widened,
)
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.mamba.groups import Inputs, StepLimits, WeightInputs
from jenga_kernels.triton.recurrent.groups import ReplaySlots
from jenga_kernels.triton.recurrent.recurrence import (
    LOG2E,
    column_sums,
    line_sums,
    mask_if,
    row_sums,
    silu,
    step_sizes,
)

_INT32_MAX = tl.constexpr(2**31 - 1)

OTHERS = 2
"""Numbers of a head after the weights of its history: decay of the state, weight of the token."""

_AT_ONCE = tl.constexpr(4)
"""Rows of a history that are loaded together when a state is written."""


@device_function
def decays_of_rows(dt_ptrs, next_dt_ptrs, ages, num_past, rates):
    """Weights of histories' tokens after the last of them, [H, L], and decays of states, [H].

    Each decay is a sum of the steps after the token. A difference of sums from the start would have
    an error as large as these sums. A token's weight is its step size times its decay, 0 past the
    last.
    """
    steps = tl.load(dt_ptrs, mask=ages[None, :] < num_past, other=0.0)
    behind = tl.load(next_dt_ptrs, mask=ages[None, :] + 1 < num_past, other=0.0)
    behind = tl.cumsum(behind * rates[:, None], 1, reverse=True)
    return steps * tl.exp2(behind), tl.exp2(row_sums(steps) * rates)


class WeightsTiles(NamedTuple):
    """Tiles and flags for which `replay_weights_kernel` is compiled."""

    stride_history_B_token: int
    HEADS_PER_GROUP: int
    D_STATE: int
    HISTORY_TOKENS: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    WIDTH: int
    BLOCK_H: int
    BLOCK_N: int
    BLOCK_L: int
    IS_OVERLAPPED: bool


@with_groups(inputs=WeightInputs, requests=ReplaySlots, limits=StepLimits, tiles=WeightsTiles)
@triton.jit
def replay_weights_kernel(
    # Outputs
    weights_ptr,  # f32[num_requests, num_heads, BLOCK_L + OTHERS]
    history_dt_ptr,  # f32[num_slots, num_heads, history_tokens]
    history_B_ptr,  # [num_slots, num_groups, history_tokens, d_state]
    # Inputs
    inputs,
    requests,
    # Scalars
    limits,
    # Strides, in elements
    stride_history_dt_slot: tl.int64,
    stride_history_dt_head: tl.int64,
    stride_history_B_slot: tl.int64,
    stride_history_B_group: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_slots: tl.int64,
    stride_weights_request: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Compute weights of request r's history for BLOCK_H heads of one group in program (b, r).

    The program also stores the token's step sizes in the history. The first program of a group also
    stores its B.
    """
    BLOCKS: tl.constexpr = (tiles.HEADS_PER_GROUP + tiles.BLOCK_H - 1) // tiles.BLOCK_H
    let_next_begin(tiles.IS_OVERLAPPED)
    group = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    request = tl.program_id(1)
    in_group = block * tiles.BLOCK_H + tl.arange(0, tiles.BLOCK_H)
    is_head = in_group < tiles.HEADS_PER_GROUP
    heads = group * tiles.HEADS_PER_GROUP + in_group
    ns = tl.arange(0, tiles.BLOCK_N)
    ages = tl.arange(0, tiles.BLOCK_L)  # indices of the tokens since the state, the oldest first
    is_n = ns < tiles.D_STATE
    slot = tl.load(requests.slots_ptr + request * stride_slots)
    computed = tl.load(requests.computed_tokens_ptr + request)
    stored = tl.load(requests.state_tokens_ptr + request)
    stored_next = tl.load(requests.next_state_tokens_ptr + request)
    # Padding has no history.
    num_past = tl.where(slot > 0, computed - stored, 0)
    token = request.to(tl.int64)
    dt_ptr = inputs.dt_ptr + (token * stride_dt_token + heads * stride_dt_head)
    B_ptr = inputs.B_ptr + (token * stride_B_token + group * stride_B_group + ns)
    C_ptr = inputs.C_ptr + (token * stride_C_token + group * stride_C_group + ns)
    slot_dt_ptr = history_dt_ptr + page_offsets(slot, stride_history_dt_slot)
    head_dt_ptrs = slot_dt_ptr + heads[:, None] * stride_history_dt_head
    history_B_ptr += page_offsets(slot, stride_history_B_slot) + group * stride_history_B_group
    rows = ((stored + ages) % tiles.HISTORY_TOKENS).to(tl.int64)
    next_rows = ((stored + ages + 1) % tiles.HISTORY_TOKENS).to(tl.int64)
    past_B = history_B_ptr + rows[:, None] * tiles.stride_history_B_token + ns[None, :]
    past_B = tl.load(past_B, mask=(ages < num_past)[:, None] & is_n[None, :], other=0.0)  # [L, N]
    B = tl.load(B_ptr, mask=is_n, other=0.0)
    b = B.to(tl.float32)
    c = tl.load(C_ptr, mask=is_n, other=0.0).to(tl.float32)  # [N]
    dt = tl.load(dt_ptr, mask=is_head, other=0.0).to(tl.float32)  # [H]
    rates = tl.load(inputs.A_ptr + heads, mask=is_head, other=0.0) * LOG2E
    dt_bias = None
    if inputs.dt_bias_ptr is not None:
        dt_bias = tl.load(inputs.dt_bias_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    # Heads past the group's end read rows of its last head, and their results are not stored.
    past, decays = decays_of_rows(
        head_dt_ptrs + rows[None, :],
        head_dt_ptrs + next_rows[None, :],
        ages,
        tl.where(is_head, num_past, 0)[:, None],
        rates,
    )
    scores = row_sums(widened(past_B) * c[None, :])  # [L]
    own_score = tl.sum(rounded_product(b, c))
    dt = step_sizes(dt, dt_bias, limits.dt_min, limits.dt_max, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS)
    step_decays = tl.exp2(dt * rates)
    weights_ptr += token * stride_weights_request + heads * tiles.WIDTH
    weights = past * step_decays[:, None] * scores[None, :]
    tl.store(weights_ptr[:, None] + ages[None, :], weights, mask=is_head[:, None])
    tl.store(weights_ptr + tiles.BLOCK_L, decays * step_decays, mask=is_head)
    tl.store(weights_ptr + tiles.BLOCK_L + 1, dt * own_score, mask=is_head)
    is_kept = (slot > 0) & (computed >= stored_next)
    row = (computed % tiles.HISTORY_TOKENS).to(tl.int64)
    kept_dt_ptr = slot_dt_ptr + heads * stride_history_dt_head + row
    tl.store(kept_dt_ptr, dt, mask=mask_if(is_kept, is_head))
    kept_B_ptr = history_B_ptr + row * tiles.stride_history_B_token + ns
    tl.store(kept_B_ptr, B, mask=mask_if(is_kept & (block == 0), is_n))


class TokenTiles(NamedTuple):
    """Tiles and flags for which `state_replay_token_kernel` is compiled."""

    stride_states_dim: int
    stride_history_x_token: int
    stride_history_B_token: int
    HEADS_PER_GROUP: int
    HEAD_DIM: int
    D_STATE: int
    HISTORY_TOKENS: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    WIDTH: int
    BLOCK_P: int
    BLOCK_N: int
    BLOCK_LINE: int
    BLOCK_L: int
    IS_OVERLAPPED: bool


@with_groups(inputs=Inputs, requests=ReplaySlots, limits=StepLimits, tiles=TokenTiles)
@triton.jit
def state_replay_token_kernel(
    # Outputs
    out_ptr,  # [num_requests, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    history_x_ptr,  # [num_slots, num_heads, history_tokens, head_dim]
    # Inputs
    weights_ptr,  # f32[num_requests, num_heads, BLOCK_L + OTHERS]
    history_dt_ptr,  # f32[num_slots, num_heads, history_tokens]
    history_B_ptr,  # [num_slots, num_groups, history_tokens, d_state]
    inputs,
    requests,
    # Scalars
    limits,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_history_x_slot: tl.int64,
    stride_history_x_head: tl.int64,
    stride_history_dt_slot: tl.int64,
    stride_history_dt_head: tl.int64,
    stride_history_B_slot: tl.int64,
    stride_history_B_group: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_D_head: tl.int64,
    stride_D_dim: tl.int64,
    stride_z_token: tl.int64,
    stride_z_head: tl.int64,
    stride_slots: tl.int64,
    stride_weights_request: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Serve BLOCK_P channels of one head of request r in program (b, r).

    All its loads are issued before it computes anything. If launches overlap, it loads the state
    and its own token while the other kernel still computes weights.
    """
    B_ptr = inputs.B_ptr
    D_ptr = inputs.D_ptr
    z_ptr = inputs.z_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_DIM + tiles.BLOCK_P - 1) // tiles.BLOCK_P
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    dims = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_P + tl.arange(0, tiles.BLOCK_P)
    ages = tl.arange(0, tiles.BLOCK_L)  # indices of the tokens since the state, the oldest first
    is_dim = dims < tiles.HEAD_DIM
    # A row of a state consists of cache lines. Few threads hold a part of each line, so they sum
    # most of a row by themselves.
    lines = tl.arange(0, tiles.BLOCK_N // tiles.BLOCK_LINE)[:, None] * tiles.BLOCK_LINE
    lines += tl.arange(0, tiles.BLOCK_LINE)[None, :]
    in_line = lines < tiles.D_STATE  # [lines, line]
    in_state = is_dim[None, :, None] & in_line[:, None, :]
    slot = tl.load(requests.slots_ptr + request * stride_slots)
    computed = tl.load(requests.computed_tokens_ptr + request)
    stored = tl.load(requests.state_tokens_ptr + request)
    stored_next = tl.load(requests.next_state_tokens_ptr + request)
    token = request.to(tl.int64)
    out_ptr += token * stride_out_token + head * stride_out_head + dims
    if slot <= 0:
        await_kernel_before(tiles.IS_OVERLAPPED)
        tl.store(out_ptr, tl.full([tiles.BLOCK_P], 0.0, out_ptr.dtype.element_ty), mask=is_dim)
        return

    group = head // tiles.HEADS_PER_GROUP
    num_past = computed - stored
    states_ptr += page_offsets(slot, stride_states_slot) + head * stride_states_head
    state_rows = dims[None, :, None]
    if tiles.HEAD_DIM * tiles.stride_states_dim > _INT32_MAX:
        state_rows = state_rows.to(tl.int64)
    state_ptrs = states_ptr + (state_rows * tiles.stride_states_dim + lines[:, None, :])
    S = tl.load(state_ptrs, mask=mask_if(stored > 0, in_state), other=0.0)
    rows = ((stored + ages) % tiles.HISTORY_TOKENS).to(tl.int64)
    history_x_ptr += page_offsets(slot, stride_history_x_slot) + head * stride_history_x_head + dims
    past_x = history_x_ptr[None, :] + rows[:, None] * tiles.stride_history_x_token
    past_x = tl.load(past_x, mask=(ages < num_past)[:, None] & is_dim[None, :], other=0.0)  # [L, P]
    C_ptr = inputs.C_ptr + (token * stride_C_token + group * stride_C_group)
    c = tl.load(C_ptr + lines, mask=in_line, other=0.0).to(tl.float32)  # [lines, line]
    x_ptr = inputs.x_ptr + (token * stride_x_token + head * stride_x_head + dims)
    x_row = tl.load(x_ptr, mask=is_dim, other=0.0)
    x = x_row.to(tl.float32)  # [P]
    D = tl.full([tiles.BLOCK_P], 0, tl.float32)
    if D_ptr is not None:
        D_ptr += head * stride_D_head + dims * stride_D_dim
        D = tl.load(D_ptr, mask=is_dim, other=0.0).to(tl.float32)
    z = tl.full([tiles.BLOCK_P], 0, tl.float32)
    if z_ptr is not None:
        z_ptr += token * stride_z_token + head * stride_z_head + dims
        z = tl.load(z_ptr, mask=is_dim, other=0.0).to(tl.float32)
    await_kernel_before(tiles.IS_OVERLAPPED)
    weights_ptr += token * stride_weights_request + head * tiles.WIDTH
    weights = tl.load(weights_ptr + ages)
    decay = tl.load(weights_ptr + tiles.BLOCK_L)
    own_weight = tl.load(weights_ptr + tiles.BLOCK_L + 1)

    S = widened(S)
    y = line_sums(S * c[:, None, :]) * decay
    weights = tl.broadcast_to(weights[:, None], past_x.shape)
    y += column_sums(rounded_product(widened(past_x), weights))
    y += own_weight * x
    if D_ptr is not None:
        y += D * x
    if z_ptr is not None:
        y *= silu(z)
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=is_dim)
    if computed >= stored_next:
        row = (computed % tiles.HISTORY_TOKENS).to(tl.int64)
        tl.store(history_x_ptr + row * tiles.stride_history_x_token, x_row, mask=is_dim)
    if stored_next > stored:
        # The next state includes tokens up to one of the history, or up to this one.
        rate = tl.load(inputs.A_ptr + head) * LOG2E
        dt_bias = None
        if inputs.dt_bias_ptr is not None:
            dt_bias = tl.load(inputs.dt_bias_ptr + head).to(tl.float32)
        dt = tl.load(inputs.dt_ptr + token * stride_dt_token + head * stride_dt_head).to(tl.float32)
        dt = step_sizes(
            dt, dt_bias, limits.dt_min, limits.dt_max, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS
        )
        history_dt_ptr += page_offsets(slot, stride_history_dt_slot) + head * stride_history_dt_head
        history_B_ptr += page_offsets(slot, stride_history_B_slot) + group * stride_history_B_group
        B_ptr += token * stride_B_token + group * stride_B_group
        num_kept = stored_next - stored
        next_rows = ((stored + ages + 1) % tiles.HISTORY_TOKENS).to(tl.int64)
        steps = tl.load(history_dt_ptr + rows, mask=ages < num_past, other=0.0)
        steps = tl.where(ages < num_kept, tl.where(ages == num_past, dt, steps), 0.0)
        behind = tl.load(history_dt_ptr + next_rows, mask=ages + 1 < num_past, other=0.0)
        behind = tl.where(ages + 1 < num_kept, tl.where(ages + 1 == num_past, dt, behind), 0.0)
        kept_weights = steps * tl.exp2(tl.cumsum(behind * rate, 0, reverse=True))
        S *= tl.exp2(tl.sum(steps, 0) * rate)
        for first in range(0, num_kept, _AT_ONCE):
            xs = ()
            bs = ()
            for i in tl.static_range(_AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
                age = first + i
                row = ((stored + age) % tiles.HISTORY_TOKENS).to(tl.int64)
                # The token itself is in no row of the history. Tokens after it get weight 0.
                is_past = age < num_past
                row_x = history_x_ptr + row * tiles.stride_history_x_token
                row_x = tl.load(row_x, mask=mask_if(is_past, is_dim), other=0.0)
                xs += (tl.where(age == num_past, x_row, row_x).to(tl.float32),)
                row_B = tl.where(is_past, history_B_ptr + row * tiles.stride_history_B_token, B_ptr)
                row_B = tl.load(row_B + lines, mask=mask_if(age < num_kept, in_line), other=0.0)
                bs += (row_B.to(tl.float32),)
            for i in tl.static_range(_AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
                weight = tl.sum(tl.where(ages == first + i, kept_weights, 0.0), 0)
                S += (xs[i] * weight)[None, :, None] * bs[i][:, None, :]
        tl.store(state_ptrs, rounded(S, states_ptr.dtype.element_ty), mask=in_state)
