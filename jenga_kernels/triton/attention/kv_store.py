"""Kernel of `jenga_kernels.kv_store`."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import slot_offsets
from jenga_kernels.triton.lib.device import (
    device_function,
    in_float,
    quotient,
    rounded_product,
    widened,
)
from jenga_kernels.triton.lib.fp8 import E4M3_MAX, to_fp8
from jenga_kernels.triton.lib.groups import Pointer, with_groups
from jenga_kernels.triton.lib.int4 import quantised_int4
from jenga_kernels.triton.lib.int8 import INT8_MAX, to_int8

LEAST_STORED = tl.constexpr(2.0**-100)
"""Least magnitude that keeps a head with slot scales from being stored as zeros.

If the greatest element of a head is below it, all elements are stored as 0. A four-bit head whose
range is below it is stored as its least element alone.
"""


@device_function
def _stored(
    rows,
    heads,
    live,
    scale_ptr,
    dtype: tl.constexpr,
    HAS_FP8: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
):
    """Rows as they are stored: in another float type, or scaled and saturated."""
    if not dtype.is_fp8():
        return in_float(rows, dtype)
    else:
        values = widened(rows)
        if scale_ptr is not None:
            if IS_PER_HEAD:
                scale = tl.load(scale_ptr + heads, mask=live, other=1.0)[None, :, None]
            else:
                scale = tl.broadcast_to(tl.load(scale_ptr), [1, 1, 1])
            values = quotient(values, scale)
        return to_fp8(values, dtype, HAS_FP8)


@device_function
def _quantised(rows, mask, stored_dtype: tl.constexpr):
    """Rows [lines, rows, BLOCK_LINE] as they are stored, and the scale of each, f32[rows].

    The greatest element becomes the greatest of the type. A row below LEAST_STORED becomes zeros. A
    row that is not finite gets NaN as its scale.
    """
    IS_INT8: tl.constexpr = stored_dtype == tl.int8
    MOST: tl.constexpr = INT8_MAX if IS_INT8 else E4M3_MAX
    values = tl.where(mask, widened(rows), 0.0)
    # Magnitudes keep their order as integers, and NaN is the greatest.
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    greatest = tl.max(tl.max(bits, 2), 0).to(tl.float32, bitcast=True)
    is_finite = greatest < float("inf")
    is_scaled = (greatest >= LEAST_STORED) & is_finite
    most = tl.full(greatest.shape, MOST, tl.float32)
    factor = tl.div_rn(most, tl.where(is_scaled, greatest, 1.0))
    values = tl.where(is_scaled[None, :, None], values, 0.0)
    factor = tl.broadcast_to(factor[None, :, None], values.shape)
    stored = (
        to_int8(rounded_product(values, factor))
        if IS_INT8
        else to_fp8(values * factor, stored_dtype, True)
    )
    return stored, tl.where(is_finite, tl.div_rn(greatest, most), float("nan"))


@device_function
def _places(NUM_LINES: tl.constexpr, BLOCK_LINE: tl.constexpr):
    """Index in its row of each element of the row's lines, i32[lines, 1, BLOCK_LINE]."""
    lines = tl.arange(0, NUM_LINES)[:, None] * BLOCK_LINE
    return (lines + tl.arange(0, BLOCK_LINE)[None, :])[:, None, :]


@device_function
def _mask(live, places, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of the elements of live rows that exist: ROW of BLOCK elements."""
    mask = live[None, :, None]
    if BLOCK != ROW:
        mask &= places < ROW
    return mask


class Pages(NamedTuple):
    """Pages, and the scales of their slots."""

    k_pages_ptr: Pointer  # [num_pages, page_tokens, num_kv_heads, head_dim], or u8 with two in each
    v_pages_ptr: Pointer  # the same with value_dim elements
    k_slot_scales_ptr: Pointer  # f32, or i32 of u8, [num_pages, page_tokens, num_kv_heads], or None
    v_slot_scales_ptr: Pointer  # as k_slot_scales_ptr


class Inputs(NamedTuple):
    """Keys and values to store."""

    k_ptr: Pointer  # [num_tokens, num_kv_heads, head_dim]
    v_ptr: Pointer  # [num_tokens, num_kv_heads, value_dim]


class StoreTiles(NamedTuple):
    """Tiles and flags for which `kv_store_kernel` is compiled."""

    NUM_KV_HEADS: int
    HEAD_DIM: int
    VALUE_DIM: int
    PAGE_TOKENS: int
    IS_PER_HEAD_K: bool
    IS_PER_HEAD_V: bool
    HAS_FP8: bool
    BLOCK_ROWS: int
    BLOCK_D: int
    BLOCK_LINE: int
    THREAD_ELEMENTS: int


# Counts differ from step to step and must not cause another compilation.
@with_groups(pages=Pages, inputs=Inputs, tiles=StoreTiles)
@triton.jit(do_not_specialize=["num_tokens"])
def kv_store_kernel(
    # Outputs
    pages,
    # Inputs
    inputs,
    slots_ptr,  # i64[num_tokens]
    k_scale_ptr,  # f32[1] or f32[num_kv_heads]
    v_scale_ptr,  # f32[1] or f32[num_kv_heads]
    # Sizes
    num_tokens,
    # Strides, in elements
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_pages_head: tl.int64,
    stride_scales_page: tl.int64,
    stride_scales_slot: tl.int64,
    stride_scales_head: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Store rows from p * BLOCK_ROWS on in program p; a row is one head of one token."""
    THREAD_ELEMENTS: tl.constexpr = tiles.THREAD_ELEMENTS
    STORED: tl.constexpr = pages.k_pages_ptr.dtype.element_ty
    IS_INT4: tl.constexpr = tl.constexpr(STORED.is_uint8())
    rows = tl.program_id(0).to(tl.int64) * tiles.BLOCK_ROWS + tl.arange(0, tiles.BLOCK_ROWS)
    tokens = rows // tiles.NUM_KV_HEADS
    heads = rows % tiles.NUM_KV_HEADS
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)  # i64[BLOCK_ROWS]
    live = slots >= 0
    # Rows consist of lines of memory, and a thread has a part of each line of one row.
    NUM_LINES: tl.constexpr = tiles.BLOCK_D // tiles.BLOCK_LINE
    dims = _places(NUM_LINES, tiles.BLOCK_LINE)
    k_mask = _mask(live, dims, tiles.HEAD_DIM, tiles.BLOCK_D)
    v_mask = _mask(live, dims, tiles.VALUE_DIM, tiles.BLOCK_D)

    k_offsets = tokens * stride_k_token + heads * stride_k_head
    v_offsets = tokens * stride_v_token + heads * stride_v_head
    k = tl.load(
        inputs.k_ptr + k_offsets[None, :, None] + dims, mask=k_mask
    )  # [lines, rows, BLOCK_LINE]
    v = tl.load(
        inputs.v_ptr + v_offsets[None, :, None] + dims, mask=v_mask
    )  # [lines, rows, BLOCK_LINE]

    slot = tl.where(live, slots, 0)
    in_pages = slot_offsets(slot, stride_pages_page, stride_pages_slot, tiles.PAGE_TOKENS)
    if pages.k_slot_scales_ptr is None:
        k = _stored(k, heads, live, k_scale_ptr, STORED, tiles.HAS_FP8, tiles.IS_PER_HEAD_K)
        v = _stored(v, heads, live, v_scale_ptr, STORED, tiles.HAS_FP8, tiles.IS_PER_HEAD_V)
    else:
        if IS_INT4:
            k, k_scales = quantised_int4(widened(k), k_mask, LEAST_STORED)
            v, v_scales = quantised_int4(widened(v), v_mask, LEAST_STORED)
        else:
            k, k_scales = _quantised(k, k_mask, STORED)
            v, v_scales = _quantised(v, v_mask, STORED)
        in_scales = slot_offsets(slot, stride_scales_page, stride_scales_slot, tiles.PAGE_TOKENS)
        in_scales += heads * stride_scales_head
        tl.store(pages.k_slot_scales_ptr + in_scales, k_scales, mask=live)
        tl.store(pages.v_slot_scales_ptr + in_scales, v_scales, mask=live)
    if IS_INT4:
        dims = _places(NUM_LINES, tiles.BLOCK_LINE // 2)
        k_mask = _mask(live, dims, tiles.HEAD_DIM // 2, tiles.BLOCK_D // 2)
        v_mask = _mask(live, dims, tiles.VALUE_DIM // 2, tiles.BLOCK_D // 2)
    offsets = (in_pages + heads * stride_pages_head)[None, :, None] + dims
    # A thread stores as many elements as it loads at once; see `store_rows`.
    offsets = tl.max_contiguous(
        offsets, [1, 1, THREAD_ELEMENTS // 2 if IS_INT4 else THREAD_ELEMENTS]
    )
    tl.store(pages.k_pages_ptr + offsets, k, mask=k_mask)
    tl.store(pages.v_pages_ptr + offsets, v, mask=v_mask)
