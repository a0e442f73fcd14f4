# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Gluon's layouts and loops are what its compiler takes them for.
"""Kernel of `jenga_kernels.state_scan` for Hopper, where a head decays as one: loads run ahead.

While a chunk is computed the next one's x, B and C come into shared memory. All that depends on the
chunk before is a product of the state with C and one that adds to it; the state stays in registers,
turned so that it is their left operand as it is. Written in Gluon, which nothing interprets:
`state_scan_heads` is its twin, and computes the same.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jenga_kernels.triton.attention_hopper_load import BOX_DIM, HAS_REINTERPRET, copy_box
from jenga_kernels.triton.state_tiles import CHUNK_CHANNELS as _CHANNELS
from jenga_kernels.triton.state_tiles import CHUNK_TOKENS as _TOKENS

TOKENS = gl.constexpr(_TOKENS)
"""Tokens of a chunk."""

CHANNELS = gl.constexpr(_CHANNELS)
"""Channels of a program, the rows of a matrix instruction of four warps."""

STEP_BYTES = gl.constexpr(16)
"""Of a token's step sizes that come together, those of some heads: the copy engine's least."""

ZEROED_ROWS = gl.constexpr(16)
"""Rows of a tile that four warps zero at a time."""

LOG2_E = gl.constexpr(1.4426950408889634)

LEAST_LOG2 = gl.constexpr(-126.0)
"""Decay of a token, in powers of two, below which the state before it counts for nothing."""

LEAST_DT = gl.constexpr(1e-37)
"""Step size that adds nothing; unlike zero it has a logarithm."""

SQUARE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TOKENS, 16]))
"""Of products whose columns are tokens."""

LEFT_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, SQUARE_LAYOUT, 2))
"""Of the left operand of a product, in registers."""

TOKEN_LAYOUT = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])))
"""Of numbers of tokens, which every warp has all of, so that it adds them up alone."""

ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""In which a tile of x or of the output is moved."""

TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Of tiles in shared memory."""

BOX_LAYOUT = gl.NVMMASharedLayout(128, 16, 3)
"""Of a box that the copy engine brings, [tokens, 1 head or group, BOX_DIM]."""

NUMBERS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Of numbers of tokens in shared memory."""


@gluon.jit(do_not_specialize=["dt_min", "dt_max"])
def state_scan_hopper_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    # Inputs
    x_descriptor,  # [num_tokens, num_heads, head_dim]
    dt_ptr,  # [num_tokens, num_heads]
    dt_descriptor,  # the same, or None: the copy engine cannot find these
    A_ptr,  # f32[num_heads]
    B_descriptor,  # [num_tokens, num_groups, d_state]
    C_descriptor,  # [num_tokens, num_groups, d_state]
    D_ptr,  # [num_heads, head_dim] or None
    dt_bias_ptr,  # [num_heads] or None
    query_starts_ptr,  # i32[num_requests + 1]
    initial_slots_ptr,  # i32[num_requests]
    state_slots_ptr,  # i32[num_requests]
    checkpoint_starts_ptr,  # i32[num_requests + 1] or None
    checkpoint_after_ptr,  # i32[num_checkpoints] or None
    checkpoint_slots_ptr,  # i32[num_checkpoints] or None
    # Scalars
    dt_min,
    dt_max,
    # Strides, in elements
    stride_out_token: gl.int64,
    stride_out_head: gl.int64,
    stride_states_slot: gl.int64,
    stride_states_head: gl.int64,
    stride_states_dim: gl.int64,
    stride_dt_token: gl.int64,
    stride_dt_head: gl.int64,
    stride_D_head: gl.int64,
    stride_D_dim: gl.int64,
    stride_dt_bias_head: gl.int64,
    stride_initial: gl.int64,
    stride_slots: gl.int64,
    # Tiles and flags
    HEADS_PER_GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    IS_SOFTPLUS: gl.constexpr,
    HAS_LIMITS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Program (b, r) scans request r in CHANNELS channels of one head, chunk by chunk."""
    BLOCKS: gl.constexpr = HEAD_DIM // CHANNELS
    dtype: gl.constexpr = x_descriptor.dtype
    head = (gl.program_id(0) // BLOCKS).to(gl.int64)
    first_dim = (gl.program_id(0) % BLOCKS) * CHANNELS
    request = gl.program_id(1)
    query_start = gl.load(query_starts_ptr + request)
    num_tokens = gl.load(query_starts_ptr + request + 1) - query_start
    state_slot = gl.load(state_slots_ptr + request * stride_slots)
    initial_slot = gl.load(initial_slots_ptr + request * stride_initial)
    out_ptr += query_start * stride_out_token + head * stride_out_head + first_dim
    rows = gl.arange(0, TOKENS, gl.SliceLayout(1, ROW_LAYOUT))
    columns = gl.arange(0, CHANNELS, gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    if state_slot <= 0:
        for first in range(0, num_tokens, TOKENS):
            row = (first + rows)[:, None]
            zeros = gl.full([TOKENS, CHANNELS], 0.0, out_ptr.dtype.element_ty, ROW_LAYOUT)
            gl.store(out_ptr + row * stride_out_token + columns, zeros, mask=row < num_tokens)
        return

    dt_ptr += query_start * stride_dt_token + head * stride_dt_head
    states_ptr += head * stride_states_head + first_dim * stride_states_dim
    inputs = (x_descriptor, B_descriptor, C_descriptor, dt_descriptor)
    place = (query_start, head.to(gl.int32), first_dim, (head // HEADS_PER_GROUP).to(gl.int32))
    rate = gl.load(A_ptr + head) * LOG2_E
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = gl.load(dt_bias_ptr + head * stride_dt_bias_head).to(gl.float32)
    step_size = (dt_bias, dt_min, dt_max)
    if D_ptr is not None:
        dims = gl.arange(0, CHANNELS, gl.SliceLayout(1, SQUARE_LAYOUT))
        D_ptr += head * stride_D_head + first_dim * stride_D_dim
        D = gl.load(D_ptr + dims * stride_D_dim).to(gl.float32)[:, None]

    x_tiles = gl.allocate_shared_memory(dtype, [2, TOKENS, CHANNELS], TILE_LAYOUT)
    B_tiles = gl.allocate_shared_memory(dtype, [2 * PARTS, TOKENS, BLOCK_N], TILE_LAYOUT)
    C_tiles = gl.allocate_shared_memory(dtype, [2 * PARTS, TOKENS, BLOCK_N], TILE_LAYOUT)
    dt_tiles = x_tiles
    if dt_descriptor is not None:
        dt_shape: gl.constexpr = [2, TOKENS, dt_descriptor.block_shape[1]]
        dt_tiles = gl.allocate_shared_memory(dt_descriptor.dtype, dt_shape, dt_descriptor.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    tiles = (x_tiles, B_tiles, C_tiles, dt_tiles, ready)
    mixing = gl.allocate_shared_memory(dtype, [TOKENS, TOKENS], TILE_LAYOUT)
    results = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [TOKENS, CHANNELS], TILE_LAYOUT)
    shared_logs = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)
    shared_ahead = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)

    stretch, last_stretch = _checkpoint_range(checkpoint_starts_ptr, request)
    stop = _stretch_stop(stretch, last_stretch, checkpoint_after_ptr, num_tokens)
    if num_tokens > 0:
        _load_chunk(inputs, place, tiles, 0, 0, BLOCK_N, PARTS)
    if dt_descriptor is None:
        steps = _load_steps(dt_ptr, stride_dt_token, 0, num_tokens)
        # The assembler has what follows from a load begin as soon as it is there, whatever waits.
        next_steps = _load_steps(dt_ptr, stride_dt_token, gl.minimum(TOKENS, stop), num_tokens)
    else:
        mbarrier.wait(ready.index(0), 0, pred=num_tokens > 0)
        steps = _steps_of(dt_tiles, 0, head)
    logs, ahead, last_log = _decays(steps, 0, stop, step_size, rate, IS_SOFTPLUS, HAS_LIMITS)
    h = _load_state(states_ptr, initial_slot, stride_states_slot, stride_states_dim, BLOCK_N, PARTS)
    chunk = 0
    start = 0
    for s in range(stretch, last_stretch + 1):
        slot = state_slot
        if checkpoint_after_ptr is not None and s < last_stretch:
            slot = gl.load(checkpoint_slots_ptr + s)
        stop_after = _stretch_stop(s + 1, last_stretch, checkpoint_after_ptr, num_tokens)
        for first in range(start, stop, TOKENS):
            stage = chunk % 2
            shared_logs.store(logs)
            shared_ahead.store(ahead)
            is_last = first + TOKENS >= stop
            next_first = gl.where(is_last, stop, first + TOKENS)
            next_stop = gl.where(is_last, stop_after, stop)
            if next_first < num_tokens:
                _load_chunk(inputs, place, tiles, 1 - stage, next_first, BLOCK_N, PARTS)
            if dt_descriptor is None:
                mbarrier.wait(ready.index(stage), (chunk // 2) & 1)
                first_after = gl.minimum(next_first + TOKENS, next_stop)
                steps_after = _load_steps(dt_ptr, stride_dt_token, first_after, num_tokens)
            if stop - first < TOKENS:
                _zero_rows(x_tiles, stage, stop - first, CHANNELS, 1)
                _zero_rows(B_tiles, stage, stop - first, BLOCK_N, PARTS)
                fence_async_shared()

            # What the chunk's tokens add to each other, in a row for each that adds.
            scores = gl.full([TOKENS, TOKENS], 0.0, gl.float32, SQUARE_LAYOUT)
            for part in gl.static_range(PARTS):
                b = B_tiles.index(stage * PARTS + part)
                c = C_tiles.index(stage * PARTS + part).permute((1, 0))
                scores = warpgroup_mma(b, c, scores, use_acc=part > 0, is_async=True)
            if PARTS > 1:  # registers have no room for more
                scores = warpgroup_mma_wait(0, deps=[scores])
                mixing.store(_mixing_weights(scores, shared_logs, shared_ahead).to(dtype))
            # And what the state before the chunk gives.
            y = gl.full([CHANNELS, TOKENS], 0.0, gl.float32, SQUARE_LAYOUT)
            for part in gl.static_range(PARTS):
                c = C_tiles.index(stage * PARTS + part).permute((1, 0))
                left = gl.convert_layout(h[part].to(dtype), LEFT_LAYOUT)
                y = warpgroup_mma(left, c, y, use_acc=part > 0, is_async=True)
                if PARTS == 1:
                    scores = warpgroup_mma_wait(1, deps=[scores])
                    mixing.store(_mixing_weights(scores, shared_logs, shared_ahead).to(dtype))
                y = warpgroup_mma_wait(0, deps=[y])
            fence_async_shared()
            y = y * _exp2(shared_logs.load(gl.SliceLayout(0, SQUARE_LAYOUT)))[None, :]
            x = x_tiles.index(stage).permute((1, 0)).load(LEFT_LAYOUT)
            shares = _exp2(last_log - shared_ahead.load(gl.SliceLayout(0, LEFT_LAYOUT)))
            kept = (x.to(gl.float32) * shares[None, :]).to(dtype)
            y = warpgroup_mma(x, mixing, y, is_async=True)
            decay = _exp2(last_log)
            state = ()
            for part in gl.static_range(PARTS):
                b = B_tiles.index(stage * PARTS + part)
                state += (warpgroup_mma(kept, b, h[part] * decay, is_async=True),)
            if dt_descriptor is not None:
                has_next = next_first < num_tokens
                mbarrier.wait(ready.index(1 - stage), ((chunk + 1) // 2) & 1, pred=has_next)
                next_steps = _steps_of(dt_tiles, 1 - stage, head)
            logs, ahead, last_log = _decays(
                next_steps, next_first, next_stop, step_size, rate, IS_SOFTPLUS, HAS_LIMITS
            )
            if dt_descriptor is None:
                next_steps = steps_after
            y = warpgroup_mma_wait(PARTS, deps=[y])
            if D_ptr is not None:
                y += D * gl.convert_layout(x, SQUARE_LAYOUT).to(gl.float32)
            results.permute((1, 0)).store(y.to(results.dtype))
            _store_rows(results, out_ptr + first * stride_out_token, stride_out_token, stop - first)
            h = ()
            for part in gl.static_range(PARTS):
                h += (warpgroup_mma_wait(PARTS - 1 - part, deps=[state[part]]),)
            chunk += 1
        start = stop
        stop = stop_after
        _store_state(states_ptr, slot, h, stride_states_slot, stride_states_dim, BLOCK_N, PARTS)


@gluon.jit
def _checkpoint_range(checkpoint_starts_ptr, request):
    """First of a request's checkpoints, and the end; both 0 where there are none."""
    first = 0
    end = 0
    if checkpoint_starts_ptr is not None:
        first = gl.load(checkpoint_starts_ptr + request)
        end = gl.load(checkpoint_starts_ptr + request + 1)
    return first, end


@gluon.jit
def _stretch_stop(stretch, end, checkpoint_after_ptr, num_tokens):
    """Tokens after which a stretch ends: at a checkpoint, or with the request."""
    stop = num_tokens
    if checkpoint_after_ptr is not None:
        stop = gl.load(checkpoint_after_ptr + stretch, mask=stretch < end, other=num_tokens)
    return stop


@gluon.jit
def _load_chunk(inputs, place, tiles, stage, first, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Ask for x, B and C of tokens [first, first + TOKENS)."""
    x_descriptor, B_descriptor, C_descriptor, dt_descriptor = inputs
    query_start, head, first_dim, group = place
    x_tiles, B_tiles, C_tiles, dt_tiles, ready = tiles
    barrier = ready.index(stage)
    token = query_start + first
    DT_BYTES: gl.constexpr = 0 if dt_descriptor is None else TOKENS * STEP_BYTES
    mbarrier.expect(barrier, TOKENS * (CHANNELS + 2 * PARTS * BLOCK_N) * 2 + DT_BYTES)
    if dt_descriptor is not None:
        first_head = head // dt_descriptor.block_shape[1] * dt_descriptor.block_shape[1]
        copy_box(dt_descriptor, [token, first_head], barrier, dt_tiles.index(stage))
    x_box = _boxes(x_tiles, x_descriptor, 2).index(stage)
    copy_box(x_descriptor, [token, head, first_dim], barrier, x_box)
    NUM_BOXES: gl.constexpr = PARTS * BLOCK_N // BOX_DIM
    for box in gl.static_range(NUM_BOXES):
        B_box = _boxes(B_tiles, B_descriptor, 2 * NUM_BOXES).index(stage * NUM_BOXES + box)
        copy_box(B_descriptor, [token, group, box * BOX_DIM], barrier, B_box)
        C_box = _boxes(C_tiles, C_descriptor, 2 * NUM_BOXES).index(stage * NUM_BOXES + box)
        copy_box(C_descriptor, [token, group, box * BOX_DIM], barrier, C_box)


@gluon.jit
def _boxes(tiles, descriptor, NUM_BOXES: gl.constexpr):
    """Tiles as the boxes that they are made up of: the first BOX_DIM columns, then the next."""
    shape: gl.constexpr = [NUM_BOXES, TOKENS, 1, BOX_DIM]
    if HAS_REINTERPRET:
        return tiles.reinterpret(tiles.dtype, shape, descriptor.layout)
    else:
        return tiles._reinterpret(tiles.dtype, shape, descriptor.layout)


@gluon.jit
def _zero_rows(tiles, stage, start, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Zero rows of a chunk from `start` on: what they hold is no token's, and may be no number."""
    NUM_BOXES: gl.constexpr = TOKENS // ZEROED_ROWS
    NUM_PARTS: gl.constexpr = PARTS * BLOCK_N // BOX_DIM
    shape: gl.constexpr = [2 * NUM_PARTS * NUM_BOXES, ZEROED_ROWS, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = tiles.reinterpret(tiles.dtype, shape, TILE_LAYOUT)
    else:
        boxes = tiles._reinterpret(tiles.dtype, shape, TILE_LAYOUT)
    rows = gl.arange(0, ZEROED_ROWS, gl.SliceLayout(1, ROW_LAYOUT))[:, None]
    for box in range(start // ZEROED_ROWS, NUM_BOXES):
        for part in range(NUM_PARTS):
            place = boxes.index((stage * NUM_PARTS + part) * NUM_BOXES + box)
            is_dead = box * ZEROED_ROWS + rows >= start
            place.store(gl.where(is_dead, 0.0, place.load(ROW_LAYOUT)).to(tiles.dtype))


@gluon.jit
def _store_rows(tile, ptr, stride_token, num_live):
    """Write the live rows of a tile, as `_load_rows` reads them."""
    NUM_ROWS: gl.constexpr = 1024 // CHANNELS
    row = gl.arange(0, NUM_ROWS, gl.SliceLayout(1, ROW_LAYOUT))[:, None]
    columns = gl.arange(0, CHANNELS, gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    offsets = row * stride_token.to(gl.int32) + columns
    for first in gl.static_range(0, TOKENS, NUM_ROWS):
        values = tile.slice(first, NUM_ROWS).load(ROW_LAYOUT)
        gl.store(ptr + first * stride_token + offsets, values, mask=row < num_live - first)


@gluon.jit
def _steps_of(dt_tiles, stage, head):
    """What `_load_steps` gives, of one head of those that came together."""
    HEADS: gl.constexpr = dt_tiles.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([2, HEADS], [32, 1], [1, 4], [1, 0])
    heads = gl.arange(0, HEADS, gl.SliceLayout(0, layout))
    steps = dt_tiles.index(stage).load(layout).to(gl.float32)
    steps = gl.sum(gl.where((heads == head % HEADS)[None, :], steps, 0.0), 1)
    return gl.convert_layout(steps, TOKEN_LAYOUT)


@gluon.jit
def _load_steps(dt_ptr, stride_dt_token, first, num_tokens):
    """Projected step sizes of tokens from `first` on."""
    tokens = first + gl.arange(0, TOKENS, TOKEN_LAYOUT)
    steps = gl.load(dt_ptr + tokens * stride_dt_token, mask=tokens < num_tokens, other=0.0)
    return steps.to(gl.float32)


@gluon.jit
def _decays(
    steps, first, stop, step_size, rate, IS_SOFTPLUS: gl.constexpr, HAS_LIMITS: gl.constexpr
):
    """What tokens of a chunk weigh, as logarithms to base two.

    Returns:
        The decay from the chunk's start through each token, that with the logarithm of the
        token's step size taken off, and the decay of the whole chunk.
    """
    dt_bias, dt_min, dt_max = step_size
    dt = steps + dt_bias
    if IS_SOFTPLUS:
        dt = _softplus(dt)
    if HAS_LIMITS or not IS_SOFTPLUS:
        dt = gl.minimum(gl.maximum(dt, dt_min), dt_max)
    # A token past the stretch has step size zero: the state stays.
    tokens = first + gl.arange(0, TOKENS, TOKEN_LAYOUT)
    dt = gl.where(tokens < stop, dt, 0.0)
    logs = gl.maximum(dt * rate, LEAST_LOG2)
    # A scan is of tiles, here of a single column.
    logs = gl.sum(gl.associative_scan(logs[:, None], 0, _sum), 1)
    # log2(dt) rides with the decay: a vector of its own would be computed anew for every column.
    return logs, logs - gl.log2(gl.maximum(dt, LEAST_DT)), gl.min(logs, 0)


@gluon.jit
def _exp2(powers):
    """Two to these, 0 where that is less than a normal number, in one instruction."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [powers], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _softplus(v):
    """As that of `recurrence`."""
    u = _exp2(gl.abs(v) * -LOG2_E)
    s = u * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [2.0 + u], dtype=gl.float32, is_pure=True, pack=1
    )
    z = s * s
    series = 0.28178326 * z + 0.27960605
    series = (series * z + 0.4002491) * z + 0.66666315
    return gl.maximum(v, 0.0) + s * (series * z + 2.0)


@gluon.jit
def _mixing_weights(scores, shared_logs, shared_ahead):
    """What the token of a row adds to that of a column: their score times step size and decay."""
    logs = shared_logs.load(gl.SliceLayout(0, SQUARE_LAYOUT))
    ahead = shared_ahead.load(gl.SliceLayout(1, SQUARE_LAYOUT))
    adding = gl.arange(0, TOKENS, gl.SliceLayout(1, SQUARE_LAYOUT))[:, None]
    taking = gl.arange(0, TOKENS, gl.SliceLayout(0, SQUARE_LAYOUT))[None, :]
    exponent = gl.where(taking >= adding, logs[None, :] - ahead[:, None], float("-inf"))
    return scores * _exp2(exponent)


@gluon.jit
def _state_offsets(stride_states_dim, BLOCK_N: gl.constexpr):
    """Where elements of a state lie, [CHANNELS, BLOCK_N]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dims = gl.arange(0, CHANNELS, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))[None, :]
    return dims * stride_states_dim + columns


@gluon.jit
def _load_state(
    states_ptr, slot, stride_slot, stride_dim, BLOCK_N: gl.constexpr, PARTS: gl.constexpr
):
    """A state as PARTS tiles f32[CHANNELS, BLOCK_N]; zeros of no slot."""
    states_ptr += slot.to(gl.int64) * stride_slot
    offsets = _state_offsets(stride_dim, BLOCK_N)
    parts = ()
    for part in gl.static_range(PARTS):
        ptrs = states_ptr + part * BLOCK_N + offsets
        parts += (gl.load(ptrs, mask=slot > 0, other=0.0).to(gl.float32),)
    return parts


@gluon.jit
def _store_state(
    states_ptr, slot, parts, stride_slot, stride_dim, BLOCK_N: gl.constexpr, PARTS: gl.constexpr
):
    """Store what `_load_state` gives, rounded to the states' element type; nowhere in no slot."""
    states_ptr += slot.to(gl.int64) * stride_slot
    offsets = _state_offsets(stride_dim, BLOCK_N)
    for part in gl.static_range(PARTS):
        ptrs = states_ptr + part * BLOCK_N + offsets
        gl.store(ptrs, parts[part].to(states_ptr.dtype.element_ty), mask=slot > 0)


def chunk_descriptor(rows: torch.Tensor) -> TensorDescriptor:
    """What the copy engine needs to know to find TOKENS tokens' parts of rows.

    Args:
        rows: Inputs or projections, [num_tokens, num_heads, width], of 16 bits an element; any
            strides that are multiples of 16 bytes, last dimension contiguous.
    """
    # PyTorch leaves the stride of a dimension of size one undefined; the engine reads it.
    strides = [
        stride if size > 1 else BOX_DIM.value
        for size, stride in zip(rows.shape, rows.stride(), strict=True)
    ]
    block = [TOKENS.value, 1, BOX_DIM.value]
    return TensorDescriptor(rows, list(rows.shape), [*strides[:2], 1], block, BOX_LAYOUT)


def steps_descriptor(dt: torch.Tensor) -> TensorDescriptor | None:
    """The same for step sizes; None: the copy engine cannot find them.

    Args:
        dt: Projected step sizes, [num_tokens, num_heads].
    """
    stride_token, stride_head = dt.stride()
    element_bytes = dt.element_size()
    is_aligned = dt.data_ptr() % 16 == 0 and stride_token * element_bytes % 16 == 0
    if dt.shape[1] == 1 or stride_head != 1 or stride_token <= 0 or not is_aligned:
        return None
    block = [TOKENS.value, STEP_BYTES.value // element_bytes]
    layout = gl.NVMMASharedLayout(0, 8 * element_bytes, 2)
    return TensorDescriptor(dt, list(dt.shape), [stride_token, 1], block, layout)
