"""Kernel of `jenga_kernels.state_replay` that adds one token to each state and writes the state."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import rounded, widened
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.mamba.groups import History, Inputs, StepLimits
from jenga_kernels.triton.recurrent.groups import ReplaySlots
from jenga_kernels.triton.recurrent.recurrence import LOG2E, mask_if, row_sums, silu, step_sizes


class WriteTiles(NamedTuple):
    """Tiles and flags for which `state_replay_write_kernel` is compiled."""

    stride_history_x_token: int
    stride_history_B_token: int
    HEADS_PER_GROUP: int
    HEAD_DIM: int
    D_STATE: int
    HISTORY_TOKENS: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    BLOCK_P: int
    BLOCK_N: int


@with_groups(
    history=History, inputs=Inputs, requests=ReplaySlots, limits=StepLimits, tiles=WriteTiles
)
@triton.jit
def state_replay_write_kernel(
    # Outputs
    out_ptr,  # [num_requests, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    # Inputs
    history,
    inputs,
    requests,
    # Scalars
    limits,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_states_dim: tl.int64,
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
    """Update BLOCK_P channels of one head of request r in program (b, r); requests vary slowest.

    It is `state_update_kernel` for one token, after a loop over the history. Usually the history is
    empty, because the call before has written the state too. So all that the token needs is loaded
    before the loop.
    """
    BLOCKS: tl.constexpr = (tiles.HEAD_DIM + tiles.BLOCK_P - 1) // tiles.BLOCK_P
    # Rows of states begin at multiples of 16 bytes.
    ALIGNMENT: tl.constexpr = 16 * 8 // states_ptr.dtype.element_ty.primitive_bitwidth
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    dims = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_P + tl.arange(0, tiles.BLOCK_P)
    ns = tl.arange(0, tiles.BLOCK_N)
    is_dim = dims < tiles.HEAD_DIM
    is_n = ns < tiles.D_STATE
    in_state = is_dim[:, None] & is_n[None, :]
    token = request.to(tl.int64)
    group = head // tiles.HEADS_PER_GROUP
    # These products tell Triton the divisor of strides. For arguments it recognises 16 only.
    stride_states_slot = stride_states_slot // ALIGNMENT * ALIGNMENT
    stride_states_head = stride_states_head // ALIGNMENT * ALIGNMENT
    stride_states_dim = stride_states_dim // ALIGNMENT * ALIGNMENT
    slot = tl.load(requests.slots_ptr + request * stride_slots)
    computed = tl.load(requests.computed_tokens_ptr + request)
    stored = tl.load(requests.state_tokens_ptr + request)
    is_request = slot > 0
    in_page = head * stride_states_head + ns[None, :]
    in_page += dims[:, None].to(tl.int64) * stride_states_dim
    state_ptrs = states_ptr + page_offsets(slot, stride_states_slot) + in_page
    h = tl.load(state_ptrs, mask=mask_if(is_request & (stored > 0), in_state), other=0.0)
    x_ptr = inputs.x_ptr + (token * stride_x_token + head * stride_x_head + dims)
    x = tl.load(x_ptr, mask=is_dim, other=0.0)  # [P]
    dt = tl.load(inputs.dt_ptr + token * stride_dt_token + head * stride_dt_head)
    B_ptr = inputs.B_ptr + (token * stride_B_token + group * stride_B_group + ns)
    b = tl.load(B_ptr, mask=is_n, other=0.0)  # [N]
    C_ptr = inputs.C_ptr + (token * stride_C_token + group * stride_C_group + ns)
    c = tl.load(C_ptr, mask=is_n, other=0.0)  # [N]
    rate = tl.load(inputs.A_ptr + head) * LOG2E
    dt_bias = None
    if inputs.dt_bias_ptr is not None:
        dt_bias = tl.load(inputs.dt_bias_ptr + head).to(tl.float32)
    if inputs.D_ptr is not None:
        D_ptr = inputs.D_ptr + (head * stride_D_head + dims * stride_D_dim)
        D = tl.load(D_ptr, mask=is_dim, other=0.0)  # [P]
    if inputs.z_ptr is not None:
        z_ptr = inputs.z_ptr + (token * stride_z_token + head * stride_z_head + dims)
        z = tl.load(z_ptr, mask=is_dim, other=0.0)  # [P]

    h = widened(h)  # [P, N]
    for age in range(tl.where(is_request, computed - stored, 0)):
        row = ((stored + age) % tiles.HISTORY_TOKENS).to(tl.int64)
        past_x = history.history_x_ptr + (
            page_offsets(slot, stride_history_x_slot) + head * stride_history_x_head
        )
        past_x += row * tiles.stride_history_x_token + dims
        past_x = tl.load(past_x, mask=is_dim, other=0.0).to(tl.float32)
        past_dt = history.history_dt_ptr + (
            page_offsets(slot, stride_history_dt_slot) + head * stride_history_dt_head
        )
        past_dt = tl.load(past_dt + row)
        past_B = history.history_B_ptr + (
            page_offsets(slot, stride_history_B_slot) + group * stride_history_B_group
        )
        past_B += row * tiles.stride_history_B_token + ns
        past_B = tl.load(past_B, mask=is_n, other=0.0).to(tl.float32)
        h = h * tl.exp2(past_dt * rate) + (past_dt * past_x)[:, None] * past_B[None, :]
    dt = dt.to(tl.float32)
    dt = step_sizes(dt, dt_bias, limits.dt_min, limits.dt_max, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS)
    x = x.to(tl.float32)
    h = h * tl.exp2(dt * rate) + (dt * x)[:, None] * b.to(tl.float32)[None, :]
    y = row_sums(h * c.to(tl.float32)[None, :])  # [P]
    if inputs.D_ptr is not None:
        y += D.to(tl.float32) * x
    if inputs.z_ptr is not None:
        y *= silu(z.to(tl.float32))
    y = tl.where(is_request, y, 0.0)
    out_ptr += token * stride_out_token + head * stride_out_head + dims
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=is_dim)
    h = rounded(h, states_ptr.dtype.element_ty)
    tl.store(state_ptrs, h, mask=mask_if(is_request, in_state))
