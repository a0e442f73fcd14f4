"""Kernel of `jenga_kernels.dequantise_pages`."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.attention.groups import Scales
from jenga_kernels.triton.attention.tile import load_scales
from jenga_kernels.triton.lib.addressing import key_offsets, slot_offsets
from jenga_kernels.triton.lib.device import device_function, rounded
from jenga_kernels.triton.lib.groups import Pointer, with_groups
from jenga_kernels.triton.lib.int4 import restored_int4
from jenga_kernels.triton.lib.int8 import from_stored
from jenga_kernels.triton.lib.rows import load_rows, store_rows

RUN_FIELDS = 3
"""Integers of a page's run of tokens: the request, the first token and the end."""

_RUN_FIELDS = tl.constexpr(RUN_FIELDS)


@device_function
def _restored(
    rows,  # [M, D] as they are stored, or pairs of four-bit elements u8[M, D // 2]
    scale_ptr,  # f32[1] or f32[num_kv_heads] or None
    slot_scales,  # f32[M], or words i32[M], or None
    head,
    IS_PER_HEAD: tl.constexpr,
    dtype: tl.constexpr,
):
    """Rows in `dtype`, [M, D]: scaled in float32 and rounded once."""
    if rows.dtype == tl.uint8:
        return restored_int4(rows, slot_scales, dtype)
    else:
        values = from_stored(rows, tl.float32)
        if slot_scales is not None:
            values = values * slot_scales[:, None]
        elif scale_ptr is not None:
            values = values * tl.load(scale_ptr + head * IS_PER_HEAD)
        return rounded(values, dtype)


class Outputs(NamedTuple):
    """Pages that are written."""

    k_out_ptr: Pointer  # [num_out_pages, out_page_tokens, num_kv_heads, head_dim]
    v_out_ptr: Pointer  # the same with value_dim elements


class StoredPages(NamedTuple):
    """Quantised pages."""

    k_pages_ptr: Pointer  # [num_pages, page_tokens, num_kv_heads, head_dim], or u8 with two in each
    v_pages_ptr: Pointer  # the same with value_dim elements


class RestoreTiles(NamedTuple):
    """Tiles and flags for which `dequantise_pages_kernel` is compiled."""

    HEAD_DIM: int
    VALUE_DIM: int
    PAGE_TOKENS: int
    OUT_PAGE_TOKENS: int
    IS_PER_HEAD_K: bool
    IS_PER_HEAD_V: bool
    BLOCK_T: int
    BLOCK_D: int
    BLOCK_V: int


@with_groups(outputs=Outputs, stored=StoredPages, scales=Scales, tiles=RestoreTiles)
@triton.jit
def dequantise_pages_kernel(
    # Outputs
    outputs,
    # Inputs
    stored,
    page_table_ptr,  # i32[num_requests, max_pages]
    page_runs_ptr,  # i32[num_runs, 3], contiguous
    scales,
    # Strides, in elements
    stride_out_page: tl.int64,
    stride_out_slot: tl.int64,
    stride_out_head: tl.int64,
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_pages_head: tl.int64,
    stride_scales_page: tl.int64,
    stride_scales_slot: tl.int64,
    stride_scales_head: tl.int64,
    stride_table_request: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Program (p, h) restores KV head h of tile p % PAGE_TILES of output page p // PAGE_TILES."""
    PAGE_TILES: tl.constexpr = tiles.OUT_PAGE_TOKENS // tiles.BLOCK_T
    IS_INT4: tl.constexpr = tl.constexpr(stored.k_pages_ptr.dtype.element_ty.is_uint8())
    HAS_SLOT_SCALES: tl.constexpr = tl.constexpr(scales.k_slot_scales_ptr is not None)
    PER_ITEM: tl.constexpr = tl.constexpr(2 if IS_INT4 else 1)
    dtype: tl.constexpr = outputs.k_out_ptr.dtype.element_ty
    out_page = tl.program_id(0).to(tl.int64) // PAGE_TILES
    tile = tl.program_id(0) % PAGE_TILES
    head = tl.program_id(1).to(tl.int64)
    run_ptr = page_runs_ptr + out_page * _RUN_FIELDS
    request = tl.load(run_ptr).to(tl.int64)
    start = tl.load(run_ptr + 1)
    end = tl.load(run_ptr + 2)
    # Token t belongs to slot t % OUT_PAGE_TOKENS.
    page_start = start // tiles.OUT_PAGE_TOKENS * tiles.OUT_PAGE_TOKENS
    first_key = page_start + tile * tiles.BLOCK_T
    if (request >= 0) & (tl.maximum(first_key, start) < tl.minimum(first_key + tiles.BLOCK_T, end)):
        keys = first_key + tl.arange(0, tiles.BLOCK_T)
        live = (keys >= start) & (keys < end)
        in_pages, in_scales = key_offsets(
            page_table_ptr + request * stride_table_request,
            page_start,
            tile,
            end,
            stride_pages_page,
            stride_pages_slot,
            tiles.PAGE_TOKENS,
            tiles.BLOCK_T,
            STARTS_PAGE=True,
            KEEPS_OFFSETS=False,
            stride_scales_page=stride_scales_page if HAS_SLOT_SCALES else None,
            stride_scales_slot=stride_scales_slot if HAS_SLOT_SCALES else None,
        )
        in_pages += head * stride_pages_head
        k_scales = None
        v_scales = None
        if HAS_SLOT_SCALES:
            in_scales += head * stride_scales_head
            k_scales = load_scales(scales.k_slot_scales_ptr, in_scales, live)
            v_scales = load_scales(scales.v_slot_scales_ptr, in_scales, live)
        k = load_rows(
            stored.k_pages_ptr,
            in_pages,
            live,
            tiles.HEAD_DIM // PER_ITEM,
            tiles.BLOCK_D // PER_ITEM,
        )
        v = load_rows(
            stored.v_pages_ptr,
            in_pages,
            live,
            tiles.VALUE_DIM // PER_ITEM,
            tiles.BLOCK_V // PER_ITEM,
        )
        k = _restored(k, scales.k_scale_ptr, k_scales, head, tiles.IS_PER_HEAD_K, dtype)
        v = _restored(v, scales.v_scale_ptr, v_scales, head, tiles.IS_PER_HEAD_V, dtype)
        out_slots = out_page * tiles.OUT_PAGE_TOKENS + (keys - page_start)
        in_out = slot_offsets(out_slots, stride_out_page, stride_out_slot, tiles.OUT_PAGE_TOKENS)
        in_out += head * stride_out_head
        store_rows(outputs.k_out_ptr, in_out, k, live, tiles.HEAD_DIM, tiles.BLOCK_D)
        store_rows(outputs.v_out_ptr, in_out, v, live, tiles.VALUE_DIM, tiles.BLOCK_V)
