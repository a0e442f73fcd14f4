"""Attention of requests with few query tokens: their keys are split over programs, then merged."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.attention.groups import (
    DecodeWork,
    HeadTerms,
    Inputs,
    Layer,
    Partials,
    Requests,
    Results,
    Scales,
    Scores,
)
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
    Pages,
    QueryRows,
    attend_tile,
    element_mask,
    end_visible,
    finish_rows,
    first_visible,
    row_offsets,
)
from jenga_kernels.triton.lib.device import await_kernel_before, let_next_begin
from jenga_kernels.triton.lib.fp8 import as_pairs, joined_rows, split_rows, to_half
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.int4 import FIRST_UNIT, SECOND_UNIT, joined_quad_rows, split_quad_rows
from jenga_kernels.triton.lib.rows import load_rows, store_rows
from jenga_kernels.triton.lib.tiles import MIN_ROWS, WARPGROUP_ROWS

_MIN_ROWS = tl.constexpr(MIN_ROWS)
_WARPGROUP_ROWS = tl.constexpr(WARPGROUP_ROWS)


class DecodeTiles(NamedTuple):
    """Tiles and flags for which `attention_decode_kernel` is compiled.

    PAGE_STRIDE and SLOT_STRIDE are stride_pages_page and stride_pages_slot if the kernel is
    compiled for them, else None.
    """

    VALUE_DIM: int
    PAGE_STRIDE: int | None
    SLOT_STRIDE: int | None
    QUERY_TOKENS: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int
    IS_OVERLAPPED: bool
    AWAITS_PROMPTS: bool


# Counts differ from step to step and must not cause another compilation.
@with_groups(
    results=Results,
    partials=Partials,
    inputs=Inputs,
    requests=Requests,
    work=DecodeWork,
    terms=HeadTerms,
    scales=Scales,
    scores=Scores,
    layer=Layer,
    tiles=DecodeTiles,
)
@triton.jit(do_not_specialize=["num_requests"])
def attention_decode_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    results,
    partials,
    # Inputs
    inputs,
    requests,
    work,
    terms,
    scales,
    # Scalars
    scores,
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
    layer: tl.constexpr,
    tiles: tl.constexpr,
):
    """Do units from p * units_per_program on of all (request, KV head) pairs in program p.

    A unit is a tile of keys, or a part of fixed length in batch-invariant mode. A program's units
    of a pair give one partial result. A pair that is not split is written to the output directly.
    If results have two parts of VALUE_DIM elements, as in prefill, programs 2 p and 2 p + 1 share
    the work of program p.

    With AWAITS_PROMPTS, programs may begin before those of the prefill kernel have ended. They read
    nothing that it stores, and wait for its end before they store.
    """
    k_pages_ptr = inputs.k_pages_ptr
    NUM_HEADS: tl.constexpr = layer.NUM_KV_HEADS * layer.GROUP
    PARTIAL_ROWS: tl.constexpr = tiles.QUERY_TOKENS * layer.GROUP
    VALUE_PARTS: tl.constexpr = (layer.RESULT_DIM + tiles.VALUE_DIM - 1) // tiles.VALUE_DIM
    STORED: tl.constexpr = k_pages_ptr.dtype.element_ty
    IS_INT4: tl.constexpr = tl.constexpr(STORED.is_uint8())
    # Products of more rows read converted keys and values from shared memory.
    IS_SPLIT: tl.constexpr = (
        STORED.primitive_bitwidth == 8  # noqa: PLR2004
        and inputs.q_ptr.dtype.element_ty != tl.float32
        and layer.HEAD_DIM % 2 == 0
        and layer.RESULT_DIM % 2 == 0
        and tiles.BLOCK_V >= 2 * _MIN_ROWS
        and tiles.BLOCK_M < _WARPGROUP_ROWS
    )
    # The warps of a program share the columns of a part of the results.
    K_QUADS: tl.constexpr = IS_INT4 and layer.HEAD_DIM % 4 == 0 and tiles.BLOCK_D >= 4 * _MIN_ROWS
    V_QUADS: tl.constexpr = K_QUADS and layer.RESULT_DIM % 4 == 0 and tiles.BLOCK_V >= 8 * _MIN_ROWS
    K_SPLIT: tl.constexpr = tl.constexpr((QUAD if K_QUADS else PAIR) if IS_SPLIT else 1)
    V_SPLIT: tl.constexpr = tl.constexpr((QUAD if V_QUADS else PAIR) if IS_SPLIT else 1)
    HAS_SLOT_SCALES: tl.constexpr = tl.constexpr(scales.k_slot_scales_ptr is not None)
    if tiles.PAGE_STRIDE is not None:
        stride_pages_page = tiles.PAGE_STRIDE
    if tiles.SLOT_STRIDE is not None:
        stride_pages_slot = tiles.SLOT_STRIDE
    let_next_begin(tiles.IS_OVERLAPPED)
    program = tl.program_id(0) // VALUE_PARTS
    part = tl.program_id(0) % VALUE_PARTS
    value_start = tl.minimum(part * tiles.VALUE_DIM, layer.RESULT_DIM - tiles.VALUE_DIM)
    values_ptr = inputs.v_pages_ptr + (value_start // 2 if IS_INT4 else value_start)
    if K_SPLIT == QUAD or (IS_SPLIT and not IS_INT4):
        k_pages_ptr = as_pairs(k_pages_ptr)
    if V_SPLIT == QUAD or (IS_SPLIT and not IS_INT4):
        values_ptr = as_pairs(values_ptr)
        # Strides are multiples of 16 bytes, and these products tell Triton so.
        stride_pages_page = stride_pages_page // 16 * 8
        stride_pages_slot = stride_pages_slot // 16 * 8
        stride_pages_head = stride_pages_head // 16 * 8
    units_per_program = tl.load(work.units_per_program_ptr)
    total = tl.load(work.unit_starts_ptr + num_requests) * layer.NUM_KV_HEADS
    unit = program * units_per_program
    program_end = tl.minimum(unit + units_per_program, total)
    request = tl.load(work.first_requests_ptr + program)

    while unit < program_end:
        request, kv_head, tile_start, tile_end, units_done, num_units, partial = next_run(
            program,
            unit,
            program_end,
            units_per_program,
            request,
            requests.query_starts_ptr,
            requests.seq_lens_ptr,
            work.unit_starts_ptr,
            scores.window_tokens,
            scores.chunk_tokens,
            layer.NUM_KV_HEADS,
            layer.PAGE_TOKENS,
            layer.IS_INVARIANT,
            tiles.BLOCK_N,
        )
        query_start = tl.load(requests.query_starts_ptr + request)
        query_len = tl.load(requests.query_starts_ptr + request + 1) - query_start
        seq_len = tl.load(requests.seq_lens_ptr + request)
        keys_start, tiles_start, _ = decode_keys(
            query_len,
            seq_len,
            scores.window_tokens,
            scores.chunk_tokens,
            layer.PAGE_TOKENS,
            tiles.BLOCK_N,
        )
        rows = tl.arange(0, tiles.BLOCK_M)
        live = rows < query_len * layer.GROUP
        row_tokens = rows // layer.GROUP
        positions = row_tokens + (seq_len - query_len)  # i32[BLOCK_M]
        heads = rows - row_tokens * layer.GROUP + kv_head * layer.GROUP  # i32[BLOCK_M]
        tokens = row_tokens + query_start  # i32[BLOCK_M]
        row_starts = None
        if scores.window_tokens is not None or scores.chunk_tokens is not None:
            row_starts = first_visible(positions, scores.window_tokens, scores.chunk_tokens)
        row_ends = end_visible(positions, seq_len, layer.IS_CAUSAL)
        q_offsets = row_offsets(tokens, heads, stride_q_token, stride_q_head)
        q = load_rows(
            inputs.q_ptr, q_offsets, live, layer.HEAD_DIM, tiles.BLOCK_D
        )  # [BLOCK_M, BLOCK_D]
        q_sums = None
        if IS_INT4 and IS_SPLIT:
            q_sums = tl.sum(to_half(q).to(tl.float32), 1)
        if IS_SPLIT:
            q = split_quad_rows(to_half(q)) if K_SPLIT == QUAD else split_rows(q)
        slopes = None
        if terms.alibi_slopes_ptr is not None:
            slopes = tl.load(terms.alibi_slopes_ptr + heads, mask=live, other=0.0)
        head_scale = scores.scale
        if scales.k_scale_ptr is not None:
            head_scale = scores.scale * tl.load(
                scales.k_scale_ptr + kv_head * layer.IS_PER_HEAD_SCALE
            )

        least_sums = 0.0
        if IS_SPLIT:
            acc = tl.full([tiles.BLOCK_M, tiles.BLOCK_V // V_SPLIT], 0, tl.float32)
            acc = (acc, acc, acc, acc) if V_SPLIT == QUAD else (acc, acc)
            if IS_INT4:
                least_sums = tl.full([tiles.BLOCK_M, tiles.BLOCK_N], 0, tl.float32)
        else:
            acc = tl.full([tiles.BLOCK_M, tiles.BLOCK_V], 0, tl.float32)
        row_max = tl.full([tiles.BLOCK_M], float("-inf"), tl.float32)
        column_sums = tl.full([tiles.BLOCK_M, tiles.BLOCK_N], 0, tl.float32)
        head_offset = kv_head.to(tl.int64) * stride_pages_head
        k_scales_ptr = None
        v_scales_ptr = None
        value_unit = 0.0
        if HAS_SLOT_SCALES:
            k_scales_ptr = scales.k_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
            v_scales_ptr = scales.v_slot_scales_ptr + kv_head.to(tl.int64) * stride_scales_head
        table_row_ptr = requests.page_table_ptr + request.to(tl.int64) * stride_table_request
        # Hoisted addresses of many queries of a wide head in shared memory would take 64 registers.
        for tile in tl.range(  # pyright: ignore[reportGeneralTypeIssues]
            tile_start,
            tile_end,
            disable_licm=tiles.BLOCK_D >= WIDE_HEAD and tiles.BLOCK_M > _MIN_ROWS,
        ):
            acc, row_max, column_sums, value_unit, least_sums = attend_tile(
                acc,
                row_max,
                column_sums,
                value_unit,
                least_sums,
                QueryRows(
                    q=q,
                    q_sums=q_sums,
                    positions=positions,
                    row_starts=row_starts,
                    row_ends=row_ends,
                    span_starts=None,
                    span_ends=None,
                    slopes=slopes,
                ),
                Pages(
                    k_pages_ptr=k_pages_ptr
                    + (head_offset // 2 if K_SPLIT == 2 * V_SPLIT else head_offset),
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
                seq_len,
                head_scale,
                scores.soft_cap,
                layer,
                tiles,
                STORED=STORED,
                K_SPLIT=K_SPLIT,
                V_SPLIT=V_SPLIT,
                IS_EDGE=True,
                IS_ALIGNED=False,
                KEEPS_OFFSETS=tiles.SLOT_STRIDE is not None,
            )
        if V_SPLIT == QUAD:
            acc = joined_quad_rows(acc)
        elif IS_INT4 and IS_SPLIT:
            acc = joined_rows(acc[0] * (1 / FIRST_UNIT), acc[1] * (1 / SECOND_UNIT))
        elif IS_SPLIT:
            acc = joined_rows(acc[0], acc[1])
        row_sum = tl.sum(column_sums, 1)
        if scales.v_scale_ptr is not None:
            acc *= tl.load(scales.v_scale_ptr + kv_head * layer.IS_PER_HEAD_SCALE)
        if HAS_SLOT_SCALES and IS_SPLIT:
            acc *= value_unit
            if IS_INT4:
                acc += tl.sum(least_sums, 1)[:, None]

        await_kernel_before(tiles.AWAITS_PROMPTS)
        if units_done == num_units:
            sinks = None
            if terms.sinks_ptr is not None:
                sinks = tl.load(terms.sinks_ptr + heads, mask=live, other=0.0).to(tl.float32)
            out, lse = finish_rows(acc, row_max, row_sum, sinks)
            offsets = row_offsets(tokens, heads, NUM_HEADS * layer.RESULT_DIM, layer.RESULT_DIM)
            store_rows(
                results.out_ptr + value_start,
                offsets,
                out,
                live,
                tiles.VALUE_DIM,
                tiles.BLOCK_V,
            )
            if results.lse_ptr is not None:
                tl.store(results.lse_ptr + tokens.to(tl.int64) * NUM_HEADS + heads, lse, mask=live)
        else:
            out, lse = finish_rows(acc, row_max, row_sum, None)
            partial_rows = partial.to(tl.int64) * PARTIAL_ROWS + rows
            offsets = partial_rows * layer.RESULT_DIM
            store_rows(
                partials.partial_out_ptr + value_start,
                offsets,
                out,
                live,
                tiles.VALUE_DIM,
                tiles.BLOCK_V,
            )
            tl.store(partials.partial_lse_ptr + partial_rows, lse, mask=live)
        unit += units_done
    # For programs without units.
    await_kernel_before(tiles.AWAITS_PROMPTS)


class SplitsTiles(NamedTuple):
    """Tiles and flags for which `attention_splits_kernel` is compiled."""

    NUM_KV_HEADS: int
    GROUP: int
    RESULT_DIM: int
    QUERY_TOKENS: int
    IS_INVARIANT: bool
    BLOCK_SPLITS: int
    BLOCK_D: int
    IS_OVERLAPPED: bool


@with_groups(results=Results, partials=Partials, tiles=SplitsTiles)
@triton.jit
def attention_splits_kernel(
    # Outputs
    results,
    # Inputs
    partials,
    query_starts_ptr,  # i32[num_requests + 1]
    unit_starts_ptr,  # i32[num_requests + 1]
    units_per_program_ptr,  # i32[1]
    sinks_ptr,  # [num_heads] or None
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Merge the partial results of head h of query token t of request r in program (r, t, h).

    They are merged in the order of their keys, so the result does not depend on timing.
    """
    PARTIAL_ROWS: tl.constexpr = tiles.QUERY_TOKENS * tiles.GROUP
    request = tl.program_id(0)
    token_in_request = tl.program_id(1)
    head = tl.program_id(2)
    query_start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - query_start
    units_before = tl.load(unit_starts_ptr + request)
    num_units = tl.load(unit_starts_ptr + request + 1) - units_before
    pair = request * tiles.NUM_KV_HEADS + head // tiles.GROUP
    if tiles.IS_INVARIANT:
        first_partial = pair * MAX_SPLITS
        num_partials = num_units
    else:
        units_per_program = tl.load(units_per_program_ptr)
        first_unit = units_before * tiles.NUM_KV_HEADS + (head // tiles.GROUP) * num_units
        first_program = first_unit // units_per_program
        last_program = (first_unit + num_units - 1) // units_per_program
        first_partial = partial_index(first_program, pair, first_program)
        num_partials = tl.where(num_units == 0, 0, last_program - first_program + 1)

    await_kernel_before(tiles.IS_OVERLAPPED)
    if (token_in_request < query_len) & (num_partials > 1):
        row = token_in_request * tiles.GROUP + head % tiles.GROUP
        dims = tl.arange(0, tiles.BLOCK_D)
        acc = tl.full([tiles.BLOCK_D], 0, tl.float32)
        row_max = tl.max(tl.full([tiles.BLOCK_SPLITS], float("-inf"), tl.float32), 0)
        row_sum = 0.0
        for split in range(0, num_partials, tiles.BLOCK_SPLITS):
            splits = split + tl.arange(0, tiles.BLOCK_SPLITS)
            live = splits < num_partials
            partial_rows = (first_partial + splits).to(tl.int64) * PARTIAL_ROWS + row
            lse = (
                tl.load(partials.partial_lse_ptr + partial_rows, mask=live, other=float("-inf"))
                * LOG2_E
            )
            new_max = tl.maximum(row_max, tl.max(lse, 0))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(lse - shift)  # f32[BLOCK_SPLITS]
            rescale = tl.exp2(row_max - shift)
            offsets = partial_rows[:, None] * tiles.RESULT_DIM + dims[None, :]
            mask = element_mask(live, tiles.RESULT_DIM, tiles.BLOCK_D)
            out = tl.load(partials.partial_out_ptr + offsets, mask=mask, other=0.0)
            acc = acc * rescale + tl.sum(out * weights[:, None], 0)
            row_sum = row_sum * rescale + tl.sum(weights, 0)
            row_max = new_max
        sinks = None
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + head + tl.arange(0, 1)).to(tl.float32)
        row = tl.full([1], 0, tl.float32)
        out, lse = finish_rows(acc[None, :], row + row_max, row + row_sum, sinks)
        token_head = (query_start + token_in_request).to(
            tl.int64
        ) * tiles.NUM_KV_HEADS * tiles.GROUP + head
        offsets = (token_head * tiles.RESULT_DIM + dims)[None, :]
        tl.store(
            results.out_ptr + offsets,
            out.to(results.out_ptr.dtype.element_ty),
            mask=(dims < tiles.RESULT_DIM)[None, :],
        )
        if results.lse_ptr is not None:
            tl.store(results.lse_ptr + token_head + tl.arange(0, 1), lse)
