"""Kernel of `jenga_kernels.plan_attention`: work lists of a step."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.attention.groups import DecodeWork, RowWork
from jenga_kernels.triton.attention.tile import first_visible
from jenga_kernels.triton.lib.addressing import first_tile_key
from jenga_kernels.triton.lib.device import ceil_div, device_function
from jenga_kernels.triton.lib.groups import with_groups

MAX_SPLITS = tl.constexpr(8)
"""Most splits of a request's keys in batch-invariant mode. It bounds the memory for partial
results."""

MIN_SPLIT_TILES = tl.constexpr(4)
"""Fewest tiles of a split in batch-invariant mode."""


@device_function
def decode_keys(
    query_len,
    seq_len,
    window_tokens,
    chunk_tokens,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """First key of a decoding request, first key of its tiles, and number of tiles, at least 1."""
    keys_start = first_visible(seq_len - query_len, window_tokens, chunk_tokens)
    tiles_start = first_tile_key(keys_start, PAGE_TOKENS, BLOCK_N, False)
    num_tiles = tl.maximum(1, ceil_div(seq_len - tiles_start, BLOCK_N))
    return keys_start, tiles_start, num_tiles


@device_function
def invariant_split_tiles(num_tiles):
    """Number of tiles of one split of a request's keys, from the request alone."""
    num_splits = tl.minimum(MAX_SPLITS, ceil_div(num_tiles, MIN_SPLIT_TILES))
    return ceil_div(num_tiles, num_splits)


@device_function
def partial_index(program, pair, first_program):
    """Index of `program`'s partial result of a split pair, which begins in `first_program`.

    The index grows from one partial result to the next. Within a pair, the program grows. From one
    split pair to the next, both the pair and its first program grow. The index is less than twice
    the number of programs.
    """
    return program + tl.minimum(pair, first_program)


@device_function
def next_run(
    program,
    unit,
    program_end,
    units_per_program,
    request,
    query_starts_ptr,  # i32[num_requests + 1]
    seq_lens_ptr,  # i32[num_requests]
    unit_starts_ptr,  # i32[num_requests + 1]
    window_tokens,
    chunk_tokens,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Find the next work of a decode program from `unit` on.

    The unit belongs to `request` or a later one.

    Returns:
        The request, the KV head, and the tiles [start, end) of its keys. Then the number of units
        of this work, the number of units of the pair, and the index of the partial result. There is
        a partial result only if the two numbers differ.
    """
    units_end = tl.load(unit_starts_ptr + request + 1)
    while unit >= units_end * NUM_KV_HEADS:
        request += 1
        units_end = tl.load(unit_starts_ptr + request + 1)
    units_before = tl.load(unit_starts_ptr + request)
    num_units = units_end - units_before
    unit_in_request = unit - units_before * NUM_KV_HEADS
    kv_head = unit_in_request // num_units
    unit_in_pair = unit_in_request - kv_head * num_units
    pair = request * NUM_KV_HEADS + kv_head
    if IS_INVARIANT:
        query_len = tl.load(query_starts_ptr + request + 1) - tl.load(query_starts_ptr + request)
        seq_len = tl.load(seq_lens_ptr + request)
        _, _, num_tiles = decode_keys(
            query_len, seq_len, window_tokens, chunk_tokens, PAGE_TOKENS, BLOCK_N
        )
        units_done = 1
        split_tiles = invariant_split_tiles(num_tiles)
        tile_start = unit_in_pair * split_tiles
        tile_end = tl.minimum(num_tiles, tile_start + split_tiles)
        partial = pair * MAX_SPLITS + unit_in_pair
    else:
        units_done = tl.minimum(num_units - unit_in_pair, program_end - unit)
        tile_start = unit_in_pair
        tile_end = unit_in_pair + units_done
        partial = partial_index(program, pair, (unit - unit_in_pair) // units_per_program)
    return request, kv_head, tile_start, tile_end, units_done, num_units, partial


@device_function
def _units(
    requests,
    query_starts_ptr,
    seq_lens_ptr,
    window_tokens,
    chunk_tokens,
    num_requests,
    GROUP: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Units of decode work per KV head, and tiles of prefill rows, of each request."""
    live = requests < num_requests
    query_lens = tl.load(query_starts_ptr + requests + 1, mask=live, other=0) - tl.load(
        query_starts_ptr + requests, mask=live, other=0
    )
    seq_lens = tl.load(seq_lens_ptr + requests, mask=live, other=0)
    _, _, units = decode_keys(
        query_lens, seq_lens, window_tokens, chunk_tokens, PAGE_TOKENS, BLOCK_N
    )
    if IS_INVARIANT:
        units = ceil_div(units, invariant_split_tiles(units))
    units = tl.where((query_lens > 0) & (query_lens <= QUERY_TOKENS), units, 0)
    row_tiles = tl.where(query_lens > QUERY_TOKENS, ceil_div(query_lens * GROUP, BLOCK_M), 0)
    return units, row_tiles


class PlanTiles(NamedTuple):
    """Tiles and flags for which `attention_plan_kernel` is compiled."""

    NUM_KV_HEADS: int
    GROUP: int
    QUERY_TOKENS: int
    PAGE_TOKENS: int
    IS_INVARIANT: bool
    BLOCK_N: int
    BLOCK_M: int
    BLOCK_REQUESTS: int
    BLOCK_ENTRIES: int


# Counts differ from step to step and must not cause another compilation.
@with_groups(work=DecodeWork, row_work=RowWork, tiles=PlanTiles)
@triton.jit(do_not_specialize=["num_requests", "num_programs", "max_row_tiles"])
def attention_plan_kernel(
    # Outputs
    work,
    row_work,
    # Inputs
    query_starts_ptr,  # i32[num_requests + 1]
    seq_lens_ptr,  # i32[num_requests]
    # Scalars
    window_tokens,
    chunk_tokens,
    # Sizes
    num_requests,
    num_programs,
    max_row_tiles,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Make entries from p * BLOCK_ENTRIES on of each list in program p, and sums in program 0.

    The sums are the prefix sums of decode work. Every program counts all requests itself, so no
    program waits for another.
    """
    total = 0
    for block in range(0, num_requests, tiles.BLOCK_REQUESTS):
        units, _ = _units(
            block + tl.arange(0, tiles.BLOCK_REQUESTS),
            query_starts_ptr,
            seq_lens_ptr,
            window_tokens,
            chunk_tokens,
            num_requests,
            tiles.GROUP,
            tiles.QUERY_TOKENS,
            tiles.PAGE_TOKENS,
            tiles.IS_INVARIANT,
            tiles.BLOCK_N,
            tiles.BLOCK_M,
        )
        total += tl.sum(units, 0)
    units_per_program = tl.maximum(1, ceil_div(total * tiles.NUM_KV_HEADS, num_programs))

    entries = tl.program_id(0) * tiles.BLOCK_ENTRIES + tl.arange(0, tiles.BLOCK_ENTRIES)
    positions = entries * units_per_program  # i32[BLOCK_ENTRIES], flat, over requests and heads
    first_requests = tl.full([tiles.BLOCK_ENTRIES], 0, tl.int32)
    row_tile_requests = tl.full([tiles.BLOCK_ENTRIES], 0, tl.int32)
    row_tile_ends = tl.full([tiles.BLOCK_ENTRIES], 2147483647, tl.int32)
    units_before = 0
    row_tiles_before = 0
    for block in range(0, num_requests, tiles.BLOCK_REQUESTS):
        requests = block + tl.arange(0, tiles.BLOCK_REQUESTS)
        units, row_tiles = _units(
            requests,
            query_starts_ptr,
            seq_lens_ptr,
            window_tokens,
            chunk_tokens,
            num_requests,
            tiles.GROUP,
            tiles.QUERY_TOKENS,
            tiles.PAGE_TOKENS,
            tiles.IS_INVARIANT,
            tiles.BLOCK_N,
            tiles.BLOCK_M,
        )
        live = requests < num_requests
        unit_ends = units_before + tl.cumsum(units, 0)  # i32[BLOCK_REQUESTS]
        ends = row_tiles_before + tl.cumsum(row_tiles, 0)  # i32[BLOCK_REQUESTS]
        if tl.program_id(0) == 0:
            tl.store(work.unit_starts_ptr + requests, unit_ends - units, mask=live)
        is_before = (unit_ends * tiles.NUM_KV_HEADS)[None, :] <= positions[:, None]
        first_requests += tl.sum((is_before & live[None, :]).to(tl.int32), 1)
        is_before = ends[None, :] <= entries[:, None]
        row_tile_requests += tl.sum((is_before & live[None, :]).to(tl.int32), 1)
        after = tl.where(is_before, 2147483647, ends[None, :])
        row_tile_ends = tl.minimum(row_tile_ends, tl.min(after, 1))
        units_before += tl.sum(units, 0)
        row_tiles_before += tl.sum(row_tiles, 0)

    if tl.program_id(0) == 0:
        tl.store(work.unit_starts_ptr + num_requests, total)
        tl.store(work.units_per_program_ptr, units_per_program)
    first_requests = tl.minimum(first_requests, tl.maximum(num_requests - 1, 0))
    tl.store(work.first_requests_ptr + entries, first_requests, mask=entries < num_programs)
    # The last rows of a request read the most keys, so they begin first.
    is_used = entries < row_tiles_before
    mask = entries < max_row_tiles
    tl.store(
        row_work.row_tile_requests_ptr + entries,
        tl.where(is_used, row_tile_requests, -1),
        mask=mask,
    )
    tl.store(row_work.row_tile_indices_ptr + entries, row_tile_ends - 1 - entries, mask=mask)
