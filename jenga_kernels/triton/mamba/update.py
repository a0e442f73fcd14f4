"""Kernel of `jenga_kernels.state_update`."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import widened
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.mamba.groups import Inputs, StepLimits
from jenga_kernels.triton.recurrent.groups import Requests
from jenga_kernels.triton.recurrent.recurrence import LOG2E, mask_if, row_sums, silu, step_sizes


class UpdateTiles(NamedTuple):
    """Tiles and flags for which `state_update_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_DIM: int
    D_STATE: int
    IS_PER_CHANNEL: bool
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    BLOCK_P: int
    BLOCK_N: int


@with_groups(inputs=Inputs, requests=Requests, limits=StepLimits, tiles=UpdateTiles)
@triton.jit
def state_update_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
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
    stride_states_dim: tl.int64,
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
    stride_dt_bias_head: tl.int64,
    stride_initial: tl.int64,
    stride_slots_request: tl.int64,
    stride_slots_token: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Update BLOCK_P channels of one head of request r in program (b, r); requests vary slowest."""
    x_ptr = inputs.x_ptr
    dt_ptr = inputs.dt_ptr
    A_ptr = inputs.A_ptr
    B_ptr = inputs.B_ptr
    C_ptr = inputs.C_ptr
    z_ptr = inputs.z_ptr
    state_slots_ptr = requests.state_slots_ptr
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
    first = request.to(tl.int64)
    num_tokens = 1
    if requests.query_starts_ptr is not None:
        first = tl.load(requests.query_starts_ptr + request).to(tl.int64)
        num_tokens = tl.load(requests.query_starts_ptr + request + 1) - tl.load(
            requests.query_starts_ptr + request
        )
    # These products tell Triton the divisor of strides. For arguments it recognises 16 only.
    stride_states_slot = stride_states_slot // ALIGNMENT * ALIGNMENT
    stride_states_head = stride_states_head // ALIGNMENT * ALIGNMENT
    stride_states_dim = stride_states_dim // ALIGNMENT * ALIGNMENT
    state_slots_ptr += request * stride_slots_request
    out_ptr += first * stride_out_token + head * stride_out_head + dims
    # Padding has no branch, so that no load waits for either slot, nor one slot for the other.
    is_request = tl.load(state_slots_ptr) > 0
    initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    has_state = is_request & (initial_slot > 0)
    in_page = head * stride_states_head + dims[:, None] * stride_states_dim + ns[None, :]
    initial = states_ptr + page_offsets(initial_slot, stride_states_slot) + in_page
    h = widened(tl.load(initial, mask=mask_if(has_state, in_state), other=0.0))  # [P, N]

    group = head // tiles.HEADS_PER_GROUP
    x_ptr += first * stride_x_token + head * stride_x_head + dims
    dt_ptr += first * stride_dt_token + head * stride_dt_head
    B_ptr += first * stride_B_token + group * stride_B_group + ns
    C_ptr += first * stride_C_token + group * stride_C_group + ns
    dt_bias = None
    if tiles.IS_PER_CHANNEL:
        dt_ptr += dims
        A_ptr += (head * tiles.HEAD_DIM + dims[:, None]) * tiles.D_STATE + ns[None, :]
        A = tl.load(A_ptr, mask=in_state, other=0.0)  # [P, N]
        if inputs.dt_bias_ptr is not None:
            dt_bias = tl.load(
                inputs.dt_bias_ptr + head * stride_dt_bias_head + dims, mask=is_dim, other=0
            )
            dt_bias = dt_bias.to(tl.float32)
    else:
        A = tl.load(A_ptr + head)
        if inputs.dt_bias_ptr is not None:
            dt_bias = tl.load(inputs.dt_bias_ptr + head).to(tl.float32)
    A *= LOG2E
    if inputs.D_ptr is not None:
        D = tl.load(
            inputs.D_ptr + head * stride_D_head + dims * stride_D_dim, mask=is_dim, other=0.0
        )
        D = D.to(tl.float32)  # [P]
    if z_ptr is not None:
        z_ptr += first * stride_z_token + head * stride_z_head + dims
    for _ in range(num_tokens):
        # If it were loaded after a result's store, it would be awaited on its own.
        slot = tl.load(state_slots_ptr)
        x = tl.load(x_ptr, mask=is_dim, other=0.0).to(tl.float32)  # [P]
        if tiles.IS_PER_CHANNEL:
            dt = tl.load(dt_ptr, mask=is_dim, other=0.0).to(tl.float32)  # [P]
        else:
            dt = tl.load(dt_ptr).to(tl.float32)
        dt = step_sizes(
            dt, dt_bias, limits.dt_min, limits.dt_max, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS
        )
        b = tl.load(B_ptr, mask=is_n, other=0.0).to(tl.float32)  # [N]
        c = tl.load(C_ptr, mask=is_n, other=0.0).to(tl.float32)  # [N]
        decay = tl.exp2(dt[:, None] * A) if tiles.IS_PER_CHANNEL else tl.exp2(dt * A)
        h = h * decay + (dt * x)[:, None] * b[None, :]
        y = row_sums(h * c[None, :])  # [P]
        if inputs.D_ptr is not None:
            y += D * x
        if z_ptr is not None:
            y *= silu(tl.load(z_ptr, mask=is_dim, other=0.0).to(tl.float32))
            z_ptr += stride_z_token
        y = tl.where(is_request, y, 0.0)
        tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=is_dim)
        kept = states_ptr + page_offsets(slot, stride_states_slot) + in_page
        tl.store(
            kept, h.to(states_ptr.dtype.element_ty), mask=mask_if(is_request & (slot > 0), in_state)
        )
        x_ptr += stride_x_token
        dt_ptr += stride_dt_token
        B_ptr += stride_B_token
        C_ptr += stride_C_token
        out_ptr += stride_out_token
        state_slots_ptr += stride_slots_token
