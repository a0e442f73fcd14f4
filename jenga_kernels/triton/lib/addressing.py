"""Page ids turned into 64-bit offsets: the only place where a page becomes an address.

An arena holds far more than 2**31 elements, so every id is widened before it is multiplied.
"""

import math
from collections.abc import Mapping

import torch
import triton.language as tl

from jenga_kernels.triton.lib.device import device_function


@device_function
def page_offsets(page_ids, stride_page):
    """Offset of each page from the base of its layer, in elements."""
    return page_ids.to(tl.int64) * stride_page


@device_function
def slot_offsets(slots, stride_page, stride_slot, PAGE_TOKENS: tl.constexpr):
    """Offset of each slot; slot s is token s % PAGE_TOKENS of page s // PAGE_TOKENS."""
    return page_offsets(slots // PAGE_TOKENS, stride_page) + (slots % PAGE_TOKENS) * stride_slot


@device_function
def key_offsets(
    page_table_ptr,  # i32[max_pages], the request's row
    tiles_start,
    tile,
    keys_end,  # the table is not read for keys from here on; None if all keys of the tile exist
    stride_page,
    stride_slot,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS_PAGE: tl.constexpr,
    KEEPS_OFFSETS: tl.constexpr,
    stride_scales_page=None,  # given with stride_scales_slot, if slots have scales of their own
    stride_scales_slot=None,
):
    """Offset of each key of a request's tile, found through the page table, and of its scale.

    The number of lookups depends on the shapes:

    - One for the tile, if tiles cannot straddle pages.
    - One for each page, if tiles are whole pages. They are if the first one starts a page
      (STARTS_PAGE).
    - One for each key otherwise. If a tile is a multiple of a page, a key has the same slot in
      every tile, and a loop computes the slots once.

    With KEEPS_OFFSETS the slot stride is a constant, and parts of the offsets are constants too.
    Without strides of scales, the second result has no meaning.
    """
    in_tile = tl.arange(0, BLOCK_N)
    first_key = tiles_start + tile * BLOCK_N
    if PAGE_TOKENS % BLOCK_N == 0:
        page_ids = tl.load(page_table_ptr + first_key // PAGE_TOKENS)
        first_slot = first_key % PAGE_TOKENS
        slots = first_slot + in_tile
        if KEEPS_OFFSETS:
            in_page = first_slot.to(tl.int64) * stride_slot + _in_page(in_tile, stride_slot)
        else:
            in_page = slots.to(tl.int64) * stride_slot
    elif BLOCK_N % PAGE_TOKENS == 0 and STARTS_PAGE:
        TILE_PAGES: tl.constexpr = BLOCK_N // PAGE_TOKENS
        pages = tiles_start // PAGE_TOKENS + tile * TILE_PAGES + tl.arange(0, TILE_PAGES)
        has_page = None if keys_end is None else pages * PAGE_TOKENS < keys_end
        page_ids = _load_page_ids(page_table_ptr, pages, has_page)[:, None]
        page_ids = tl.reshape(tl.broadcast_to(page_ids, [TILE_PAGES, PAGE_TOKENS]), [BLOCK_N])
        if KEEPS_OFFSETS:
            slots = tl.broadcast_to(tl.arange(0, PAGE_TOKENS)[None, :], [TILE_PAGES, PAGE_TOKENS])
            slots = tl.reshape(slots, [BLOCK_N])
            in_page = _in_page(slots, stride_slot)
        else:
            slots = in_tile % PAGE_TOKENS
            in_page = slots.to(tl.int64) * stride_slot
    else:
        # Unsigned division of keys becomes shifts if pages are powers of two.
        if BLOCK_N % PAGE_TOKENS == 0:
            # Keys that are a page apart have the same slot.
            first_keys = (tiles_start + in_tile % PAGE_TOKENS).to(tl.uint32)
            pages = (first_keys // PAGE_TOKENS).to(tl.int32) + in_tile // PAGE_TOKENS
            pages += tile * (BLOCK_N // PAGE_TOKENS)
        else:
            first_keys = (first_key + in_tile).to(tl.uint32)
            pages = (first_keys // PAGE_TOKENS).to(tl.int32)
        has_page = None if keys_end is None else in_tile < keys_end - first_key
        page_ids = _load_page_ids(page_table_ptr, pages, has_page)
        slots = first_keys % PAGE_TOKENS
        in_page = slots.to(tl.int64) * stride_slot
    # An unsigned id is widened by a register of zeros.
    page_ids = page_ids.to(tl.uint32)
    offsets = page_offsets(page_ids, stride_page) + in_page
    if stride_scales_page is None:
        return offsets, offsets
    else:
        in_scales = slots.to(tl.int64) * stride_scales_slot
        return offsets, page_offsets(page_ids, stride_scales_page) + in_scales


@device_function
def _in_page(slots, stride_slot):
    """Offset of each slot of a page, for a constant stride.

    A thread has every second, fourth or eighth slot, depending on the width of a row. The bits in
    which its slots differ give constants. The other bits are the same for all its slots.
    """
    fine = (slots & 1).to(tl.int64) * stride_slot
    middle = (slots & 6).to(tl.int64) * stride_slot
    return fine + middle + (slots // 8 * 8).to(tl.int64) * stride_slot


@device_function
def _load_page_ids(page_table_ptr, pages, has_page):
    if has_page is None:
        return tl.load(page_table_ptr + pages)
    else:
        return tl.load(page_table_ptr + pages, mask=has_page, other=0)


@device_function
def repeated_key_offsets(
    page_table_ptr,  # i32[max_pages], the request's row
    first_key,
    last_key,  # not before first_key
    stride_page,
    stride_slot,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Offsets as `key_offsets` gives, but each key past last_key has the offset of last_key.

    Loads from these need no mask, and their values are finite. first_key must be a multiple of
    BLOCK_N.
    """
    ahead = tl.minimum(tl.arange(0, BLOCK_N), last_key - first_key)
    if PAGE_TOKENS % BLOCK_N == 0:
        page_id = tl.load(page_table_ptr + first_key // PAGE_TOKENS)
        return page_offsets(page_id, stride_page) + (first_key % PAGE_TOKENS + ahead) * stride_slot
    else:
        keys = first_key + ahead
        page_ids = tl.load(page_table_ptr + keys // PAGE_TOKENS)
        return page_offsets(page_ids, stride_page) + (keys % PAGE_TOKENS) * stride_slot


@device_function
def first_tile_key(
    first_key, PAGE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """First key of the tiles of a range: its start, unless tiles must stay within a page.

    Aligned tiles begin at multiples of their length, whatever the range is.
    """
    if IS_ALIGNED or PAGE_TOKENS % BLOCK_N == 0:
        return first_key // BLOCK_N * BLOCK_N
    else:
        return first_key


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Get a tensor's strides in elements, with 0 in dimensions of size one.

    PyTorch leaves the stride of such a dimension undefined. 0 keeps the alignment Triton infers.
    """
    found = tensor.stride()
    if min(tensor.shape, default=0) > 1:
        return found
    return tuple(
        0 if size <= 1 else stride for size, stride in zip(tensor.shape, found, strict=True)
    )


def named_strides(
    tensors: Mapping[str, object], dims: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
    """Get the arguments `stride_{tensor}_{dimension}` of a kernel.

    Args:
        tensors: Arguments of an operation by name. The strides of None are 0.
        dims: Names of tensors -> names of their first dimensions. Those that the operation does not
            have are left out.

    Returns:
        Strides as `strides` gives them, in elements.
    """
    found: dict[str, int] = {}
    for name, of_tensor in dims.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        known = strides(tensor) if isinstance(tensor, torch.Tensor) else (0,) * len(of_tensor)
        found |= {f"stride_{name}_{dim}": known[at] for at, dim in enumerate(of_tensor)}
    return found


def constant_stride(stride: int, num_indices: int) -> int | None:
    """Return a stride if a kernel may be compiled for it, else None.

    A constant stride saves the kernel 64-bit products. It is possible if the offset of every index
    fits into 32 bits.
    """
    return stride if stride * num_indices < 2**31 else None


def alignment(stride: int) -> int:
    """Greatest power of two, at most 16, that divides a stride.

    By itself, Triton only tests for 16. If it is told of 8, it still loads 16 bytes of narrow
    elements at once.
    """
    return math.gcd(stride, 16)
