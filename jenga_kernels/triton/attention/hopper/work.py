# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""The work of the prefill kernel for Hopper: row tiles, and the keys that their rows read.

The warp that loads finds the row tiles of a program, and the first key of each. It passes them
through shared memory to the warps that multiply. Otherwise these would wait for one load after
another, and most where rows read few keys. Arguments of the search are passed around as `work`:
(first queries and lengths of requests, requests and indices of row tiles, spans or None, number of
row tiles of all heads, number of programs).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jenga_kernels.triton.lib.tiles import SPECIALIZED_ROWS

ROWS = gl.constexpr(SPECIALIZED_ROWS)
"""Rows of a row tile."""


ITEM_NUMBERS = gl.constexpr(8)
"""Number of integers that describe a row tile.

They are request, KV head, first row, first query, number of queries, length, first key of its key
tiles, and number of key tiles. The request is -1 after the last row tile.
"""

ITEM_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Layout of two descriptions in shared memory, [2, ITEM_NUMBERS]: one is written while the row tile
of the other is computed."""


@gluon.jit
def say(items, place, numbers, NUM_WARPS: gl.constexpr = 1):
    """Write the description of a row tile, by the warps that load."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    index = gl.arange(0, ITEM_NUMBERS, layout)
    item = gl.full([ITEM_NUMBERS], -1, gl.int32, layout)
    for i in gl.static_range(len(numbers)):
        item = gl.where(index == i, numbers[i], item)
    items.index(place).store(item)


@gluon.jit
def said(items, place):
    """Read the description of a row tile; every thread gets all its numbers."""
    layout: gl.constexpr = gl.BlockedLayout([ITEM_NUMBERS], [32], [4], [0])
    item = items.index(place).load(layout)
    index = gl.arange(0, ITEM_NUMBERS, layout)
    numbers = ()
    for i in gl.static_range(ITEM_NUMBERS):
        numbers += (gl.sum(gl.where(index == i, item, 0), 0),)
    return numbers


@gluon.jit
def first_visible(positions, window_tokens, chunk_tokens):
    """First key that the query at each position reads."""
    first = positions * 0
    if window_tokens is not None:
        first = gl.maximum(first, positions - window_tokens + 1)
    if chunk_tokens is not None:
        first = gl.maximum(first, gl.maximum(positions, 0) // chunk_tokens * chunk_tokens)
    return first


@gluon.jit
def end_visible(positions, seq_len, IS_CAUSAL: gl.constexpr):
    """End of the keys that the query at each position reads, one past the last."""
    if IS_CAUSAL:
        return gl.minimum(positions + 1, seq_len)
    else:
        return positions * 0 + seq_len


@gluon.jit
def num_rounds(work):
    """Most row tiles of a program."""
    _, _, _, _, _, num_items, num_programs = work
    return gl.cdiv(num_items, num_programs)


@gluon.jit
def place_of(round_index, work, NUM_KV_HEADS: gl.constexpr):
    """Find a row tile: KV head, request, first row, the request's first query, number of queries.

    Row tiles of the list become shorter from one to the next. In every other round, programs take
    them in reverse, so a program has a longer one after a shorter one. The request is -1 if there
    is no work.
    """
    query_starts_ptr, _, row_tile_requests_ptr, row_tile_indices_ptr, _, num_items, num_programs = (
        work
    )
    program = gl.program_id(0)
    in_round = gl.where(round_index % 2 == 0, program, num_programs - 1 - program)
    item = round_index * num_programs + in_round
    row_tile = item // NUM_KV_HEADS
    is_there = item < num_items
    request = gl.load(row_tile_requests_ptr + row_tile, mask=is_there, other=-1)
    row_start = gl.load(row_tile_indices_ptr + row_tile, mask=is_there, other=0)
    starts_ptr = query_starts_ptr + gl.maximum(request, 0)
    query_start = gl.load(starts_ptr)
    query_end = gl.load(starts_ptr + 1)
    return item % NUM_KV_HEADS, request, row_start * ROWS, query_start, query_end - query_start


@gluon.jit
def keys_of(
    row_start,
    query_start,
    query_len,
    seq_len,
    work,
    window_tokens,
    chunk_tokens,
    GROUP: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr,
):
    """Keys [start, end) that any row of a row tile reads, first key and number of its key tiles."""
    _, _, _, _, spans_ptr, _, _ = work
    offset = seq_len - query_len
    last_token = gl.minimum((row_start + ROWS - 1) // GROUP, query_len - 1)
    start = first_visible(offset + row_start // GROUP, window_tokens, chunk_tokens)
    end = gl.maximum(end_visible(offset + last_token, seq_len, IS_CAUSAL), 0)
    if spans_ptr is not None:
        layout: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
        rows = row_start + gl.arange(0, ROWS, layout)
        tokens = query_start + gl.minimum(rows // GROUP, query_len - 1)
        span_starts = gl.maximum(gl.load(spans_ptr + tokens.to(gl.int64) * 2), 0)
        span_ends = gl.minimum(gl.load(spans_ptr + tokens.to(gl.int64) * 2 + 1), seq_len)
        has_span = span_starts < span_ends
        start = gl.minimum(start, gl.min(gl.where(has_span, span_starts, seq_len), 0))
        end = gl.maximum(end, gl.max(gl.where(has_span, span_ends, 0), 0))
    tiles_start = start // BLOCK_T * BLOCK_T
    # Rows without keys read a tile of zeros.
    return start, end, tiles_start, gl.maximum(gl.cdiv(end - tiles_start, BLOCK_N), 1)
