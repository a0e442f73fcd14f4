"""Kernel of `jenga_kernels.conv_update`."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.conv.groups import Filters, Gates
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.recurrent.groups import Requests
from jenga_kernels.triton.recurrent.recurrence import (
    column_offsets,
    conv_weights,
    gated,
    has_input,
    mask_if,
    silu,
)


class UpdateTiles(NamedTuple):
    """Tiles and flags for which `conv_update_kernel` is compiled."""

    stride_weight_dim: int
    stride_weight_column: int
    DIM: int
    WIDTH: int
    NUM_COLUMNS: int
    IS_SILU: bool
    X_ALIGNMENT: int
    BLOCK_D: int


@with_groups(requests=Requests, filters=Filters, gates=Gates, tiles=UpdateTiles)
@triton.jit
def conv_update_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, dim]
    states_ptr,  # [num_slots, dim, width - 1 or more]
    # Inputs
    x_ptr,  # [num_tokens, dim]
    filters,
    requests,
    computed_tokens_ptr,  # i32[num_requests]
    gates,
    # Strides, in elements; that of channels is untyped, because Triton tests only such for 1
    stride_out_token: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_dim,
    stride_states_column: tl.int64,
    stride_x_token: tl.int64,
    stride_initial: tl.int64,
    stride_slots_request: tl.int64,
    stride_slots_token: tl.int64,
    stride_computed: tl.int64,
    stride_input_gates: tl.int64,
    stride_output_gates: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Convolve the tokens of request r in BLOCK_D channels, in program (d, r)."""
    state_slots_ptr = requests.state_slots_ptr
    input_gates_ptr = gates.input_gates_ptr
    output_gates_ptr = gates.output_gates_ptr
    # Columns of the inputs before a token. Negative ones do not exist.
    NEWEST: tl.constexpr = tiles.WIDTH - 2
    MIDDLE: tl.constexpr = tiles.WIDTH - 3
    OLDEST: tl.constexpr = tiles.WIDTH - 4
    request = tl.program_id(1)
    dims = tl.program_id(0) * tiles.BLOCK_D + tl.arange(0, tiles.BLOCK_D)
    is_dim = dims < tiles.DIM
    first = request.to(tl.int64)
    num_tokens = 1
    if requests.query_starts_ptr is not None:
        first = tl.load(requests.query_starts_ptr + request).to(tl.int64)
        num_tokens = tl.load(requests.query_starts_ptr + request + 1).to(tl.int32) - first.to(
            tl.int32
        )
    state_slots_ptr += request * stride_slots_request
    # These products tell Triton the divisor of strides. For arguments it recognises 16 only.
    stride_x_token = stride_x_token // tiles.X_ALIGNMENT * tiles.X_ALIGNMENT
    if input_gates_ptr is not None:
        stride_input_gates = stride_input_gates // tiles.X_ALIGNMENT * tiles.X_ALIGNMENT
        input_gates_ptr += first * stride_input_gates + dims
    if output_gates_ptr is not None:
        stride_output_gates = stride_output_gates // tiles.X_ALIGNMENT * tiles.X_ALIGNMENT
        output_gates_ptr += first * stride_output_gates + dims
    x_ptr += first * stride_x_token + dims
    out_ptr += first * stride_out_token + dims
    # Padding has no branch, so that no load waits for either slot, nor one slot for the other.
    is_request = tl.load(state_slots_ptr) > 0
    initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    has_state = is_request & (initial_slot > 0)

    w_oldest, w_middle, w_newest, w_own = conv_weights(
        filters.weight_ptr,
        dims,
        is_dim,
        tiles.stride_weight_dim,
        tiles.stride_weight_column,
        tiles.WIDTH,
        tiles.BLOCK_D,
    )
    if filters.bias_ptr is not None:
        bias = tl.load(filters.bias_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    # One vector for each input before the token, so that neighbouring channels load as one.
    in_page = dims.to(tl.int64) * stride_states_dim
    initial = states_ptr + page_offsets(initial_slot, stride_states_slot) + in_page
    has_initial = mask_if(has_state, is_dim)
    before = 0
    if tiles.NUM_COLUMNS is not None:
        before = tl.load(computed_tokens_ptr + request * stride_computed)
    newest = tl.load(
        initial
        + column_offsets(NEWEST, before, stride_states_column, tiles.WIDTH, tiles.NUM_COLUMNS),
        mask=has_input(NEWEST, before, has_initial, tiles.WIDTH, tiles.NUM_COLUMNS),
        other=0.0,
    )
    newest = newest.to(tl.float32)  # [D]
    if MIDDLE >= 0:
        middle = tl.load(
            initial
            + column_offsets(MIDDLE, before, stride_states_column, tiles.WIDTH, tiles.NUM_COLUMNS),
            mask=has_input(MIDDLE, before, has_initial, tiles.WIDTH, tiles.NUM_COLUMNS),
            other=0.0,
        )
        middle = middle.to(tl.float32)
    if OLDEST >= 0:
        oldest = tl.load(
            initial
            + column_offsets(OLDEST, before, stride_states_column, tiles.WIDTH, tiles.NUM_COLUMNS),
            mask=has_input(OLDEST, before, has_initial, tiles.WIDTH, tiles.NUM_COLUMNS),
            other=0.0,
        )
        oldest = oldest.to(tl.float32)
    # All threads must have read the state before one writes, because the slots may be the same.
    tl.debug_barrier()
    for _ in range(num_tokens):
        x = tl.load(x_ptr, mask=is_dim, other=0.0)  # [D]
        if input_gates_ptr is not None:
            x = gated(x, tl.load(input_gates_ptr, mask=is_dim, other=0.0))
            input_gates_ptr += stride_input_gates
        x = x.to(tl.float32)
        slot = tl.load(state_slots_ptr)
        kept = states_ptr + page_offsets(slot, stride_states_slot) + in_page
        is_kept = mask_if(is_request & (slot > 0), is_dim)
        y = newest * w_newest + x * w_own
        if MIDDLE >= 0:
            y += middle * w_middle
        if OLDEST >= 0:
            y += oldest * w_oldest
            oldest = middle
            if tiles.NUM_COLUMNS is None:
                state = oldest.to(states_ptr.dtype.element_ty)
                tl.store(kept + OLDEST * stride_states_column, state, mask=is_kept)
        if MIDDLE >= 0:
            middle = newest
            if tiles.NUM_COLUMNS is None:
                state = middle.to(states_ptr.dtype.element_ty)
                tl.store(kept + MIDDLE * stride_states_column, state, mask=is_kept)
        newest = x
        before += 1
        kept += column_offsets(NEWEST, before, stride_states_column, tiles.WIDTH, tiles.NUM_COLUMNS)
        tl.store(kept, newest.to(states_ptr.dtype.element_ty), mask=is_kept)
        if filters.bias_ptr is not None:
            y += bias
        if tiles.IS_SILU:
            y = silu(y)
        if output_gates_ptr is not None:
            y *= tl.load(output_gates_ptr, mask=is_dim, other=0.0).to(tl.float32)
            output_gates_ptr += stride_output_gates
        y = tl.where(is_request, y, 0.0)
        tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=is_dim)
        x_ptr += stride_x_token
        out_ptr += stride_out_token
        state_slots_ptr += stride_slots_token
