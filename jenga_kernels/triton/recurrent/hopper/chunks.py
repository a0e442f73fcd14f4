# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Copies, step sizes and states of a chunk, shared by kernels of recurrent layers on Hopper."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jenga_kernels.triton.attention.hopper.load import BOX_DIM, HAS_REINTERPRET, copy_box
from jenga_kernels.triton.recurrent.tiles import CHUNK_CHANNELS as _CHANNELS
from jenga_kernels.triton.recurrent.tiles import CHUNK_TOKENS as _TOKENS

TOKENS = gl.constexpr(_TOKENS)
"""Tokens of a chunk."""

CHANNELS = gl.constexpr(_CHANNELS)
"""Channels of a program, the rows of a matrix instruction of four warps."""

LOG2_E = gl.constexpr(1.4426950408889634)

LEAST_LOG2 = gl.constexpr(-126.0)
"""Least decay of a token, in powers of two. With less, the state before it would not matter."""

LEAST_DT = gl.constexpr(1e-37)
"""Step size that adds nothing and, unlike zero, has a logarithm."""

SQUARE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TOKENS, 16]))
"""Layout of products whose columns are tokens."""

LEFT_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, SQUARE_LAYOUT, 2))
"""Layout of the left operand of a product, in registers."""

TOKEN_LAYOUT = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])))
"""Layout of numbers of tokens. Every warp has all of them, so it sums them alone."""

TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Layout of tiles in shared memory."""

BOX_LAYOUT = gl.NVMMASharedLayout(128, 16, 3)
"""Layout of a box that TMA loads, [tokens, 1 head or group, BOX_DIM]."""

ZEROED_ROWS = gl.constexpr(16)
"""Rows of a tile that four warps zero at a time."""

ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Layout in which a tile of x or of the output is copied."""

NUMBERS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Layout of numbers of tokens in shared memory."""


@gluon.jit
def checkpoint_range(checkpoint_starts_ptr, request):
    """First of a request's checkpoints, and their end; both 0 if there are none."""
    first = 0
    end = 0
    if checkpoint_starts_ptr is not None:
        first = gl.load(checkpoint_starts_ptr + request)
        end = gl.load(checkpoint_starts_ptr + request + 1)
    return first, end


@gluon.jit
def stretch_stop(stretch, end, checkpoint_after_ptr, num_tokens):
    """Number of tokens after which a stretch ends: at a checkpoint, or with the request."""
    stop = num_tokens
    if checkpoint_after_ptr is not None:
        stop = gl.load(checkpoint_after_ptr + stretch, mask=stretch < end, other=num_tokens)
    return stop


@gluon.jit
def zero_rows(
    tiles,
    stage,
    start,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    NUM_STAGES: gl.constexpr = 2,
):
    """Zero rows of a chunk from `start` on. They belong to no token, and may hold NaN."""
    NUM_BOXES: gl.constexpr = TOKENS // ZEROED_ROWS
    NUM_PARTS: gl.constexpr = PARTS * BLOCK_N // BOX_DIM
    shape: gl.constexpr = [NUM_STAGES * NUM_PARTS * NUM_BOXES, ZEROED_ROWS, BOX_DIM]
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
def store_rows(tile, ptr, stride_token, num_live):
    """Write the live rows of a tile of CHANNELS columns."""
    NUM_ROWS: gl.constexpr = 1024 // CHANNELS
    row = gl.arange(0, NUM_ROWS, gl.SliceLayout(1, ROW_LAYOUT))[:, None]
    columns = gl.arange(0, CHANNELS, gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    offsets = row * stride_token.to(gl.int32) + columns
    for first in gl.static_range(0, TOKENS, NUM_ROWS):
        values = tile.slice(first, NUM_ROWS).load(ROW_LAYOUT)
        gl.store(ptr + first * stride_token + offsets, values, mask=row < num_live - first)


@gluon.jit
def store_zeros(ptr, first, stop, stride_token):
    """Zero CHANNELS columns of rows [first, stop)."""
    rows = gl.arange(0, TOKENS, gl.SliceLayout(1, ROW_LAYOUT))
    columns = gl.arange(0, CHANNELS, gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    for tile in range(first, stop, TOKENS):
        row = (tile + rows)[:, None]
        zeros = gl.full([TOKENS, CHANNELS], 0.0, ptr.dtype.element_ty, ROW_LAYOUT)
        gl.store(ptr + row * stride_token + columns, zeros, mask=row < stop)


@gluon.jit
def load_tile(
    descriptor,
    token,
    row,
    first_column,
    tiles,
    stage,
    barrier,
    NUM_STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr = 1,
):
    """Start loads of PARTS * BLOCK_N columns of a head or group, tokens [token, token + TOKENS).

    The tiles of a stage consist of boxes: the first BOX_DIM columns, then the next.
    """
    NUM_BOXES: gl.constexpr = PARTS * BLOCK_N // BOX_DIM
    shape: gl.constexpr = [NUM_STAGES * NUM_BOXES, TOKENS, 1, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = tiles.reinterpret(tiles.dtype, shape, descriptor.layout)
    else:
        boxes = tiles._reinterpret(tiles.dtype, shape, descriptor.layout)
    for box in gl.static_range(NUM_BOXES):
        place = boxes.index(stage * NUM_BOXES + box)
        copy_box(descriptor, [token, row, first_column + box * BOX_DIM], barrier, place)


@gluon.jit
def load_steps(dt_ptr, stride_dt_token, first, num_tokens):
    """Load projected step sizes of tokens from `first` on."""
    tokens = first + gl.arange(0, TOKENS, TOKEN_LAYOUT)
    steps = gl.load(dt_ptr + tokens * stride_dt_token, mask=tokens < num_tokens, other=0.0)
    return steps.to(gl.float32)


@gluon.jit
def decays(
    steps, first, stop, step_size, rate, IS_SOFTPLUS: gl.constexpr, HAS_LIMITS: gl.constexpr
):
    """Compute decays of the tokens of a chunk, as logarithms to base two.

    Returns:
        The decay from the chunk's start through each token, the same minus the logarithm of the
        token's step size, and the decay of the whole chunk.
    """
    dt_bias, dt_min, dt_max = step_size
    dt = steps + dt_bias
    if IS_SOFTPLUS:
        dt = _softplus(dt)
    if HAS_LIMITS or not IS_SOFTPLUS:
        dt = gl.minimum(gl.maximum(dt, dt_min), dt_max)
    # A token past the stretch gets step size zero, which leaves the state as it is.
    tokens = first + gl.arange(0, TOKENS, TOKEN_LAYOUT)
    dt = gl.where(tokens < stop, dt, 0.0)
    logs = gl.maximum(dt * rate, LEAST_LOG2)
    # Scans take tiles, here of a single column.
    logs = gl.sum(gl.associative_scan(logs[:, None], 0, _sum), 1)
    # log2(dt) is added to the decay. A separate vector would be computed again for every column.
    return logs, logs - gl.log2(gl.maximum(dt, LEAST_DT)), gl.min(logs, 0)


@gluon.jit
def exp2(powers):
    """Two to these powers, 0 where that is less than a normal number, in one instruction."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [powers], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _softplus(v):
    """Do what `recurrence.softplus` does."""
    u = exp2(gl.abs(v) * -LOG2_E)
    s = u * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [2.0 + u], dtype=gl.float32, is_pure=True, pack=1
    )
    z = s * s
    series = 0.28178326 * z + 0.27960605
    series = (series * z + 0.4002491) * z + 0.66666315
    return gl.maximum(v, 0.0) + s * (series * z + 2.0)


@gluon.jit
def mixing_weights(scores, shared_logs, shared_ahead):
    """Weight of a row's token in a column's: their score times step size and decay."""
    logs = shared_logs.load(gl.SliceLayout(0, SQUARE_LAYOUT))
    ahead = shared_ahead.load(gl.SliceLayout(1, SQUARE_LAYOUT))
    adding = gl.arange(0, TOKENS, gl.SliceLayout(1, SQUARE_LAYOUT))[:, None]
    taking = gl.arange(0, TOKENS, gl.SliceLayout(0, SQUARE_LAYOUT))[None, :]
    exponent = gl.where(taking >= adding, logs[None, :] - ahead[:, None], float("-inf"))
    return scores * exp2(exponent)


@gluon.jit
def _state_offsets(stride_states_dim, BLOCK_N: gl.constexpr):
    """Offsets of the elements of a state, [CHANNELS, BLOCK_N]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dims = gl.arange(0, CHANNELS, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))[None, :]
    return dims * stride_states_dim + columns


@gluon.jit
def load_state(ptr, is_live, stride_dim, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Load a state from `ptr` as PARTS tiles f32[CHANNELS, BLOCK_N]; zeros if not `is_live`."""
    offsets = _state_offsets(stride_dim, BLOCK_N)
    parts = ()
    for part in gl.static_range(PARTS):
        ptrs = ptr + part * BLOCK_N + offsets
        parts += (gl.load(ptrs, mask=is_live, other=0.0).to(gl.float32),)
    return parts


@gluon.jit
def store_state(ptr, parts, is_live, stride_dim, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Store a state as `load_state` gives it, rounded to the states' type, if `is_live`."""
    offsets = _state_offsets(stride_dim, BLOCK_N)
    for part in gl.static_range(PARTS):
        ptrs = ptr + part * BLOCK_N + offsets
        gl.store(ptrs, parts[part].to(ptr.dtype.element_ty), mask=is_live)


def chunk_descriptor(rows: torch.Tensor) -> TensorDescriptor:
    """Make the TMA descriptor for rows of TOKENS tokens, BOX_DIM elements each.

    Args:
        rows: Inputs or projections, [num_tokens, num_heads, width], of 16 bits an element; any
            strides that are multiples of 16 bytes, last dimension contiguous.
    """
    # PyTorch leaves the stride of a dimension of size one undefined, but TMA reads it.
    strides = [
        stride if size > 1 else BOX_DIM.value
        for size, stride in zip(rows.shape, rows.stride(), strict=True)
    ]
    block = [TOKENS.value, 1, BOX_DIM.value]
    return TensorDescriptor(rows, list(rows.shape), [*strides[:2], 1], block, BOX_LAYOUT)
