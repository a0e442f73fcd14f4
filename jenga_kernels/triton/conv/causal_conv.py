"""Kernel of `jenga_kernels.causal_conv`."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.conv.groups import Filters, Gates
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import device_function
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.requests import find_block
from jenga_kernels.triton.recurrent.groups import Checkpoints, Requests
from jenga_kernels.triton.recurrent.recurrence import (
    checkpoint_range,
    column_offsets,
    conv_weights,
    gated,
    has_input,
    mask_if,
    silu,
    stretch_end,
)


@device_function
def kept_inputs(
    initial_ptr,
    positions,
    has_initial,
    num_before,
    stride_column,
    WIDTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    """Load inputs before each position that are columns of a state, oldest first; else zero."""
    kept = ()
    for t in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        columns = positions + t
        is_kept = has_initial & (columns < WIDTH - 1)
        is_kept = has_input(columns, num_before, is_kept, WIDTH, NUM_COLUMNS)
        places = column_offsets(columns, num_before, stride_column, WIDTH, NUM_COLUMNS)
        kept += (tl.load(initial_ptr + places, mask=is_kept, other=0.0),)
    return kept


class ConvTiles(NamedTuple):
    """Tiles and flags for which `causal_conv_kernel` is compiled."""

    stride_weight_dim: int
    stride_weight_column: int
    DIM: int
    WIDTH: int
    NUM_COLUMNS: int
    IS_SILU: bool
    X_ALIGNMENT: int
    BLOCK_T: int
    BLOCK_D: int
    BLOCK_W: int
    RUN_TOKENS: int


@with_groups(
    requests=Requests, checkpoints=Checkpoints, filters=Filters, gates=Gates, tiles=ConvTiles
)
@triton.jit(do_not_specialize=["num_requests"])
def causal_conv_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, dim]
    states_ptr,  # [num_slots, dim, width - 1 or more]
    # Inputs
    x_ptr,  # [num_tokens, dim]
    filters,
    requests,
    checkpoints,
    computed_tokens_ptr,  # i32[num_requests]
    gates,
    # Sizes
    num_requests,
    # Strides, in elements; that of channels is untyped, because Triton tests only such for 1
    stride_out_token: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_dim,
    stride_states_column: tl.int64,
    stride_x_token: tl.int64,
    stride_initial: tl.int64,
    stride_slots: tl.int64,
    stride_computed: tl.int64,
    stride_input_gates: tl.int64,
    stride_output_gates: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Convolve block b in BLOCK_D channels in program (d, b). A first block writes states too."""
    input_gates_ptr = gates.input_gates_ptr
    output_gates_ptr = gates.output_gates_ptr
    WIDTH: tl.constexpr = tiles.WIDTH
    RUN_TOKENS: tl.constexpr = tiles.RUN_TOKENS
    request, block = find_block(
        requests.query_starts_ptr, num_requests, tl.program_id(1), tiles.BLOCK_T
    )
    channels = tl.program_id(0) * tiles.BLOCK_D + tl.arange(0, tiles.BLOCK_D)
    is_channel = channels < tiles.DIM
    dims, is_dim = channels[None, :], is_channel[None, :]
    query_start = tl.load(requests.query_starts_ptr + request)
    num_tokens = tl.load(requests.query_starts_ptr + request + 1) - query_start
    final_slot = tl.load(requests.state_slots_ptr + request * stride_slots)
    initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    query_start = query_start.to(tl.int64)
    runs = tl.arange(0, tiles.BLOCK_T // RUN_TOKENS)[:, None] * RUN_TOKENS  # [rows, 1]
    positions = block * tiles.BLOCK_T + runs
    out_ptr += (query_start + positions) * stride_out_token + dims
    # The first block runs even without tokens, because it passes the state on to its slot. Before
    # the tokens of the first request, there may be blocks of no request.
    is_past = (block < 0) | ((block > 0) & (block * tiles.BLOCK_T >= num_tokens))
    # One branch for both, so that starts and slots are loaded at once.
    if is_past | (final_slot <= 0):
        zero = tl.full([tiles.BLOCK_T // RUN_TOKENS, tiles.BLOCK_D], 0.0, out_ptr.dtype.element_ty)
        for t in tl.static_range(RUN_TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
            is_token = mask_if(block >= 0, positions + t < num_tokens)
            tl.store(out_ptr, zero, mask=is_token & is_dim)
            out_ptr += stride_out_token
        return

    in_page = dims.to(tl.int64) * stride_states_dim  # [1, D]
    initial_ptr = states_ptr + page_offsets(initial_slot, stride_states_slot) + in_page
    # This product tells Triton the divisor of the stride. For arguments it recognises 16 only.
    stride_x_token = stride_x_token // tiles.X_ALIGNMENT * tiles.X_ALIGNMENT
    x_ptr += query_start * stride_x_token + dims
    if input_gates_ptr is not None:
        stride_input_gates = stride_input_gates // tiles.X_ALIGNMENT * tiles.X_ALIGNMENT
        input_gates_ptr += query_start * stride_input_gates + dims
    if output_gates_ptr is not None:
        stride_output_gates = stride_output_gates // tiles.X_ALIGNMENT * tiles.X_ALIGNMENT
        output_gates_ptr += (query_start + positions) * stride_output_gates + dims
    has_initial = mask_if(initial_slot > 0, is_dim)
    nothing = tl.full(
        [tiles.BLOCK_T // RUN_TOKENS, tiles.BLOCK_D], 0.0, states_ptr.dtype.element_ty
    )
    kept = (nothing, nothing, nothing)
    num_before = 0
    if tiles.NUM_COLUMNS is not None:
        num_before = tl.load(computed_tokens_ptr + request * stride_computed)
    if block == 0:
        kept = kept_inputs(
            initial_ptr,
            positions,
            has_initial,
            num_before,
            stride_states_column,
            WIDTH,
            tiles.NUM_COLUMNS,
        )
    # All inputs of a run are loaded, each of them once, before a result is stored.
    sources = (positions + (1 - WIDTH)).to(tl.int64)
    source_ptr = x_ptr + sources * stride_x_token
    if input_gates_ptr is not None:
        source_gates_ptr = input_gates_ptr + sources * stride_input_gates
    inputs = ()
    for t in tl.static_range(1 - WIDTH, RUN_TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
        live = (positions + t < num_tokens) & is_dim
        if t < 0:
            live = live & (positions + t >= 0)
        source = tl.load(source_ptr, mask=live, other=0.0)  # [rows, D]
        source_ptr += stride_x_token
        if input_gates_ptr is not None:
            source = gated(source, tl.load(source_gates_ptr, mask=live, other=0.0))
            source_gates_ptr += stride_input_gates
        inputs += (source,)
    weights = conv_weights(
        filters.weight_ptr,
        channels,
        is_channel,
        tiles.stride_weight_dim,
        tiles.stride_weight_column,
        WIDTH,
        tiles.BLOCK_D,
    )
    bias = tl.full([1, tiles.BLOCK_D], 0.0, tl.float32)
    if filters.bias_ptr is not None:
        bias = tl.load(filters.bias_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    window = ()
    for t in tl.static_range(WIDTH - 1):  # pyright: ignore[reportGeneralTypeIssues]
        window += (inputs[t].to(tl.float32) + kept[t].to(tl.float32),)
    for t in tl.static_range(RUN_TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
        window += (inputs[WIDTH - 1 + t].to(tl.float32),)
        acc = bias
        for tap in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
            acc += window[t + tap] * weights[4 - WIDTH + tap][None, :]
        if tiles.IS_SILU:
            acc = silu(acc)
        live = (positions + t < num_tokens) & is_dim
        if output_gates_ptr is not None:
            acc *= tl.load(output_gates_ptr, mask=live, other=0.0).to(tl.float32)
            output_gates_ptr += stride_output_gates
        tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=live)
        out_ptr += stride_out_token
    if block > 0:
        return

    columns = tl.arange(0, tiles.BLOCK_W)[:, None]  # [W, 1]
    is_column = columns < WIDTH - 1
    before = column_offsets(columns, num_before, stride_states_column, WIDTH, tiles.NUM_COLUMNS)
    is_kept = has_input(columns, num_before, has_initial & is_column, WIDTH, tiles.NUM_COLUMNS)
    initial = tl.load(initial_ptr + before, mask=is_kept, other=0.0)  # [W, D]
    # All threads must have read the state before one writes, because the slots may be the same.
    tl.debug_barrier()
    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    for s in range(stretch, last_stretch + 1):
        after, slot = stretch_end(
            s,
            last_stretch,
            checkpoints.checkpoint_after_ptr,
            checkpoints.checkpoint_slots_ptr,
            num_tokens,
            final_slot,
        )
        last_inputs = after + (1 - WIDTH) + columns
        in_x = is_column & (last_inputs >= 0)
        places = x_ptr + last_inputs.to(tl.int64) * stride_x_token
        newer = tl.load(places, mask=in_x & is_dim, other=0.0)  # [W, D]
        if input_gates_ptr is not None:
            places = input_gates_ptr + last_inputs.to(tl.int64) * stride_input_gates
            newer = gated(newer, tl.load(places, mask=in_x & is_dim, other=0.0))
        newer = newer.to(tl.float32)
        older = tl.broadcast_to(
            tl.minimum(after + columns, tiles.BLOCK_W - 1), [tiles.BLOCK_W, tiles.BLOCK_D]
        )
        state = tl.where(in_x, newer, tl.gather(initial, older, 0).to(tl.float32))
        state_ptr = states_ptr + page_offsets(slot, stride_states_slot) + in_page
        num_after = num_before + after
        state_ptr += column_offsets(
            columns, num_after, stride_states_column, WIDTH, tiles.NUM_COLUMNS
        )
        state = state.to(states_ptr.dtype.element_ty)
        is_kept = mask_if(slot > 0, is_column & is_dim)
        is_kept = has_input(columns, num_after, is_kept, WIDTH, tiles.NUM_COLUMNS)
        tl.store(state_ptr, state, mask=is_kept)
