"""Attention of requests with many query tokens: a tile of rows loops over all keys it reads."""

import triton
import triton.language as tl

from jenga_kernels.triton.attention.tile import (
    PAIR,
    WIDE_HEAD,
    attend_tile,
    end_visible,
    finish_rows,
    first_visible,
    row_offsets,
)
from jenga_kernels.triton.lib.addressing import first_tile_key
from jenga_kernels.triton.lib.device import ceil_div
from jenga_kernels.triton.lib.fp8 import as_pairs, joined_rows, split_rows
from jenga_kernels.triton.lib.rows import load_rows, store_rows
from jenga_kernels.triton.lib.tiles import MIN_ROWS

_MIN_ROWS = tl.constexpr(MIN_ROWS)


@triton.jit
def attention_prefill_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_heads, value_dim], contiguous
    lse_ptr,  # f32[num_tokens, num_heads] or None
    # Inputs
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_pages_ptr,  # [num_pages, page_tokens, num_kv_heads, head_dim], or u8 with two in each
    v_pages_ptr,  # [num_pages, page_tokens, num_kv_heads, value_dim], or u8 with two in each
    page_table_ptr,  # i32[num_requests, max_pages]
    query_starts_ptr,  # i32[num_requests + 1]
    seq_lens_ptr,  # i32[num_requests]
    row_tile_requests_ptr,  # i32[max_row_tiles]
    row_tile_indices_ptr,  # i32[max_row_tiles]
    sinks_ptr,  # [num_heads] or None
    alibi_slopes_ptr,  # f32[num_heads] or None
    spans_ptr,  # i32[num_tokens, 2] or None
    k_scale_ptr,  # f32[1] or f32[num_kv_heads] or None
    v_scale_ptr,  # f32[1] or f32[num_kv_heads] or None
    k_slot_scales_ptr,  # f32, or words i32 of u8, [num_pages, page_tokens, num_kv_heads], or None
    v_slot_scales_ptr,  # as k_slot_scales_ptr
    # Scalars
    scale,
    soft_cap,
    window_tokens,
    chunk_tokens,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RESULT_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_PER_HEAD_SCALE: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    READS_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a part of a row tile for KV head h in program (p, h).

    It is part p % VALUE_PARTS of tile p // VALUE_PARTS of the list: all scores, and VALUE_DIM
    elements of each result. The last part ends with the head and may repeat some elements of the
    part before it. All parts compute the same log-sum-exps.

    With IS_INVARIANT, a row's keys are summed in the same tiles whichever rows share its program.
    Other keys of these tiles do not change its result, to the last bit.

    With READS_PAIRS, elements of one byte are read as in decoding; see `attend_tile`.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    VALUE_PARTS: tl.constexpr = (RESULT_DIM + VALUE_DIM - 1) // VALUE_DIM
    STORED: tl.constexpr = k_pages_ptr.dtype.element_ty
    IS_INT4: tl.constexpr = tl.constexpr(STORED.is_uint8())
    IS_CONVERTED: tl.constexpr = tl.constexpr(q_ptr.dtype.element_ty != STORED)
    IS_SPLIT: tl.constexpr = tl.constexpr(
        READS_PAIRS
        and STORED.primitive_bitwidth == 8  # noqa: PLR2004
        and not IS_INT4
        and q_ptr.dtype.element_ty != tl.float32
        and HEAD_DIM % 2 == 0
        and RESULT_DIM % 2 == 0
        and BLOCK_V >= 2 * _MIN_ROWS
    )
    SPLIT: tl.constexpr = tl.constexpr(PAIR if IS_SPLIT else 1)
    HAS_SLOT_SCALES: tl.constexpr = tl.constexpr(k_slot_scales_ptr is not None)
    IS_CROWDED: tl.constexpr = BLOCK_D >= WIDE_HEAD or (IS_CONVERTED and 2 * BLOCK_D >= WIDE_HEAD)
    kv_head = tl.program_id(1)
    row_tile = tl.program_id(0) // VALUE_PARTS
    part = tl.program_id(0) % VALUE_PARTS
    value_start = tl.minimum(part * VALUE_DIM, RESULT_DIM - VALUE_DIM)
    values_ptr = v_pages_ptr + (value_start // 2 if IS_INT4 else value_start)
    if IS_SPLIT:
        k_pages_ptr = as_pairs(k_pages_ptr)
        values_ptr = as_pairs(values_ptr)
        # Strides are multiples of 16 bytes, and these products tell Triton so.
        stride_pages_page = stride_pages_page // 16 * 8
        stride_pages_slot = stride_pages_slot // 16 * 8
        stride_pages_head = stride_pages_head // 16 * 8
    request = tl.load(row_tile_requests_ptr + row_tile)
    if request < 0:
        return
    row_start = tl.load(row_tile_indices_ptr + row_tile) * BLOCK_M
    query_start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)

    rows = row_start + tl.arange(0, BLOCK_M)
    live = rows < query_len * GROUP
    # Rows past the end repeat the last one, so that they widen no range of keys.
    tokens_in_request = tl.minimum(rows // GROUP, query_len - 1)
    positions = seq_len - query_len + tokens_in_request  # i32[BLOCK_M]
    heads = kv_head * GROUP + rows % GROUP  # i32[BLOCK_M]
    tokens = query_start + tokens_in_request  # i32[BLOCK_M]
    row_starts = first_visible(positions, window_tokens, chunk_tokens)
    row_ends = end_visible(positions, seq_len, IS_CAUSAL)
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
    tiles_start = first_tile_key(keys_start, PAGE_TOKENS, BLOCK_N, IS_INVARIANT)
    num_tiles = ceil_div(tl.maximum(keys_end - tiles_start, 0), BLOCK_N)
    full_start = tl.max(row_starts, 0)
    full_end = tl.maximum(tl.min(row_ends, 0), 0)
    first_full = tl.minimum(ceil_div(full_start - tiles_start, BLOCK_N), num_tiles)
    end_full = tl.maximum(tl.maximum(full_end - tiles_start, 0) // BLOCK_N, first_full)

    q_offsets = row_offsets(tokens, heads, stride_q_token, stride_q_head)
    q = load_rows(q_ptr, q_offsets, live, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads)
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + kv_head * IS_PER_HEAD_SCALE)

    if IS_SPLIT:
        q = split_rows(q)
        acc = tl.full([BLOCK_M, BLOCK_V // 2], 0, tl.float32)
        acc = acc, acc
    else:
        acc = tl.full([BLOCK_M, BLOCK_V], 0, tl.float32)
    value_unit = 0.0
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.full([BLOCK_M], 0, tl.float32)
    head_offset = kv_head.to(tl.int64) * stride_pages_head
    k_scales_ptr = None
    v_scales_ptr = None
    if HAS_SLOT_SCALES:
        k_scales_ptr = k_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
        v_scales_ptr = v_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
    table_row_ptr = page_table_ptr + request.to(tl.int64) * stride_table_request
    is_bounded: tl.constexpr = window_tokens is not None or chunk_tokens is not None
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
                    q,
                    None,
                    positions,
                    row_starts if is_bounded else None,
                    row_ends,
                    span_starts,
                    span_ends,
                    slopes,
                    k_pages_ptr + head_offset,
                    values_ptr + head_offset,
                    k_scales_ptr,
                    v_scales_ptr,
                    table_row_ptr,
                    tiles_start,
                    tile,
                    keys_start,
                    keys_end,
                    scale,
                    soft_cap,
                    stride_pages_page,
                    stride_pages_slot,
                    stride_scales_page if HAS_SLOT_SCALES else None,
                    stride_scales_slot if HAS_SLOT_SCALES else None,
                    HEAD_DIM,
                    VALUE_DIM,
                    PAGE_TOKENS,
                    BLOCK_N,
                    BLOCK_D,
                    BLOCK_V,
                    STORED=STORED,
                    K_SPLIT=SPLIT,
                    V_SPLIT=SPLIT,
                    IS_EDGE=phase != 1,
                    IS_ALIGNED=IS_INVARIANT,
                    KEEPS_OFFSETS=False,
                )

    if IS_CROWDED or IS_INT4 or IS_SPLIT:
        # The loop needs all registers, so the indices of the rows are computed again.
        row_start = tl.load(row_tile_indices_ptr + row_tile, volatile=True) * BLOCK_M
        rows = row_start + tl.arange(0, BLOCK_M)
        live = rows < query_len * GROUP
        tokens = query_start + tl.minimum(rows // GROUP, query_len - 1)
        heads = kv_head * GROUP + rows % GROUP  # i32[BLOCK_M]
    if IS_SPLIT:
        acc = joined_rows(acc[0], acc[1])
        if HAS_SLOT_SCALES:
            acc *= value_unit
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head * IS_PER_HEAD_SCALE)
    sinks = None
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads).to(tl.float32)
    out, lse = finish_rows(acc, row_max, row_sum, sinks)
    offsets = row_offsets(tokens, heads, NUM_HEADS * RESULT_DIM, RESULT_DIM)
    store_rows(out_ptr + value_start, offsets, out, live, VALUE_DIM, BLOCK_V)
    if lse_ptr is not None:
        tl.store(lse_ptr + tokens.to(tl.int64) * NUM_HEADS + heads, lse, mask=live)
