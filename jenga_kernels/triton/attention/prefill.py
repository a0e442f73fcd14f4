"""Attention of requests with many query tokens: a tile of rows loops over all keys it reads."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.attention.groups import (
    HeadTerms,
    Inputs,
    Layer,
    Requests,
    Results,
    RowWork,
    Scales,
    Scores,
)
from jenga_kernels.triton.attention.tile import (
    PAIR,
    WIDE_HEAD,
    Pages,
    QueryRows,
    attend_tile,
    end_visible,
    finish_rows,
    first_visible,
    row_offsets,
)
from jenga_kernels.triton.lib.addressing import first_tile_key
from jenga_kernels.triton.lib.device import ceil_div, let_next_begin
from jenga_kernels.triton.lib.fp8 import as_pairs, joined_rows, split_rows
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.rows import load_rows, store_rows
from jenga_kernels.triton.lib.tiles import MIN_ROWS

_MIN_ROWS = tl.constexpr(MIN_ROWS)


class PrefillTiles(NamedTuple):
    """Tiles and flags for which `attention_prefill_kernel` is compiled."""

    VALUE_DIM: int
    READS_PAIRS: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int
    IS_FOLLOWED: bool


@with_groups(
    results=Results,
    inputs=Inputs,
    requests=Requests,
    row_work=RowWork,
    terms=HeadTerms,
    scales=Scales,
    scores=Scores,
    layer=Layer,
    tiles=PrefillTiles,
)
@triton.jit
def attention_prefill_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    results,
    # Inputs
    inputs,
    requests,
    row_work,
    terms,
    spans_ptr,  # i32[num_tokens, 2] or None
    scales,
    # Scalars
    scores,
    # Strides, in elements
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_pages_head: tl.int64,
    stride_scales_page: tl.int64,
    stride_scales_slot: tl.int64,
    stride_scales_head: tl.int64,
    stride_table_request: tl.int64,
    # Tiles and flags
    layer: tl.constexpr,
    tiles: tl.constexpr,
):
    """Compute a part of a row tile for KV head h in program (p, h).

    It is part p % VALUE_PARTS of tile p // VALUE_PARTS of the list: all scores, and VALUE_DIM
    elements of each result. The last part ends with the head and may repeat some elements of the
    part before it. All parts compute the same log-sum-exps.

    With IS_INVARIANT, a row's keys are summed in the same tiles whichever rows share its program.
    Other keys of these tiles do not change its result, to the last bit.

    With READS_PAIRS, elements of one byte are read as in decoding; see `attend_tile`.

    With IS_FOLLOWED, decoding requests begin on processors that have no prompts left.
    """
    k_pages_ptr = inputs.k_pages_ptr
    scale = scores.scale
    NUM_HEADS: tl.constexpr = layer.NUM_KV_HEADS * layer.GROUP
    VALUE_PARTS: tl.constexpr = (layer.RESULT_DIM + tiles.VALUE_DIM - 1) // tiles.VALUE_DIM
    STORED: tl.constexpr = k_pages_ptr.dtype.element_ty
    IS_INT4: tl.constexpr = tl.constexpr(STORED.is_uint8())
    IS_CONVERTED: tl.constexpr = tl.constexpr(inputs.q_ptr.dtype.element_ty != STORED)
    IS_SPLIT: tl.constexpr = tl.constexpr(
        tiles.READS_PAIRS
        and STORED.primitive_bitwidth == 8  # noqa: PLR2004
        and not IS_INT4
        and inputs.q_ptr.dtype.element_ty != tl.float32
        and layer.HEAD_DIM % 2 == 0
        and layer.RESULT_DIM % 2 == 0
        and tiles.BLOCK_V >= 2 * _MIN_ROWS
    )
    SPLIT: tl.constexpr = tl.constexpr(PAIR if IS_SPLIT else 1)
    HAS_SLOT_SCALES: tl.constexpr = tl.constexpr(scales.k_slot_scales_ptr is not None)
    IS_CROWDED: tl.constexpr = tiles.BLOCK_D >= WIDE_HEAD or (
        IS_CONVERTED and 2 * tiles.BLOCK_D >= WIDE_HEAD
    )
    let_next_begin(tiles.IS_FOLLOWED)
    kv_head = tl.program_id(1)
    row_tile = tl.program_id(0) // VALUE_PARTS
    part = tl.program_id(0) % VALUE_PARTS
    value_start = tl.minimum(part * tiles.VALUE_DIM, layer.RESULT_DIM - tiles.VALUE_DIM)
    values_ptr = inputs.v_pages_ptr + (value_start // 2 if IS_INT4 else value_start)
    if IS_SPLIT:
        k_pages_ptr = as_pairs(k_pages_ptr)
        values_ptr = as_pairs(values_ptr)
        # Strides are multiples of 16 bytes, and these products tell Triton so.
        stride_pages_page = stride_pages_page // 16 * 8
        stride_pages_slot = stride_pages_slot // 16 * 8
        stride_pages_head = stride_pages_head // 16 * 8
    request = tl.load(row_work.row_tile_requests_ptr + row_tile)
    if request < 0:
        return
    row_start = tl.load(row_work.row_tile_indices_ptr + row_tile) * tiles.BLOCK_M
    query_start = tl.load(requests.query_starts_ptr + request)
    query_len = tl.load(requests.query_starts_ptr + request + 1) - query_start
    seq_len = tl.load(requests.seq_lens_ptr + request)

    rows = row_start + tl.arange(0, tiles.BLOCK_M)
    live = rows < query_len * layer.GROUP
    # Rows past the end repeat the last one, so that they widen no range of keys.
    tokens_in_request = tl.minimum(rows // layer.GROUP, query_len - 1)
    positions = seq_len - query_len + tokens_in_request  # i32[BLOCK_M]
    heads = kv_head * layer.GROUP + rows % layer.GROUP  # i32[BLOCK_M]
    tokens = query_start + tokens_in_request  # i32[BLOCK_M]
    row_starts = first_visible(positions, scores.window_tokens, scores.chunk_tokens)
    row_ends = end_visible(positions, seq_len, layer.IS_CAUSAL)
    keys_start = tl.min(row_starts, 0)
    keys_end = tl.maximum(tl.max(row_ends, 0), 0)
    span_starts = None
    span_ends = None
    if spans_ptr is not None:
        span_starts = tl.maximum(tl.load(spans_ptr + tokens.to(tl.int64) * 2), 0)
        span_ends = tl.minimum(tl.load(spans_ptr + tokens.to(tl.int64) * 2 + 1), seq_len)
        has_span = span_starts < span_ends
        keys_start = tl.minimum(keys_start, tl.min(tl.where(has_span, span_starts, seq_len), 0))
        keys_end = tl.maximum(keys_end, tl.max(tl.where(has_span, span_ends, 0), 0))

    # Every row reads keys [full_start, full_end), so the tiles within need no mask.
    tiles_start = first_tile_key(keys_start, layer.PAGE_TOKENS, tiles.BLOCK_N, layer.IS_INVARIANT)
    num_tiles = ceil_div(tl.maximum(keys_end - tiles_start, 0), tiles.BLOCK_N)
    full_start = tl.max(row_starts, 0)
    full_end = tl.maximum(tl.min(row_ends, 0), 0)
    first_full = tl.minimum(ceil_div(full_start - tiles_start, tiles.BLOCK_N), num_tiles)
    end_full = tl.maximum(tl.maximum(full_end - tiles_start, 0) // tiles.BLOCK_N, first_full)

    q_offsets = row_offsets(tokens, heads, stride_q_token, stride_q_head)
    q = load_rows(
        inputs.q_ptr, q_offsets, live, layer.HEAD_DIM, tiles.BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    slopes = None
    if terms.alibi_slopes_ptr is not None:
        slopes = tl.load(terms.alibi_slopes_ptr + heads)
    if scales.k_scale_ptr is not None:
        scale = scale * tl.load(scales.k_scale_ptr + kv_head * layer.IS_PER_HEAD_SCALE)

    if IS_SPLIT:
        q = split_rows(q)
        acc = tl.full([tiles.BLOCK_M, tiles.BLOCK_V // 2], 0, tl.float32)
        acc = acc, acc
    else:
        acc = tl.full([tiles.BLOCK_M, tiles.BLOCK_V], 0, tl.float32)
    value_unit = 0.0
    row_max = tl.full([tiles.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.full([tiles.BLOCK_M], 0, tl.float32)
    head_offset = kv_head.to(tl.int64) * stride_pages_head
    k_scales_ptr = None
    v_scales_ptr = None
    if HAS_SLOT_SCALES:
        k_scales_ptr = scales.k_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
        v_scales_ptr = scales.v_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
    table_row_ptr = requests.page_table_ptr + request.to(tl.int64) * stride_table_request
    is_bounded: tl.constexpr = scores.window_tokens is not None or scores.chunk_tokens is not None
    for phase in tl.static_range(3):
        if phase == 0:
            phase_start = 0
            phase_end = first_full
        elif phase == 1:
            phase_start = first_full
            phase_end = end_full
        else:
            phase_start = end_full
            phase_end = num_tiles
        # Without a window, there are no masked tiles before the full ones.
        if phase > 0 or is_bounded:
            # Hoisted addresses of a wide head's queries in shared memory would take 64 registers.
            # Heads half as wide have these to spare, unless keys are converted.
            for tile in tl.range(  # pyright: ignore[reportGeneralTypeIssues]
                phase_start, phase_end, disable_licm=IS_CROWDED
            ):
                acc, row_max, row_sum, value_unit, _ = attend_tile(
                    acc,
                    row_max,
                    row_sum,
                    value_unit,
                    0.0,
                    QueryRows(
                        q=q,
                        q_sums=None,
                        positions=positions,
                        row_starts=row_starts if is_bounded else None,
                        row_ends=row_ends,
                        span_starts=span_starts,
                        span_ends=span_ends,
                        slopes=slopes,
                    ),
                    Pages(
                        k_pages_ptr=k_pages_ptr + head_offset,
                        v_pages_ptr=values_ptr + head_offset,
                        k_scales_ptr=k_scales_ptr,
                        v_scales_ptr=v_scales_ptr,
                        page_table_ptr=table_row_ptr,
                        stride_pages_page=stride_pages_page,
                        stride_pages_slot=stride_pages_slot,
                        stride_scales_page=stride_scales_page if HAS_SLOT_SCALES else None,
                        stride_scales_slot=stride_scales_slot if HAS_SLOT_SCALES else None,
                    ),
                    tiles_start,
                    tile,
                    keys_start,
                    keys_end,
                    scale,
                    scores.soft_cap,
                    layer,
                    tiles,
                    STORED=STORED,
                    K_SPLIT=SPLIT,
                    V_SPLIT=SPLIT,
                    IS_EDGE=phase != 1,
                    IS_ALIGNED=layer.IS_INVARIANT,
                    KEEPS_OFFSETS=False,
                )

    if IS_CROWDED or IS_INT4 or IS_SPLIT:
        # The loop needs all registers, so the indices of the rows are computed again.
        row_start = tl.load(row_work.row_tile_indices_ptr + row_tile, volatile=True) * tiles.BLOCK_M
        rows = row_start + tl.arange(0, tiles.BLOCK_M)
        live = rows < query_len * layer.GROUP
        tokens = query_start + tl.minimum(rows // layer.GROUP, query_len - 1)
        heads = kv_head * layer.GROUP + rows % layer.GROUP  # i32[BLOCK_M]
    if IS_SPLIT:
        acc = joined_rows(acc[0], acc[1])
        if HAS_SLOT_SCALES:
            acc *= value_unit
    if scales.v_scale_ptr is not None:
        acc *= tl.load(scales.v_scale_ptr + kv_head * layer.IS_PER_HEAD_SCALE)
    sinks = None
    if terms.sinks_ptr is not None:
        sinks = tl.load(terms.sinks_ptr + heads).to(tl.float32)
    out, lse = finish_rows(acc, row_max, row_sum, sinks)
    offsets = row_offsets(tokens, heads, NUM_HEADS * layer.RESULT_DIM, layer.RESULT_DIM)
    store_rows(results.out_ptr + value_start, offsets, out, live, tiles.VALUE_DIM, tiles.BLOCK_V)
    if results.lse_ptr is not None:
        tl.store(results.lse_ptr + tokens.to(tl.int64) * NUM_HEADS + heads, lse, mask=live)
