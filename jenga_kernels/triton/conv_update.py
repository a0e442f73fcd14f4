"""Kernel of `jenga_kernels.conv_update`."""

import triton
import triton.language as tl

from jenga_kernels.triton.addressing import page_offsets
from jenga_kernels.triton.recurrence import row_sums, silu


@triton.jit
def conv_update_kernel(
    # Outputs
    out_ptr,  # [num_tokens, dim]
    states_ptr,  # [num_slots, dim, width - 1]
    # Inputs
    x_ptr,  # [num_tokens, dim]
    weight_ptr,  # [dim, width]
    bias_ptr,  # [dim]
    query_starts_ptr,  # i32[num_requests + 1]
    initial_slots_ptr,  # i32[num_requests]
    state_slots_ptr,  # i32[num_requests, max_tokens]
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_dim: tl.int64,
    stride_states_column: tl.int64,
    stride_x_token: tl.int64,
    stride_weight_dim: tl.int64,
    stride_weight_column: tl.int64,
    stride_initial: tl.int64,
    stride_slots_request: tl.int64,
    stride_slots_token: tl.int64,
    # Tiles and flags
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program (d, r) convolves the tokens of request r in BLOCK_D channels."""
    request = tl.program_id(1)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_W)[None, :]  # [1, W]
    is_dim = dims < DIM
    is_kept = is_dim[:, None] & (columns < WIDTH - 1)
    first = request.to(tl.int64)
    num_tokens = 1
    if query_starts_ptr is not None:
        first = tl.load(query_starts_ptr + request).to(tl.int64)
        num_tokens = tl.load(query_starts_ptr + request + 1).to(tl.int32) - first.to(tl.int32)
    state_slots_ptr += request * stride_slots_request
    x_ptr += first * stride_x_token + dims
    out_ptr += first * stride_out_token + dims
    if tl.load(state_slots_ptr) <= 0:
        for _ in range(num_tokens):
            tl.store(out_ptr, tl.full([BLOCK_D], 0.0, out_ptr.dtype.element_ty), mask=is_dim)
            out_ptr += stride_out_token
        return

    weights = weight_ptr + dims[:, None] * stride_weight_dim + columns * stride_weight_column
    weight = tl.load(weights, mask=is_dim[:, None] & (columns < WIDTH), other=0.0).to(
        tl.float32
    )  # [D, W]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    initial_slot = tl.load(initial_slots_ptr + request * stride_initial)
    in_page = dims[:, None] * stride_states_dim + columns * stride_states_column  # [D, W]
    initial = states_ptr + page_offsets(initial_slot, stride_states_slot) + in_page
    # Inputs from the oldest to the token's own, which takes column WIDTH - 1.
    window = tl.load(initial, mask=is_kept & (initial_slot > 0), other=0.0).to(tl.float32)
    next_column = tl.broadcast_to(tl.minimum(columns + 1, BLOCK_W - 1), [BLOCK_D, BLOCK_W])
    # Every thread has read the state before one writes to a slot that may be the same.
    tl.debug_barrier()
    for _ in range(num_tokens):
        x = tl.load(x_ptr, mask=is_dim, other=0.0).to(tl.float32)  # [D]
        window = tl.where(columns == WIDTH - 1, x[:, None], window)
        y = row_sums(window * weight)
        window = tl.gather(window, next_column, 1)
        if bias_ptr is not None:
            y += bias
        if IS_SILU:
            y = silu(y)
        tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=is_dim)
        slot = tl.load(state_slots_ptr)
        kept = states_ptr + page_offsets(slot, stride_states_slot) + in_page
        tl.store(kept, window.to(states_ptr.dtype.element_ty), mask=is_kept & (slot > 0))
        x_ptr += stride_x_token
        out_ptr += stride_out_token
        state_slots_ptr += stride_slots_token
