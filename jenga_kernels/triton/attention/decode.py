"""Attention of requests with few query tokens: their keys are split over programs, then merged."""

import triton
import triton.language as tl

from jenga_kernels.triton.attention.plan import (
    MAX_SPLITS,
    decode_keys,
    next_run,
    partial_index,
)
from jenga_kernels.triton.attention.tile import (
    LOG2_E,
    PAIR,
    QUAD,
    WIDE_HEAD,
    attend_tile,
    element_mask,
    end_visible,
    finish_rows,
    first_visible,
    row_offsets,
)
from jenga_kernels.triton.lib.device import await_kernel_before, let_next_begin
from jenga_kernels.triton.lib.fp8 import as_pairs, joined_rows, split_rows, to_half
from jenga_kernels.triton.lib.int4 import FIRST_UNIT, SECOND_UNIT, joined_quad_rows, split_quad_rows
from jenga_kernels.triton.lib.rows import load_rows, store_rows
from jenga_kernels.triton.lib.tiles import MIN_ROWS, WARPGROUP_ROWS

_MIN_ROWS = tl.constexpr(MIN_ROWS)
_WARPGROUP_ROWS = tl.constexpr(WARPGROUP_ROWS)


# Counts differ from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["num_requests"])
def attention_decode_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_heads, value_dim], contiguous
    lse_ptr,  # f32[num_tokens, num_heads] or None
    partial_out_ptr,  # f32[num_partials, QUERY_TOKENS * GROUP, value_dim]
    partial_lse_ptr,  # f32[num_partials, QUERY_TOKENS * GROUP]
    # Inputs
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_pages_ptr,  # [num_pages, page_tokens, num_kv_heads, head_dim], or u8 with two in each
    v_pages_ptr,  # [num_pages, page_tokens, num_kv_heads, value_dim], or u8 with two in each
    page_table_ptr,  # i32[num_requests, max_pages]
    query_starts_ptr,  # i32[num_requests + 1]
    seq_lens_ptr,  # i32[num_requests]
    unit_starts_ptr,  # i32[num_requests + 1]
    units_per_program_ptr,  # i32[1]
    first_requests_ptr,  # i32[num_programs]
    sinks_ptr,  # [num_heads] or None
    alibi_slopes_ptr,  # f32[num_heads] or None
    k_scale_ptr,  # f32[1] or f32[num_kv_heads] or None
    v_scale_ptr,  # f32[1] or f32[num_kv_heads] or None
    k_slot_scales_ptr,  # f32, or words i32 of u8, [num_pages, page_tokens, num_kv_heads], or None
    v_slot_scales_ptr,  # as k_slot_scales_ptr
    # Scalars
    scale,
    soft_cap,
    window_tokens,
    chunk_tokens,
    # Sizes
    num_requests,
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
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_PER_HEAD_SCALE: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):
    """Do units from p * units_per_program on of all (request, KV head) pairs in program p.

    A unit is a tile of keys, or a part of fixed length in batch-invariant mode. A program's units
    of a pair give one partial result. A pair that is not split is written to the output directly.
    If results have two parts of VALUE_DIM elements, as in prefill, programs 2 p and 2 p + 1 share
    the work of program p. PAGE_STRIDE and SLOT_STRIDE are stride_pages_page and stride_pages_slot
    if the kernel is compiled for them, else None.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    PARTIAL_ROWS: tl.constexpr = QUERY_TOKENS * GROUP
    VALUE_PARTS: tl.constexpr = (RESULT_DIM + VALUE_DIM - 1) // VALUE_DIM
    STORED: tl.constexpr = k_pages_ptr.dtype.element_ty
    IS_INT4: tl.constexpr = tl.constexpr(STORED.is_uint8())
    # Products of more rows read converted keys and values from shared memory.
    IS_SPLIT: tl.constexpr = (
        STORED.primitive_bitwidth == 8  # noqa: PLR2004
        and q_ptr.dtype.element_ty != tl.float32
        and HEAD_DIM % 2 == 0
        and RESULT_DIM % 2 == 0
        and BLOCK_V >= 2 * _MIN_ROWS
        and BLOCK_M < _WARPGROUP_ROWS
    )
    # The warps of a program share the columns of a part of the results.
    K_QUADS: tl.constexpr = IS_INT4 and HEAD_DIM % 4 == 0 and BLOCK_D >= 4 * _MIN_ROWS
    V_QUADS: tl.constexpr = K_QUADS and RESULT_DIM % 4 == 0 and BLOCK_V >= 8 * _MIN_ROWS
    K_SPLIT: tl.constexpr = tl.constexpr((QUAD if K_QUADS else PAIR) if IS_SPLIT else 1)
    V_SPLIT: tl.constexpr = tl.constexpr((QUAD if V_QUADS else PAIR) if IS_SPLIT else 1)
    HAS_SLOT_SCALES: tl.constexpr = tl.constexpr(k_slot_scales_ptr is not None)
    if PAGE_STRIDE is not None:
        stride_pages_page = PAGE_STRIDE
    if SLOT_STRIDE is not None:
        stride_pages_slot = SLOT_STRIDE
    let_next_begin(IS_OVERLAPPED)
    program = tl.program_id(0) // VALUE_PARTS
    part = tl.program_id(0) % VALUE_PARTS
    value_start = tl.minimum(part * VALUE_DIM, RESULT_DIM - VALUE_DIM)
    values_ptr = v_pages_ptr + (value_start // 2 if IS_INT4 else value_start)
    if K_SPLIT == QUAD or (IS_SPLIT and not IS_INT4):
        k_pages_ptr = as_pairs(k_pages_ptr)
    if V_SPLIT == QUAD or (IS_SPLIT and not IS_INT4):
        values_ptr = as_pairs(values_ptr)
        # Strides are multiples of 16 bytes, and these products tell Triton so.
        stride_pages_page = stride_pages_page // 16 * 8
        stride_pages_slot = stride_pages_slot // 16 * 8
        stride_pages_head = stride_pages_head // 16 * 8
    units_per_program = tl.load(units_per_program_ptr)
    total = tl.load(unit_starts_ptr + num_requests) * NUM_KV_HEADS
    unit = program * units_per_program
    program_end = tl.minimum(unit + units_per_program, total)
    request = tl.load(first_requests_ptr + program)

    while unit < program_end:
        request, kv_head, tile_start, tile_end, units_done, num_units, partial = next_run(
            program,
            unit,
            program_end,
            units_per_program,
            request,
            query_starts_ptr,
            seq_lens_ptr,
            unit_starts_ptr,
            window_tokens,
            chunk_tokens,
            NUM_KV_HEADS,
            PAGE_TOKENS,
            IS_INVARIANT,
            BLOCK_N,
        )
        query_start = tl.load(query_starts_ptr + request)
        query_len = tl.load(query_starts_ptr + request + 1) - query_start
        seq_len = tl.load(seq_lens_ptr + request)
        keys_start, tiles_start, _ = decode_keys(
            query_len, seq_len, window_tokens, chunk_tokens, PAGE_TOKENS, BLOCK_N
        )
        rows = tl.arange(0, BLOCK_M)
        live = rows < query_len * GROUP
        row_tokens = rows // GROUP
        positions = row_tokens + (seq_len - query_len)  # i32[BLOCK_M]
        heads = rows - row_tokens * GROUP + kv_head * GROUP  # i32[BLOCK_M]
        tokens = row_tokens + query_start  # i32[BLOCK_M]
        row_starts = None
        if window_tokens is not None or chunk_tokens is not None:
            row_starts = first_visible(positions, window_tokens, chunk_tokens)
        row_ends = end_visible(positions, seq_len, IS_CAUSAL)
        q_offsets = row_offsets(tokens, heads, stride_q_token, stride_q_head)
        q = load_rows(q_ptr, q_offsets, live, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        q_sums = None
        if IS_INT4 and IS_SPLIT:
            q_sums = tl.sum(to_half(q).to(tl.float32), 1)
        if IS_SPLIT:
            q = split_quad_rows(to_half(q)) if K_SPLIT == QUAD else split_rows(q)
        slopes = None
        if alibi_slopes_ptr is not None:
            slopes = tl.load(alibi_slopes_ptr + heads, mask=live, other=0.0)
        head_scale = scale
        if k_scale_ptr is not None:
            head_scale = scale * tl.load(k_scale_ptr + kv_head * IS_PER_HEAD_SCALE)

        least_sums = 0.0
        if IS_SPLIT:
            acc = tl.full([BLOCK_M, BLOCK_V // V_SPLIT], 0, tl.float32)
            acc = (acc, acc, acc, acc) if V_SPLIT == QUAD else (acc, acc)
            if IS_INT4:
                least_sums = tl.full([BLOCK_M, BLOCK_N], 0, tl.float32)
        else:
            acc = tl.full([BLOCK_M, BLOCK_V], 0, tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        column_sums = tl.full([BLOCK_M, BLOCK_N], 0, tl.float32)
        head_offset = kv_head.to(tl.int64) * stride_pages_head
        k_scales_ptr = None
        v_scales_ptr = None
        value_unit = 0.0
        if HAS_SLOT_SCALES:
            k_scales_ptr = k_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
            v_scales_ptr = v_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
        table_row_ptr = page_table_ptr + request.to(tl.int64) * stride_table_request
        # Hoisted addresses of many queries of a wide head in shared memory would take 64 registers.
        for tile in tl.range(  # pyright: ignore[reportGeneralTypeIssues]
            tile_start, tile_end, disable_licm=BLOCK_D >= WIDE_HEAD and BLOCK_M > _MIN_ROWS
        ):
            acc, row_max, column_sums, value_unit, least_sums = attend_tile(
                acc,
                row_max,
                column_sums,
                value_unit,
                least_sums,
                q,
                q_sums,
                positions,
                row_starts,
                row_ends,
                None,
                None,
                slopes,
                k_pages_ptr + (head_offset // 2 if K_SPLIT == 2 * V_SPLIT else head_offset),
                values_ptr + head_offset,
                k_scales_ptr,
                v_scales_ptr,
                table_row_ptr,
                tiles_start,
                tile,
                keys_start,
                seq_len,
                head_scale,
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
                K_SPLIT=K_SPLIT,
                V_SPLIT=V_SPLIT,
                IS_EDGE=True,
                IS_ALIGNED=False,
                KEEPS_OFFSETS=SLOT_STRIDE is not None,
            )
        if V_SPLIT == QUAD:
            acc = joined_quad_rows(acc)
        elif IS_INT4 and IS_SPLIT:
            acc = joined_rows(acc[0] * (1 / FIRST_UNIT), acc[1] * (1 / SECOND_UNIT))
        elif IS_SPLIT:
            acc = joined_rows(acc[0], acc[1])
        row_sum = tl.sum(column_sums, 1)
        if v_scale_ptr is not None:
            acc *= tl.load(v_scale_ptr + kv_head * IS_PER_HEAD_SCALE)
        if HAS_SLOT_SCALES and IS_SPLIT:
            acc *= value_unit
            if IS_INT4:
                acc += tl.sum(least_sums, 1)[:, None]

        if units_done == num_units:
            sinks = None
            if sinks_ptr is not None:
                sinks = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32)
            out, lse = finish_rows(acc, row_max, row_sum, sinks)
            offsets = row_offsets(tokens, heads, NUM_HEADS * RESULT_DIM, RESULT_DIM)
            store_rows(out_ptr + value_start, offsets, out, live, VALUE_DIM, BLOCK_V)
            if lse_ptr is not None:
                tl.store(lse_ptr + tokens.to(tl.int64) * NUM_HEADS + heads, lse, mask=live)
        else:
            out, lse = finish_rows(acc, row_max, row_sum, None)
            partial_rows = partial.to(tl.int64) * PARTIAL_ROWS + rows
            offsets = partial_rows * RESULT_DIM
            store_rows(partial_out_ptr + value_start, offsets, out, live, VALUE_DIM, BLOCK_V)
            tl.store(partial_lse_ptr + partial_rows, lse, mask=live)
        unit += units_done


@triton.jit
def attention_splits_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, value_dim], contiguous
    lse_ptr,  # f32[num_tokens, num_heads] or None
    # Inputs
    partial_out_ptr,  # f32[num_partials, QUERY_TOKENS * GROUP, value_dim]
    partial_lse_ptr,  # f32[num_partials, QUERY_TOKENS * GROUP]
    query_starts_ptr,  # i32[num_requests + 1]
    unit_starts_ptr,  # i32[num_requests + 1]
    units_per_program_ptr,  # i32[1]
    sinks_ptr,  # [num_heads] or None
    # Tiles and flags
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RESULT_DIM: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):
    """Merge the partial results of head h of query token t of request r in program (r, t, h).

    They are merged in the order of their keys, so the result does not depend on timing.
    """
    PARTIAL_ROWS: tl.constexpr = QUERY_TOKENS * GROUP
    request = tl.program_id(0)
    token_in_request = tl.program_id(1)
    head = tl.program_id(2)
    query_start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - query_start
    units_before = tl.load(unit_starts_ptr + request)
    num_units = tl.load(unit_starts_ptr + request + 1) - units_before
    pair = request * NUM_KV_HEADS + head // GROUP
    if IS_INVARIANT:
        first_partial = pair * MAX_SPLITS
        num_partials = num_units
    else:
        units_per_program = tl.load(units_per_program_ptr)
        first_unit = units_before * NUM_KV_HEADS + (head // GROUP) * num_units
        first_program = first_unit // units_per_program
        last_program = (first_unit + num_units - 1) // units_per_program
        first_partial = partial_index(first_program, pair, first_program)
        num_partials = tl.where(num_units == 0, 0, last_program - first_program + 1)

    await_kernel_before(IS_OVERLAPPED)
    if (token_in_request < query_len) & (num_partials > 1):
        row = token_in_request * GROUP + head % GROUP
        dims = tl.arange(0, BLOCK_D)
        acc = tl.full([BLOCK_D], 0, tl.float32)
        row_max = tl.max(tl.full([BLOCK_SPLITS], float("-inf"), tl.float32), 0)
        row_sum = 0.0
        for split in range(0, num_partials, BLOCK_SPLITS):
            splits = split + tl.arange(0, BLOCK_SPLITS)
            live = splits < num_partials
            partial_rows = (first_partial + splits).to(tl.int64) * PARTIAL_ROWS + row
            lse = tl.load(partial_lse_ptr + partial_rows, mask=live, other=float("-inf")) * LOG2_E
            new_max = tl.maximum(row_max, tl.max(lse, 0))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(lse - shift)  # f32[BLOCK_SPLITS]
            rescale = tl.exp2(row_max - shift)
            offsets = partial_rows[:, None] * RESULT_DIM + dims[None, :]
            mask = element_mask(live, RESULT_DIM, BLOCK_D)
            out = tl.load(partial_out_ptr + offsets, mask=mask, other=0.0)
            acc = acc * rescale + tl.sum(out * weights[:, None], 0)
            row_sum = row_sum * rescale + tl.sum(weights, 0)
            row_max = new_max
        sinks = None
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + head + tl.arange(0, 1)).to(tl.float32)
        row = tl.full([1], 0, tl.float32)
        out, lse = finish_rows(acc[None, :], row + row_max, row + row_sum, sinks)
        token_head = (query_start + token_in_request).to(tl.int64) * NUM_KV_HEADS * GROUP + head
        offsets = (token_head * RESULT_DIM + dims)[None, :]
        tl.store(
            out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=(dims < RESULT_DIM)[None, :]
        )
        if lse_ptr is not None:
            tl.store(lse_ptr + token_head + tl.arange(0, 1), lse)
