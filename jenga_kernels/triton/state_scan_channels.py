"""Kernel of `jenga_kernels.state_scan` where every channel and state element decays on its own."""

import triton
import triton.language as tl

from jenga_kernels.triton.addressing import page_offsets
from jenga_kernels.triton.recurrence import (
    LOG2E,
    checkpoint_range,
    mask_if,
    row_sums,
    silu,
    step_sizes,
    stretch_end,
)


@triton.jit
def state_scan_channels_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    # Inputs
    x_ptr,  # [num_tokens, num_heads, head_dim]
    dt_ptr,  # [num_tokens, num_heads, head_dim]
    A_ptr,  # f32[num_heads, head_dim, d_state]
    B_ptr,  # [num_tokens, num_groups, d_state]
    C_ptr,  # [num_tokens, num_groups, d_state]
    D_ptr,  # [num_heads, head_dim]
    z_ptr,  # [num_tokens, num_heads, head_dim]
    dt_bias_ptr,  # [num_heads, head_dim]
    query_starts_ptr,  # i32[num_requests + 1]
    initial_slots_ptr,  # i32[num_requests]
    state_slots_ptr,  # i32[num_requests]
    checkpoint_starts_ptr,  # i32[num_requests + 1]
    checkpoint_after_ptr,  # i32[num_checkpoints]
    checkpoint_slots_ptr,  # i32[num_checkpoints]
    # Scalars
    dt_min,
    dt_max,
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
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    IS_SOFTPLUS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (b, r) scans request r in BLOCK_P channels of one head, token by token."""
    BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    dims = (tl.program_id(0) % BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]  # [P, 1]
    ns = tl.arange(0, BLOCK_N)[None, :]  # [1, N]
    tile = tl.arange(0, BLOCK_T)[None, :]  # [1, T]
    is_dim = dims < HEAD_DIM
    is_n = ns < D_STATE
    in_state = is_dim & is_n
    token = tl.load(query_starts_ptr + request)
    end = tl.load(query_starts_ptr + request + 1)
    final_slot = tl.load(state_slots_ptr + request * stride_slots)
    initial_slot = tl.load(initial_slots_ptr + request * stride_initial)
    out_ptr += head * stride_out_head

    if final_slot <= 0:
        for first in range(token, end, BLOCK_T):
            tokens = first + tile
            places = out_ptr + tokens.to(tl.int64) * stride_out_token + dims
            zero = tl.full([BLOCK_P, BLOCK_T], 0.0, out_ptr.dtype.element_ty)
            tl.store(places, zero, mask=is_dim & (tokens < end))
        return

    x_ptr += head * stride_x_head
    dt_ptr += head * stride_dt_head
    B_ptr += head // HEADS_PER_GROUP * stride_B_group
    C_ptr += head // HEADS_PER_GROUP * stride_C_group
    in_page = head * stride_states_head + dims * stride_states_dim + ns  # [P, N]
    A = tl.load(A_ptr + (head * HEAD_DIM + dims) * D_STATE + ns, mask=in_state, other=0.0) * LOG2E
    dt_bias = None
    if dt_bias_ptr is not None:
        biases_ptr = dt_bias_ptr + head * stride_dt_bias_head
        dt_bias = tl.load(biases_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    if D_ptr is not None:
        D_ptr += head * stride_D_head + dims * stride_D_dim
        D = tl.load(D_ptr, mask=is_dim, other=0.0).to(tl.float32)  # [P, 1]
    if z_ptr is not None:
        z_ptr += head * stride_z_head
    has_initial = mask_if(initial_slot > 0, in_state)
    initial = states_ptr + page_offsets(initial_slot, stride_states_slot) + in_page
    h = tl.load(initial, mask=has_initial, other=0.0).to(tl.float32)  # [P, N]

    query_start = token
    stretch, last_stretch = checkpoint_range(checkpoint_starts_ptr, request)
    for s in range(stretch, last_stretch + 1):
        after, slot = stretch_end(
            s,
            last_stretch,
            checkpoint_after_ptr,
            checkpoint_slots_ptr,
            end - query_start,
            final_slot,
        )
        stop = query_start + after
        for first in range(token, stop, BLOCK_T):
            tokens = (first + tile).to(tl.int64)
            live = is_dim & (tokens < stop)
            dt = tl.load(dt_ptr + tokens * stride_dt_token + dims, mask=live, other=0.0)
            x = tl.load(x_ptr + tokens * stride_x_token + dims, mask=live, other=0.0)
            x = x.to(tl.float32)  # [P, T]
            dt = step_sizes(dt.to(tl.float32), dt_bias, dt_min, dt_max, IS_SOFTPLUS, HAS_LIMITS)
            # A token past the stretch has step size zero: the state stays.
            dt = tl.where(live, dt, 0.0)
            dx = dt * x
            y = tl.full([BLOCK_P, BLOCK_T], 0.0, tl.float32)
            B_row = B_ptr + tl.cast(first, tl.int64) * stride_B_token + ns
            C_row = C_ptr + tl.cast(first, tl.int64) * stride_C_token + ns
            for t in tl.static_range(BLOCK_T):  # pyright: ignore[reportGeneralTypeIssues]
                is_token = mask_if(first + t < stop, is_n)
                b = tl.load(B_row, mask=is_token, other=0.0)
                c = tl.load(C_row, mask=is_token, other=0.0)
                B_row += stride_B_token
                C_row += stride_C_token
                column = tl.full([BLOCK_P, 1], t, tl.int32)
                h *= tl.exp2(tl.gather(dt, column, 1) * A)
                h += tl.gather(dx, column, 1) * b.to(tl.float32)
                y_t = row_sums(h * c.to(tl.float32))
                y = tl.where(tile == t, y_t[:, None], y)
            if D_ptr is not None:
                y += D * x
            if z_ptr is not None:
                z = tl.load(z_ptr + tokens * stride_z_token + dims, mask=live, other=0.0)
                y *= silu(z.to(tl.float32))
            y = y.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + tokens * stride_out_token + dims, y, mask=live)
        token = stop
        kept = states_ptr + page_offsets(slot, stride_states_slot) + in_page
        tl.store(kept, h.to(states_ptr.dtype.element_ty), mask=mask_if(slot > 0, in_state))
