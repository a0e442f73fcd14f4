"""Kernel of `jenga_kernels.state_replay` that serves the tokens of a call one by one."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import device_function, rounded_product, widened
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.mamba.groups import History, Inputs, StepLimits
from jenga_kernels.triton.recurrent.groups import ReplayRequests
from jenga_kernels.triton.recurrent.recurrence import (
    LOG2E,
    column_sums,
    line_sums,
    mask_if,
    row_sums,
    silu,
    step_sizes,
)
from jenga_kernels.triton.recurrent.replay import write_rows

_INT32_MAX = tl.constexpr(2**31 - 1)


@device_function
def store_zeros(
    out_ptr,
    num_tokens,
    is_dim,
    stride_out_token,
    BLOCK_P: tl.constexpr,
):
    """Store zeros as the output of a request that is padding."""
    zero = tl.full([BLOCK_P], 0.0, out_ptr.dtype.element_ty)
    for _ in range(num_tokens):
        tl.store(out_ptr, zero, mask=is_dim)
        out_ptr += stride_out_token


@device_function
def decays_since(dt_ptr, rows, next_rows, ages, num_past, rate):
    """Weights of a history's tokens after the last of them, and the decay of the state before them.

    Each decay is a sum of the steps after the token. A difference of sums from the start would have
    an error as large as these sums.

    Returns:
        Step size times decay of each token, [L], 0 past the last, and the state's decay.
    """
    steps = tl.load(dt_ptr + rows, mask=ages < num_past, other=0.0)  # [L]
    behind = tl.load(dt_ptr + next_rows, mask=ages + 1 < num_past, other=0.0)
    behind = tl.cumsum(behind * rate, 0, reverse=True)
    return steps * tl.exp2(behind), tl.exp2(tl.sum(steps, 0) * rate)


@device_function
def scores_of(C_ptr, past_B, ns, is_n):
    """Scores of a token's C with the B of each token of the history, [L]."""
    c = tl.load(C_ptr + ns, mask=is_n, other=0.0).to(tl.float32)  # [N]
    return row_sums(past_B * c[None, :])


@device_function
def keep_projections(
    history_ptr,
    B_ptr,
    first_number,
    stored_next,
    num_tokens,
    is_n,
    stride_history_token,
    stride_B_token,
    HISTORY_TOKENS: tl.constexpr,
):
    """Copy B of a call's tokens to their rows, except those that the next state includes."""
    for t in range(num_tokens):
        if first_number + t >= stored_next:
            B = tl.load(B_ptr, mask=is_n, other=0.0)
            row = ((first_number + t) % HISTORY_TOKENS).to(tl.int64)
            tl.store(history_ptr + row * stride_history_token, B, mask=is_n)
        B_ptr += stride_B_token


@device_function
def store_output(out_ptr, y, x, D_ptr, z_ptr, dims, is_dim, stride_D_dim):
    """Store a token's output, with the input's own part and the gate, if any."""
    if D_ptr is not None:
        D = tl.load(D_ptr + dims * stride_D_dim, mask=is_dim, other=0.0)
        y += D.to(tl.float32) * x
    if z_ptr is not None:
        y *= silu(tl.load(z_ptr, mask=is_dim, other=0.0).to(tl.float32))
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=is_dim)


class ReplayTiles(NamedTuple):
    """Tiles and flags for which `state_replay_kernel` is compiled."""

    stride_states_dim: int
    stride_history_x_token: int
    stride_history_B_token: int
    HEADS_PER_GROUP: int
    HEAD_DIM: int
    D_STATE: int
    HISTORY_TOKENS: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    PRECISION: str
    BLOCK_P: int
    BLOCK_N: int
    BLOCK_LINE: int
    BLOCK_L: int


@with_groups(
    history=History, inputs=Inputs, requests=ReplayRequests, limits=StepLimits, tiles=ReplayTiles
)
@triton.jit
def state_replay_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    history,
    # Inputs
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
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Serve BLOCK_P channels of one head of request r in program (b, r)."""
    PRECISION: tl.constexpr = tiles.PRECISION
    x_ptr = inputs.x_ptr
    dt_ptr = inputs.dt_ptr
    C_ptr = inputs.C_ptr
    D_ptr = inputs.D_ptr
    z_ptr = inputs.z_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_DIM + tiles.BLOCK_P - 1) // tiles.BLOCK_P
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    request = tl.program_id(1)
    dims = block * tiles.BLOCK_P + tl.arange(0, tiles.BLOCK_P)
    ns = tl.arange(0, tiles.BLOCK_N)
    ages = tl.arange(0, tiles.BLOCK_L)  # indices of the tokens since the state, the oldest first
    is_dim = dims < tiles.HEAD_DIM
    is_n = ns < tiles.D_STATE
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
    first = tl.load(requests.query_starts_ptr + request).to(tl.int64)
    num_tokens = (tl.load(requests.query_starts_ptr + request + 1) - first).to(tl.int32)
    out_ptr += first * stride_out_token + head * stride_out_head + dims
    if slot <= 0:
        store_zeros(out_ptr, num_tokens, is_dim, stride_out_token, tiles.BLOCK_P)
        return

    group = head // tiles.HEADS_PER_GROUP
    num_past = computed - stored
    x_ptr += first * stride_x_token + head * stride_x_head + dims
    dt_ptr += first * stride_dt_token + head * stride_dt_head
    B_ptr = inputs.B_ptr + (first * stride_B_token + group * stride_B_group)
    C_ptr += first * stride_C_token + group * stride_C_group
    if z_ptr is not None:
        z_ptr += first * stride_z_token + head * stride_z_head + dims
    history_x_ptr = history.history_x_ptr + (
        page_offsets(slot, stride_history_x_slot) + head * stride_history_x_head + dims
    )
    history_dt_ptr = history.history_dt_ptr + (
        page_offsets(slot, stride_history_dt_slot) + head * stride_history_dt_head
    )
    history_B_ptr = history.history_B_ptr + (
        page_offsets(slot, stride_history_B_slot) + group * stride_history_B_group
    )
    states_ptr += page_offsets(slot, stride_states_slot) + head * stride_states_head
    state_rows = dims[None, :, None]
    if tiles.HEAD_DIM * tiles.stride_states_dim > _INT32_MAX:
        state_rows = state_rows.to(tl.int64)
    in_head = state_rows * tiles.stride_states_dim + lines[:, None, :]
    S = tl.load(states_ptr + in_head, mask=mask_if(stored > 0, in_state), other=0.0)

    rows = ((stored + ages) % tiles.HISTORY_TOKENS).to(tl.int64)
    next_rows = ((stored + ages + 1) % tiles.HISTORY_TOKENS).to(tl.int64)
    is_past = (ages < num_past)[:, None]
    all_B = history_B_ptr + rows[:, None] * tiles.stride_history_B_token + ns[None, :]
    all_B = tl.load(all_B, mask=is_past & is_n[None, :], other=0.0)  # [L, N]
    all_x = history_x_ptr[None, :] + rows[:, None] * tiles.stride_history_x_token
    all_x = tl.load(all_x, mask=is_past & is_dim[None, :], other=0.0)  # [L, P]
    rate = tl.load(inputs.A_ptr + head) * LOG2E
    dt_bias = None
    if inputs.dt_bias_ptr is not None:
        dt_bias = tl.load(inputs.dt_bias_ptr + head).to(tl.float32)
    if D_ptr is not None:
        D_ptr += head * stride_D_head
    S = widened(S)
    all_B = widened(all_B)
    all_x = widened(all_x)
    weights, decay = decays_since(history_dt_ptr, rows, next_rows, ages, num_past, rate)
    # Weights of the history and decay of the state, for a state that is written.
    kept_weights = weights
    kept_decay = decay
    token_B_ptr = B_ptr
    for t in range(num_tokens):
        dt = tl.load(dt_ptr).to(tl.float32)
        dt = step_sizes(
            dt, dt_bias, limits.dt_min, limits.dt_max, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS
        )
        x_row = tl.load(x_ptr, mask=is_dim, other=0.0)
        x = x_row.to(tl.float32)  # [P]
        c = tl.load(C_ptr + lines, mask=in_line, other=0.0).to(tl.float32)  # [lines, line]
        b = tl.load(token_B_ptr + lines, mask=in_line, other=0.0).to(tl.float32)
        scores = scores_of(C_ptr, all_B, ns, is_n)  # [L]
        own_score = tl.sum(rounded_product(b, c))
        step_decay = tl.exp2(dt * rate)
        decay *= step_decay
        weights *= step_decay
        y = line_sums(S * c[:, None, :]) * decay
        y += column_sums(rounded_product(all_x, (weights * scores)[:, None]))
        y += (dt * own_score) * x
        store_output(out_ptr, y, x, D_ptr, z_ptr, dims, is_dim, stride_D_dim)
        is_own = ages == num_past + t
        b_row = tl.load(token_B_ptr + ns, mask=is_n, other=0.0).to(tl.float32)  # [N]
        all_B = tl.where(is_own[:, None], b_row[None, :], all_B)
        all_x = tl.where(is_own[:, None], x[None, :], all_x)
        weights = tl.where(is_own, dt, weights)
        if computed + t >= stored_next:
            row = ((computed + t) % tiles.HISTORY_TOKENS).to(tl.int64)
            kept_x_ptr = history_x_ptr + row * tiles.stride_history_x_token
            tl.store(kept_x_ptr, x_row, mask=is_dim)
            tl.store(history_dt_ptr + row, dt, mask=block == 0)
        else:
            kept_weights = weights
            kept_decay = decay
        x_ptr += stride_x_token
        dt_ptr += stride_dt_token
        token_B_ptr += stride_B_token
        C_ptr += stride_C_token
        if z_ptr is not None:
            z_ptr += stride_z_token
        out_ptr += stride_out_token
    if stored_next > stored:
        kept_weights = tl.where(ages < stored_next - stored, kept_weights, 0.0)
        write_rows(
            states_ptr + tl.reshape(state_rows, [tiles.BLOCK_P, 1]) * tiles.stride_states_dim,
            is_dim[:, None],
            stored > 0,
            kept_decay,
            tl.trans(all_x * kept_weights[:, None]),
            all_B,
            tiles.D_STATE,
            PRECISION,
        )

    if (head % tiles.HEADS_PER_GROUP == 0) & (block == 0):
        keep_projections(
            history_B_ptr + ns,
            B_ptr + ns,
            computed,
            stored_next,
            num_tokens,
            is_n,
            tiles.stride_history_B_token,
            stride_B_token,
            tiles.HISTORY_TOKENS,
        )
