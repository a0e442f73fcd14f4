"""Kernel of `jenga_kernels.state_scan` with a decay for every channel and state element.

A prompt has few programs, of one warp each, so no other warp hides their waits for memory. Inputs
are therefore loaded one tile of tokens ahead.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import device_function
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.mamba.groups import Inputs, StepLimits
from jenga_kernels.triton.recurrent.groups import Checkpoints, Requests
from jenga_kernels.triton.recurrent.recurrence import (
    LOG2E,
    checkpoint_range,
    mask_if,
    row_sums,
    silu,
    step_sizes,
    stretch_end,
)


@device_function
def _load_tokens(
    first,
    stop,
    dims,
    ns,
    is_dim,
    is_n,
    x_ptr,
    dt_ptr,
    B_ptr,
    C_ptr,
    z_ptr,
    stride_x_token,
    stride_dt_token,
    stride_B_token,
    stride_C_token,
    stride_z_token,
    BLOCK_T: tl.constexpr,
):
    """Load x, dt, B, C and z of each token from `first` on, [P] or [N]; 0 from `stop` on.

    Without gates, x stands for z.
    """
    rows = ()
    first_token = tl.cast(first, tl.int64)
    x_ptrs = x_ptr + first_token * stride_x_token + dims
    dt_ptrs = dt_ptr + first_token * stride_dt_token + dims
    B_ptrs = B_ptr + first_token * stride_B_token + ns
    C_ptrs = C_ptr + first_token * stride_C_token + ns
    z_ptrs = x_ptrs
    if z_ptr is not None:
        z_ptrs = z_ptr + first_token * stride_z_token + dims
    for t in tl.static_range(BLOCK_T):  # pyright: ignore[reportGeneralTypeIssues]
        has_dim = mask_if(first + t < stop, is_dim)
        has_n = mask_if(first + t < stop, is_n)
        x = tl.load(x_ptrs + t * stride_x_token, mask=has_dim, other=0.0)
        rows += (x,)
        rows += (tl.load(dt_ptrs + t * stride_dt_token, mask=has_dim, other=0.0),)
        rows += (tl.load(B_ptrs + t * stride_B_token, mask=has_n, other=0.0),)
        rows += (tl.load(C_ptrs + t * stride_C_token, mask=has_n, other=0.0),)
        if z_ptr is not None:
            rows += (tl.load(z_ptrs + t * stride_z_token, mask=has_dim, other=0.0),)
        else:
            rows += (x,)
    return rows


@device_function
def _scan_tokens(
    first,
    stop,
    h,  # f32[P, N]
    rows,  # from `_load_tokens`
    dims,
    is_dim,
    A,  # f32[P, N], rates in powers of two
    D,  # f32[P] or None
    dt_bias,  # f32[P] or None
    dt_min,
    dt_max,
    out_ptr,
    stride_out_token,
    HAS_GATES: tl.constexpr,
    IS_SOFTPLUS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Apply BLOCK_T tokens, or those before `stop`; store their outputs, and return the state."""
    out_ptrs = out_ptr + tl.cast(first, tl.int64) * stride_out_token + dims
    for t in tl.static_range(BLOCK_T):  # pyright: ignore[reportGeneralTypeIssues]
        is_token = first + t < stop
        x = rows[5 * t].to(tl.float32)
        dt = rows[5 * t + 1].to(tl.float32)
        b = rows[5 * t + 2].to(tl.float32)
        c = rows[5 * t + 3].to(tl.float32)
        dt = step_sizes(dt, dt_bias, dt_min, dt_max, IS_SOFTPLUS, HAS_LIMITS)
        # A token past the stretch gets step size zero, which leaves the state as it is.
        dt = tl.where(is_token, dt, 0.0)
        h *= tl.exp2(dt[:, None] * A)
        h += (dt * x)[:, None] * b[None, :]
        y = row_sums(h * c[None, :])
        if D is not None:
            y += D * x
        if HAS_GATES:
            y *= silu(rows[5 * t + 4].to(tl.float32))
        y = y.to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs + t * stride_out_token, y, mask=mask_if(is_token, is_dim))
    return h


class ChannelsTiles(NamedTuple):
    """Tiles and flags for which `state_scan_channels_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_DIM: int
    D_STATE: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    BLOCK_T: int
    BLOCK_P: int
    BLOCK_N: int


@with_groups(
    inputs=Inputs,
    requests=Requests,
    checkpoints=Checkpoints,
    limits=StepLimits,
    tiles=ChannelsTiles,
)
@triton.jit
def state_scan_channels_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    # Inputs
    inputs,
    requests,
    checkpoints,
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
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Scan request r in BLOCK_P channels of one head, token by token, in program (b, r)."""
    D_ptr = inputs.D_ptr
    z_ptr = inputs.z_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_DIM + tiles.BLOCK_P - 1) // tiles.BLOCK_P
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    dims = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_P + tl.arange(0, tiles.BLOCK_P)
    ns = tl.arange(0, tiles.BLOCK_N)
    is_dim = dims < tiles.HEAD_DIM
    is_n = ns < tiles.D_STATE
    in_state = is_dim[:, None] & is_n[None, :]
    token = tl.load(requests.query_starts_ptr + request)
    end = tl.load(requests.query_starts_ptr + request + 1)
    final_slot = tl.load(requests.state_slots_ptr + request * stride_slots)
    initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    out_ptr += head * stride_out_head

    if final_slot <= 0:
        for row in range(token, end):
            out_row = out_ptr + tl.cast(row, tl.int64) * stride_out_token
            zero = tl.full([tiles.BLOCK_P], 0.0, out_ptr.dtype.element_ty)
            tl.store(out_row + dims, zero, mask=is_dim)
        return

    x_ptr = inputs.x_ptr + head * stride_x_head
    dt_ptr = inputs.dt_ptr + head * stride_dt_head
    B_ptr = inputs.B_ptr + head // tiles.HEADS_PER_GROUP * stride_B_group
    C_ptr = inputs.C_ptr + head // tiles.HEADS_PER_GROUP * stride_C_group
    in_page = head * stride_states_head + dims[:, None] * stride_states_dim + ns[None, :]  # [P, N]
    A_ptrs = inputs.A_ptr + (head * tiles.HEAD_DIM + dims[:, None]) * tiles.D_STATE + ns[None, :]
    A = tl.load(A_ptrs, mask=in_state, other=0.0) * LOG2E
    dt_bias = None
    if inputs.dt_bias_ptr is not None:
        biases_ptr = inputs.dt_bias_ptr + head * stride_dt_bias_head
        dt_bias = tl.load(biases_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    D = None
    if D_ptr is not None:
        D_ptr += head * stride_D_head + dims * stride_D_dim
        D = tl.load(D_ptr, mask=is_dim, other=0.0).to(tl.float32)  # [P]
    if z_ptr is not None:
        z_ptr += head * stride_z_head
    has_initial = mask_if(initial_slot > 0, in_state)
    initial = states_ptr + page_offsets(initial_slot, stride_states_slot) + in_page
    h = tl.load(initial, mask=has_initial, other=0.0).to(tl.float32)  # [P, N]

    query_start = token
    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    for s in range(stretch, last_stretch + 1):
        after, slot = stretch_end(
            s,
            last_stretch,
            checkpoints.checkpoint_after_ptr,
            checkpoints.checkpoint_slots_ptr,
            end - query_start,
            final_slot,
        )
        stop = query_start + after
        rows = _load_tokens(
            token,
            stop,
            dims,
            ns,
            is_dim,
            is_n,
            x_ptr,
            dt_ptr,
            B_ptr,
            C_ptr,
            z_ptr,
            stride_x_token,
            stride_dt_token,
            stride_B_token,
            stride_C_token,
            stride_z_token,
            tiles.BLOCK_T,
        )
        for first in range(token, stop, 2 * tiles.BLOCK_T):
            next_rows = _load_tokens(
                first + tiles.BLOCK_T,
                stop,
                dims,
                ns,
                is_dim,
                is_n,
                x_ptr,
                dt_ptr,
                B_ptr,
                C_ptr,
                z_ptr,
                stride_x_token,
                stride_dt_token,
                stride_B_token,
                stride_C_token,
                stride_z_token,
                tiles.BLOCK_T,
            )
            h = _scan_tokens(
                first,
                stop,
                h,
                rows,
                dims,
                is_dim,
                A,
                D,
                dt_bias,
                limits.dt_min,
                limits.dt_max,
                out_ptr,
                stride_out_token,
                z_ptr is not None,
                tiles.IS_SOFTPLUS,
                tiles.HAS_LIMITS,
                tiles.BLOCK_T,
            )
            rows = _load_tokens(
                first + 2 * tiles.BLOCK_T,
                stop,
                dims,
                ns,
                is_dim,
                is_n,
                x_ptr,
                dt_ptr,
                B_ptr,
                C_ptr,
                z_ptr,
                stride_x_token,
                stride_dt_token,
                stride_B_token,
                stride_C_token,
                stride_z_token,
                tiles.BLOCK_T,
            )
            h = _scan_tokens(
                first + tiles.BLOCK_T,
                stop,
                h,
                next_rows,
                dims,
                is_dim,
                A,
                D,
                dt_bias,
                limits.dt_min,
                limits.dt_max,
                out_ptr,
                stride_out_token,
                z_ptr is not None,
                tiles.IS_SOFTPLUS,
                tiles.HAS_LIMITS,
                tiles.BLOCK_T,
            )
        token = stop
        kept = states_ptr + page_offsets(slot, stride_states_slot) + in_page
        tl.store(kept, h.to(states_ptr.dtype.element_ty), mask=mask_if(slot > 0, in_state))
