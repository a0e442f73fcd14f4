"""Kernel of `jenga_kernels.causal_conv`."""

import triton
import triton.language as tl

from jenga_kernels.triton.addressing import page_offsets
from jenga_kernels.triton.recurrence import checkpoint_range, mask_if, silu, stretch_end
from jenga_kernels.triton.requests import find_block


@triton.jit(do_not_specialize=["num_requests"])
def causal_conv_kernel(
    # Outputs
    out_ptr,  # [num_tokens, dim]
    states_ptr,  # [num_slots, dim, width - 1]
    # Inputs
    x_ptr,  # [num_tokens, dim]
    weight_ptr,  # [dim, width]
    bias_ptr,  # [dim]
    query_starts_ptr,  # i32[num_requests + 1]
    initial_slots_ptr,  # i32[num_requests]
    state_slots_ptr,  # i32[num_requests]
    checkpoint_starts_ptr,  # i32[num_requests + 1]
    checkpoint_after_ptr,  # i32[num_checkpoints]
    checkpoint_slots_ptr,  # i32[num_checkpoints]
    # Sizes
    num_requests,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_dim: tl.int64,
    stride_states_column: tl.int64,
    stride_x_token: tl.int64,
    stride_weight_dim: tl.int64,
    stride_weight_column: tl.int64,
    stride_initial: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_SILU: tl.constexpr,
    X_ALIGNMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program (d, b) convolves token block b in BLOCK_D channels; first blocks keep states too."""
    request, block = find_block(query_starts_ptr, num_requests, tl.program_id(1), BLOCK_T)
    channels = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_channel = channels < DIM
    dims, is_dim = channels[None, :], is_channel[None, :]
    query_start = tl.load(query_starts_ptr + request)
    num_tokens = tl.load(query_starts_ptr + request + 1) - query_start
    query_start = query_start.to(tl.int64)
    positions = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [T, 1]
    # The first block goes on without tokens too: it hands the state on to its slot.
    if (block > 0) & (block * BLOCK_T >= num_tokens):
        return
    live = (positions < num_tokens) & is_dim
    out_ptr += (query_start + positions) * stride_out_token + dims
    final_slot = tl.load(state_slots_ptr + request * stride_slots)
    if final_slot <= 0:
        tl.store(out_ptr, tl.full([BLOCK_T, BLOCK_D], 0.0, out_ptr.dtype.element_ty), mask=live)
        return

    initial_slot = tl.load(initial_slots_ptr + request * stride_initial)
    initial_ptr = states_ptr + page_offsets(initial_slot, stride_states_slot)
    initial_ptr += dims * stride_states_dim
    # The product tells Triton what divides the stride; of arguments it believes 16 only.
    stride_x_token = stride_x_token // X_ALIGNMENT * X_ALIGNMENT
    x_ptr += query_start * stride_x_token + dims
    has_initial = mask_if(initial_slot > 0, is_dim)
    acc = tl.full([BLOCK_T, BLOCK_D], 0.0, tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
        sources = positions + (tap + 1 - WIDTH)
        inputs = tl.load(
            x_ptr + sources.to(tl.int64) * stride_x_token, mask=live & (sources >= 0), other=0.0
        )
        inputs = inputs.to(tl.float32)  # [T, D]
        if block == 0:
            columns = (WIDTH - 1) + sources
            before = initial_ptr + columns * stride_states_column
            kept = tl.load(before, mask=has_initial & live & (sources < 0), other=0.0)
            inputs += kept.to(tl.float32)
        column_ptr = weight_ptr + channels * stride_weight_dim + tap * stride_weight_column
        weight = tl.load(column_ptr, mask=is_channel, other=0.0).to(tl.float32)
        acc += inputs * weight[None, :]
    if IS_SILU:
        acc = silu(acc)
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=live)
    if block > 0:
        return

    columns = tl.arange(0, BLOCK_W)[:, None]  # [W, 1]
    is_column = columns < WIDTH - 1
    before = initial_ptr + columns * stride_states_column
    initial = tl.load(before, mask=has_initial & is_column, other=0.0)  # [W, D]
    # Every thread has read the state before one writes to a slot that may be the same.
    tl.debug_barrier()
    stretch, last_stretch = checkpoint_range(checkpoint_starts_ptr, request)
    for s in range(stretch, last_stretch + 1):
        after, slot = stretch_end(
            s, last_stretch, checkpoint_after_ptr, checkpoint_slots_ptr, num_tokens, final_slot
        )
        last_inputs = after + (1 - WIDTH) + columns
        in_x = is_column & (last_inputs >= 0)
        places = x_ptr + last_inputs.to(tl.int64) * stride_x_token
        newer = tl.load(places, mask=in_x & is_dim, other=0.0).to(tl.float32)  # [W, D]
        older = tl.broadcast_to(tl.minimum(after + columns, BLOCK_W - 1), [BLOCK_W, BLOCK_D])
        state = tl.where(in_x, newer, tl.gather(initial, older, 0).to(tl.float32))
        state_ptr = states_ptr + page_offsets(slot, stride_states_slot) + dims * stride_states_dim
        state_ptr += columns * stride_states_column
        state = state.to(states_ptr.dtype.element_ty)
        tl.store(state_ptr, state, mask=mask_if(slot > 0, is_column & is_dim))
