"""Functions that the attention kernels share: visible keys, a step over keys, the end of a row.

A row is one head of one query token. The rows of a request that read the same KV head are numbered
`row = token * GROUP + head in group`. So one tile of queries serves a whole group.
"""

from typing import Any, NamedTuple

import triton.language as tl

from jenga_kernels.triton.lib.addressing import key_offsets
from jenga_kernels.triton.lib.device import device_function, log2, reciprocal, rounded
from jenga_kernels.triton.lib.fp8 import split_e5m2_pairs, split_pairs
from jenga_kernels.triton.lib.groups import Pointer
from jenga_kernels.triton.lib.int4 import (
    FIRST_UNIT,
    SECOND_UNIT,
    restored_int4,
    split_int4_pairs,
    split_int4_quads,
    split_words,
)
from jenga_kernels.triton.lib.int8 import from_stored, split_int8_pairs
from jenga_kernels.triton.lib.matmul import matmul, matmul_add
from jenga_kernels.triton.lib.rows import load_rows
from jenga_kernels.triton.lib.softmax import soft_capped, softmax_step
from jenga_kernels.triton.lib.tiles import WIDE_HEAD as _WIDE_HEAD

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WIDE_HEAD = tl.constexpr(_WIDE_HEAD)

PAIR = tl.constexpr(2)
QUAD = tl.constexpr(4)
"""Number of elements in one item of pages, if pages are read in pairs or quads."""


@device_function
def first_visible(positions, window_tokens, chunk_tokens):
    """First key that the query at each position reads."""
    first = positions * 0
    if window_tokens is not None:
        first = tl.maximum(first, positions - window_tokens + 1)
    if chunk_tokens is not None:
        first = tl.maximum(first, tl.maximum(positions, 0) // chunk_tokens * chunk_tokens)
    return first


@device_function
def end_visible(positions, seq_len, IS_CAUSAL: tl.constexpr):
    """End of the keys that the query at each position reads, one past the last."""
    if IS_CAUSAL:
        return tl.minimum(positions + 1, seq_len)
    else:
        return positions * 0 + seq_len


@device_function
def row_offsets(tokens, heads, stride_token, stride_head):
    """Offset of each row, i64[M]; tokens are numbered over the batch."""
    return tokens.to(tl.int64) * stride_token + heads.to(tl.int64) * stride_head


@device_function
def element_mask(live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask of the elements of live rows that exist, i1[M, BLOCK_D]."""
    mask = live[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    return mask


class QueryRows(NamedTuple):
    """Rows of queries, and which keys each of them reads. A row is one head of one token."""

    q: Any  # [M, BLOCK_D]; for pairs two of f16[M, BLOCK_D // 2], for quads four of a quarter
    q_sums: Any  # f32[M]: sums of q for pairs and quads of elements of four bits; else None
    positions: Any  # i32[M]
    row_starts: Any  # i32[M] or None: first key each row reads
    row_ends: Any  # i32[M], one past the last
    span_starts: Any  # i32[M] or None: first key of each row's span, read in addition
    span_ends: Any  # i32[M] or None
    slopes: Any  # f32[M] or None: ALiBi


class Pages(NamedTuple):
    """Pages of a KV head, as pairs, quads or elements, and a request's page table."""

    k_pages_ptr: Pointer
    v_pages_ptr: Pointer
    k_scales_ptr: Pointer  # f32, or words i32, of each slot, or None
    v_scales_ptr: Pointer  # as k_scales_ptr
    page_table_ptr: Pointer  # i32[max_pages], the request's row
    stride_pages_page: Any
    stride_pages_slot: Any
    stride_scales_page: Any  # this and the next are None without scales
    stride_scales_slot: Any


@device_function
def attend_tile(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Running softmax of the rows
    acc,  # f32[M, BLOCK_V]; for pairs two of f32[M, BLOCK_V // 2], for quads four of a quarter
    row_max,  # f32[M]
    row_sum,  # f32[M], or f32[M, BLOCK_N]: one sum for each place of a key in its tile
    value_unit,  # f32: unit of acc for pairs and quads with slot scales, the greatest scale so far
    least_sums,  # f32[M, BLOCK_N]: for split int4, least elements times weights, added to acc later
    # Inputs
    rows,  # QueryRows
    pages,  # Pages
    tiles_start,
    tile,
    keys_start,  # no key outside [keys_start, keys_end) is read
    keys_end,
    # Scalars
    scale,
    soft_cap,
    # Tiles and flags
    layer: tl.constexpr,  # Layer
    tiles: tl.constexpr,  # DecodeTiles or PrefillTiles
    STORED: tl.constexpr,  # element type of the pages
    K_SPLIT: tl.constexpr,
    V_SPLIT: tl.constexpr,
    IS_EDGE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    KEEPS_OFFSETS: tl.constexpr,
):
    """Add a tile of BLOCK_N keys to the running softmax of the rows.

    Without IS_EDGE every row reads every one of these keys. Without `row_starts`, rows read all
    keys from 0 to their ends, and tiles_start is 0.

    If K_SPLIT or V_SPLIT is PAIR or QUAD instead of 1, that number of elements of a byte or half a
    byte is read as one item. Pointers are to items. The first elements of all items are multiplied
    with the first part of q, and add up in the first part of acc; the others likewise. Strides
    count items of values; an item of keys may be two of these.

    With slot scales, scores are multiplied with the scales of keys. The scales of values are
    multiplied with values. For pairs and quads, whose products are of half precision, they are
    multiplied with the weights instead. They are then shares of the greatest scale so far, because
    they may be too small for half precision by themselves.

    Pairs and quads of four-bit elements lack their least element. Its products are added to scores
    from the sums of queries, and to results from the sums of weights. Four-bit elements that are
    not split are restored before the products.
    """
    IS_INT4: tl.constexpr = tl.constexpr(STORED.is_uint8())
    IS_SPLIT: tl.constexpr = tl.constexpr(V_SPLIT > 1)
    # Number of elements of an item that is loaded.
    K_ITEM: tl.constexpr = tl.constexpr(2 if IS_INT4 and K_SPLIT == 1 else K_SPLIT)
    V_ITEM: tl.constexpr = tl.constexpr(2 if IS_INT4 and V_SPLIT == 1 else V_SPLIT)
    # Keys count from `origin`. With KEEPS_OFFSETS that is the tile's first key, and bounds of rows
    # are made relative to the tile. This takes fewer instructions, but more registers.
    keys = tl.arange(0, tiles.BLOCK_N)
    origin = tiles_start + tile * tiles.BLOCK_N
    if not KEEPS_OFFSETS:
        keys += origin
        origin = 0
    live = None
    if IS_EDGE:
        live = keys < keys_end - origin
        # Tiles begin with the first key, unless they are aligned or must stay within a page.
        if (IS_ALIGNED or layer.PAGE_TOKENS % tiles.BLOCK_N == 0) and rows.row_starts is not None:
            live = live & (keys >= keys_start - origin)
    offsets, scale_offsets = key_offsets(
        pages.page_table_ptr,
        tiles_start,
        tile,
        keys_end if IS_EDGE else None,
        pages.stride_pages_page,
        pages.stride_pages_slot,
        layer.PAGE_TOKENS,
        tiles.BLOCK_N,
        STARTS_PAGE=rows.row_starts is None,
        KEEPS_OFFSETS=KEEPS_OFFSETS,
        stride_scales_page=pages.stride_scales_page,
        stride_scales_slot=pages.stride_scales_slot,
    )
    k_scales = None
    v_scales = None
    if pages.k_scales_ptr is not None:
        k_scales = load_scales(pages.k_scales_ptr, scale_offsets, live)  # f32[BLOCK_N], or words
        v_scales = load_scales(pages.v_scales_ptr, scale_offsets, live)  # f32[BLOCK_N], or words
    # A dead slot may hold NaN, and 0 * NaN is NaN. So values are zeroed, not only their weights.
    k_offsets = offsets // 2 if K_SPLIT == 2 * V_SPLIT else offsets
    k = load_rows(
        pages.k_pages_ptr, k_offsets, live, layer.HEAD_DIM // K_ITEM, tiles.BLOCK_D // K_ITEM
    )
    v = load_rows(
        pages.v_pages_ptr, offsets, live, tiles.VALUE_DIM // V_ITEM, tiles.BLOCK_V // V_ITEM
    )
    if IS_SPLIT:
        if IS_INT4:
            k_scales, k_least = split_words(k_scales)  # f32[BLOCK_N] each
            v_scales, v_least = split_words(v_scales)  # f32[BLOCK_N] each
        k = _split(k, STORED, K_SPLIT)  # f16[BLOCK_N, BLOCK_D // K_SPLIT] each
        v = _split(v, STORED, V_SPLIT)  # f16[BLOCK_N, BLOCK_V // V_SPLIT] each
        scores = matmul(rows.q[0], tl.trans(k[0]))  # f32[M, BLOCK_N]
        if K_SPLIT == QUAD:
            scores = matmul_add(rows.q[2], tl.trans(k[2]), scores)
        if IS_INT4:
            scores = scores * (SECOND_UNIT / FIRST_UNIT)
            k_scales = k_scales * (1 / SECOND_UNIT)
        scores = matmul_add(rows.q[1], tl.trans(k[1]), scores)
        if K_SPLIT == QUAD:
            scores = matmul_add(rows.q[3], tl.trans(k[3]), scores)
        if k_scales is not None:
            scores = scores * k_scales[None, :]
        if IS_INT4:
            scores = scores + rows.q_sums[:, None] * k_least[None, :]
    elif IS_INT4:
        k = restored_int4(k, k_scales, rows.q.dtype)  # [BLOCK_N, BLOCK_D]
        v = restored_int4(v, v_scales, rows.q.dtype)  # [BLOCK_N, BLOCK_V]
        scores = matmul(rows.q, tl.trans(k))  # f32[M, BLOCK_N]
    else:
        k = from_stored(k, rows.q.dtype)  # [BLOCK_N, BLOCK_D]
        if v_scales is None:
            v = from_stored(v, rows.q.dtype)  # [BLOCK_N, BLOCK_V]
        else:
            v = rounded(from_stored(v, tl.float32) * v_scales[:, None], rows.q.dtype)
        scores = matmul(rows.q, tl.trans(k))  # f32[M, BLOCK_N]
        if k_scales is not None:
            scores = scores * k_scales[None, :]

    to_base_2 = scale * LOG2_E
    if soft_cap is not None or rows.slopes is not None:
        to_base_2 = LOG2_E
        scores = scores * scale if soft_cap is None else soft_capped(scores, scale, soft_cap)
        if rows.slopes is not None:
            distances = keys[None, :] - (rows.positions - origin)[:, None]
            scores += rows.slopes[:, None] * distances.to(tl.float32)
    if IS_EDGE:
        visible = keys[None, :] < (rows.row_ends - origin)[:, None]
        if rows.row_starts is not None:
            visible = visible & (keys[None, :] >= (rows.row_starts - origin)[:, None])
        if rows.span_starts is not None:
            in_span = keys[None, :] >= (rows.span_starts - origin)[:, None]
            in_span = in_span & (keys[None, :] < (rows.span_ends - origin)[:, None])
            visible = visible | in_span
        scores = tl.where(visible, scores, float("-inf"))

    weights, rescale, row_max, row_sum = softmax_step(scores, to_base_2, row_max, row_sum)
    if IS_SPLIT:
        if IS_INT4:
            least_sums = least_sums * rescale[:, None] + weights * v_least[None, :]
        if v_scales is not None:
            greatest = tl.maximum(value_unit, tl.max(v_scales, 0))
            # For a tile without keys, or with values of zero only, any share is right.
            share = 1.0 / tl.where(greatest > 0.0, greatest, 1.0)
            weights = weights * (v_scales * share)[None, :]
            rescale = rescale * (value_unit * share)
            value_unit = greatest
        weights = weights.to(v[0].dtype)
        first = matmul_add(weights, v[0], acc[0] * rescale[:, None])
        second = matmul_add(weights, v[1], acc[1] * rescale[:, None])
        if V_SPLIT == PAIR:
            acc = first, second
        else:
            third = matmul_add(weights, v[2], acc[2] * rescale[:, None])
            acc = first, second, third, matmul_add(weights, v[3], acc[3] * rescale[:, None])
    else:
        acc = matmul_add(weights.to(v.dtype), v, acc * rescale[:, None])
    return acc, row_max, row_sum, value_unit, least_sums


@device_function
def _split(rows, STORED: tl.constexpr, SPLIT: tl.constexpr):
    """Split rows of pairs or quads into elements in half precision, one part for each place."""
    if SPLIT == QUAD:
        return split_int4_quads(rows)
    elif STORED.is_uint8():
        return split_int4_pairs(rows)
    elif STORED.is_int8():
        return split_int8_pairs(rows)
    elif STORED.is_fp8e5():
        return split_e5m2_pairs(rows)
    else:
        return split_pairs(rows)


@device_function
def load_scales(scales_ptr, offsets, live):
    """Load the scales of the slots of a tile, [BLOCK_N]; 0 where `live`, if given, is false."""
    if live is None:
        return tl.load(scales_ptr + offsets)
    else:
        return tl.load(scales_ptr + offsets, mask=live, other=0)


@device_function
def finish_rows(acc, row_max, row_sum, sinks):
    """Compute results and natural log-sum-exp of rows after their last key.

    A sink is the score of a key without a value: it takes weight and adds nothing. A row without
    any key gives 0 and -inf.
    """
    if sinks is not None:
        sinks = sinks * LOG2_E
        new_max = tl.maximum(row_max, sinks)
        # A head without a sink has -inf if others have one, and a row may have no key either.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - shift)
        acc = acc * rescale[:, None]
        row_sum = row_sum * rescale + tl.exp2(sinks - shift)
        row_max = new_max
    is_empty = row_sum == 0.0
    divisor = tl.where(is_empty, 1.0, row_sum)
    log_sum = tl.where(is_empty, float("-inf"), (row_max + log2(divisor)) * LN_2)
    return acc * reciprocal(divisor)[:, None], log_sum
