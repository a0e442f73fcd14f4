"""Kernel of `jenga_kernels.state_replay` that serves all tokens of a call at once."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import device_function, rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import matmul, matmul_add
from jenga_kernels.triton.mamba.groups import History, Inputs, StepLimits
from jenga_kernels.triton.recurrent.groups import ReplayRequests
from jenga_kernels.triton.recurrent.recurrence import LOG2E, mask_if, silu, step_sizes
from jenga_kernels.triton.recurrent.replay import (
    add_state_products,
    decays_between,
    decays_until,
    rows_of_call,
    rows_of_history,
    write_changes,
)


@device_function
def steps_of(
    history_ptr,
    dt_ptr,
    stride_dt_token,
    stored,
    ages,
    num_past,
    num_all,
    dt_bias,
    dt_min,
    dt_max,
    HISTORY_TOKENS: tl.constexpr,
    IS_SOFTPLUS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
):
    """Step sizes of the tokens since the state; 0 for rows without a token."""
    rows = ((stored + ages) % HISTORY_TOKENS).to(tl.int64)
    tokens = (ages - num_past).to(tl.int64)
    is_new = (ages >= num_past) & (ages < num_all)
    past = tl.load(history_ptr + rows, mask=ages < num_past, other=0.0)
    new = tl.load(dt_ptr + tokens * stride_dt_token, mask=is_new, other=0.0).to(tl.float32)
    new = step_sizes(new, dt_bias, dt_min, dt_max, IS_SOFTPLUS, HAS_LIMITS)
    return past + tl.where(is_new, new, 0.0)


class ProductsTiles(NamedTuple):
    """Tiles and flags for which `state_replay_products_kernel` is compiled."""

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
    BLOCK_L: int


@with_groups(
    history=History, inputs=Inputs, requests=ReplayRequests, limits=StepLimits, tiles=ProductsTiles
)
@triton.jit
def state_replay_products_kernel(
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
    """Serve BLOCK_P channels of one head of request r in program (b, r); requests vary slowest.

    The tokens since the state are rows of one tile, those of the history first, then those of the
    call. Products give what a token reads of the state, and of the tokens up to itself.
    """
    PRECISION: tl.constexpr = tiles.PRECISION
    z_ptr = inputs.z_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_DIM + tiles.BLOCK_P - 1) // tiles.BLOCK_P
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    request = tl.program_id(1)
    dims = block * tiles.BLOCK_P + tl.arange(0, tiles.BLOCK_P)
    # A row has two halves, so that only half of a float32 state is split into parts at a time.
    ns = tl.arange(0, tiles.BLOCK_N // 2)
    far_ns = tiles.BLOCK_N // 2 + ns
    ages = tl.arange(0, tiles.BLOCK_L)  # indices of the tokens since the state, the oldest first
    is_dim = dims < tiles.HEAD_DIM
    in_state = is_dim[:, None] & (ns < tiles.D_STATE)[None, :]
    in_far_state = is_dim[:, None] & (far_ns < tiles.D_STATE)[None, :]
    slot = tl.load(requests.slots_ptr + request * stride_slots)
    computed = tl.load(requests.computed_tokens_ptr + request)
    stored = tl.load(requests.state_tokens_ptr + request)
    stored_next = tl.load(requests.next_state_tokens_ptr + request)
    first = request.to(tl.int64)
    num_tokens = 1
    if requests.query_starts_ptr is not None:
        first = tl.load(requests.query_starts_ptr + request).to(tl.int64)
        num_tokens = (tl.load(requests.query_starts_ptr + request + 1) - first).to(tl.int32)
    out_ptr += first * stride_out_token + head * stride_out_head
    if slot <= 0:
        for _ in range(num_tokens):
            zero = tl.full([tiles.BLOCK_P], 0.0, out_ptr.dtype.element_ty)
            tl.store(out_ptr + dims, zero, mask=is_dim)
            out_ptr += stride_out_token
        return

    group = head // tiles.HEADS_PER_GROUP
    x_ptr = inputs.x_ptr + (first * stride_x_token + head * stride_x_head)
    dt_ptr = inputs.dt_ptr + (first * stride_dt_token + head * stride_dt_head)
    B_ptr = inputs.B_ptr + (first * stride_B_token + group * stride_B_group)
    C_ptr = inputs.C_ptr + (first * stride_C_token + group * stride_C_group)
    history_x_ptr = history.history_x_ptr + (
        page_offsets(slot, stride_history_x_slot) + head * stride_history_x_head
    )
    history_dt_ptr = history.history_dt_ptr + (
        page_offsets(slot, stride_history_dt_slot) + head * stride_history_dt_head
    )
    history_B_ptr = history.history_B_ptr + (
        page_offsets(slot, stride_history_B_slot) + group * stride_history_B_group
    )
    states_ptr += page_offsets(slot, stride_states_slot) + head * stride_states_head
    state = states_ptr + dims[:, None].to(tl.int64) * tiles.stride_states_dim + ns[None, :]
    far_state = state + tiles.BLOCK_N // 2
    # The other half is loaded after the products of this one. Both would not fit into registers.
    S = tl.load(state, mask=mask_if(stored > 0, in_state), other=0.0)  # [P, N / 2]

    num_past = computed - stored
    num_all = num_past + num_tokens
    rows = ((stored + ages) % tiles.HISTORY_TOKENS).to(tl.int64)
    tokens = (ages - num_past).to(tl.int64)
    is_past = ages < num_past
    is_new = (ages >= num_past) & (ages < num_all)
    B = rows_of_history(
        history_B_ptr, rows, is_past, ns, tiles.D_STATE, tiles.stride_history_B_token
    )
    B = rows_of_call(B_ptr, tokens, is_new, ns, B, tiles.D_STATE, stride_B_token)  # [L, N / 2]
    far_B = rows_of_history(
        history_B_ptr, rows, is_past, far_ns, tiles.D_STATE, tiles.stride_history_B_token
    )
    far_B = rows_of_call(B_ptr, tokens, is_new, far_ns, far_B, tiles.D_STATE, stride_B_token)
    C = rows_of_call(C_ptr, tokens, is_new, ns, 0.0, tiles.D_STATE, stride_C_token)
    far_C = rows_of_call(C_ptr, tokens, is_new, far_ns, 0.0, tiles.D_STATE, stride_C_token)
    in_call = is_dim[:, None] & is_new[None, :]
    x = history_x_ptr + rows[None, :] * tiles.stride_history_x_token + dims[:, None]
    x = tl.load(x, mask=is_dim[:, None] & is_past[None, :], other=0.0)
    new_x = x_ptr + tokens[None, :] * stride_x_token + dims[:, None]
    x = tl.load(new_x, mask=in_call, other=x)  # [P, L]
    wide_x = x.to(tl.float32)
    rate = tl.load(inputs.A_ptr + head) * LOG2E
    dt_bias = None
    if inputs.dt_bias_ptr is not None:
        dt_bias = tl.load(inputs.dt_bias_ptr + head).to(tl.float32)
    steps = steps_of(
        history_dt_ptr,
        dt_ptr,
        stride_dt_token,
        stored,
        ages,
        num_past,
        num_all,
        dt_bias,
        limits.dt_min,
        limits.dt_max,
        tiles.HISTORY_TOKENS,
        tiles.IS_SOFTPLUS,
        tiles.HAS_LIMITS,
    )
    next_steps = steps_of(
        history_dt_ptr,
        dt_ptr,
        stride_dt_token,
        stored,
        ages + 1,
        num_past,
        num_all,
        dt_bias,
        limits.dt_min,
        limits.dt_max,
        tiles.HISTORY_TOKENS,
        tiles.IS_SOFTPLUS,
        tiles.HAS_LIMITS,
    )
    logs, next_logs = steps * rate, next_steps * rate

    scores = matmul_add(far_C, tl.trans(far_B), matmul(C, tl.trans(B)))  # [L, L]
    between = decays_between(next_logs, ages)
    scores *= tl.where(ages[None, :] <= ages[:, None], between * steps[None, :], 0.0)
    y = add_state_products(S, C, tl.full([tiles.BLOCK_P, tiles.BLOCK_L], 0.0, tl.float32))  # [P, L]
    far_S = tl.load(far_state, mask=mask_if(stored > 0, in_far_state), other=0.0)
    y = add_state_products(far_S, far_C, y)
    y *= tl.exp2(tl.cumsum(logs, 0))[None, :]
    y = tl.dot(wide_x, tl.trans(scores), y, input_precision=PRECISION)
    if inputs.D_ptr is not None:
        D = inputs.D_ptr + head * stride_D_head + dims * stride_D_dim
        y += tl.load(D, mask=is_dim, other=0.0).to(tl.float32)[:, None] * wide_x
    if z_ptr is not None:
        z_ptr += first * stride_z_token + head * stride_z_head
        z = z_ptr + tokens[None, :] * stride_z_token + dims[:, None]
        y *= silu(tl.load(z, mask=in_call, other=0.0).to(tl.float32))
    out_ptrs = out_ptr + tokens[None, :] * stride_out_token + dims[:, None]
    tl.store(out_ptrs, rounded(y, out_ptr.dtype.element_ty), mask=in_call)

    is_kept = is_new & (stored + ages >= stored_next)
    kept_x = history_x_ptr + rows[None, :] * tiles.stride_history_x_token + dims[:, None]
    tl.store(kept_x, x, mask=is_dim[:, None] & is_kept[None, :])
    if block == 0:
        tl.store(history_dt_ptr + rows, steps, mask=is_kept)
        if head % tiles.HEADS_PER_GROUP == 0:
            kept_B = history_B_ptr + rows[:, None] * tiles.stride_history_B_token + ns[None, :]
            tl.store(kept_B, B, mask=is_kept[:, None] & (ns < tiles.D_STATE)[None, :])
            in_far_B = is_kept[:, None] & (far_ns < tiles.D_STATE)[None, :]
            tl.store(kept_B + tiles.BLOCK_N // 2, far_B, mask=in_far_B)

    if stored_next > stored:
        decay, weights = decays_until(logs, next_logs, ages, stored_next - stored - 1)
        wide_x *= (weights * steps)[None, :]
        is_begun = stored > 0
        wide_B, wide_far_B = B.to(tl.float32), far_B.to(tl.float32)
        write_changes(state, in_state, is_begun, decay, wide_x, wide_B, PRECISION)
        write_changes(far_state, in_far_state, is_begun, decay, wide_x, wide_far_B, PRECISION)
