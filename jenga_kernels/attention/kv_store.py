"""Writing new keys and values into a paged cache."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.pages import (
    NO_SCALES,
    SlotScales,
    check_pages,
    check_scales,
    check_slot_scales,
)
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_apart,
    check_dtype,
    check_no_gradients,
    check_rows,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.attention import kv_store as reference
from jenga_kernels.triton.attention.kv_store import kv_store_kernel
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import (
    LOAD_BYTES,
    copy_tiles,
    line_elements,
    machine_of,
    power_of_two,
)

_calls: Calls = {}

NO_SLOT = -1
"""Slot of a padding token: nothing is written for it."""


class _Arguments(NamedTuple):
    """Arguments of `kv_store`, in the same order."""

    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slots: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_slot_scales: torch.Tensor | None
    v_slot_scales: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.kv_store)
def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_slot_scales: torch.Tensor | None = None,
    v_slot_scales: torch.Tensor | None = None,
) -> None:
    """Copy each token's key and value into its slot.

    The dtype of the cache decides how elements are stored:

    - bfloat16 or float16: keys and values of another dtype are rounded to nearest. Elements out of
      range become infinite.
    - float8_e4m3fn or float8_e5m2: k / k_scale and v / v_scale, rounded and saturated.
    - float8_e4m3fn or int8 with slot scales: each head of each token is divided by a scale that
      brings its greatest element to 448 or 127, then rounded to nearest.
    - uint8: two elements of four bits in each item. An element is stored as its number of steps
      above the head's least element. A step is a fifteenth of the head's range. Step and least
      element are rounded to bfloat16 first. Such heads should be rotated first
      (`jenga_kernels.attention.rotation`).

    Slots must lie in the cache and differ from each other. Neither is checked, because slots are on
    the device.

    Args:
        k: Keys, [num_tokens, num_kv_heads, head_dim], bfloat16, float16 or float32.
        v: Values, [num_tokens, num_kv_heads, value_dim], dtype of k.
        k_pages: Cache of keys, written in place, [num_pages, page_tokens, num_kv_heads, head_dim].
            The dtype is that of k, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8. With
            uint8 the shape is [.., head_dim // 2], and item i holds element 2 i in its low half and
            2 i + 1 in its high half. Strides may be any multiples of 16 bytes; the last dimension
            is contiguous, and no two elements share memory.
        v_pages: Cache of values, written in place, as k_pages with value_dim elements, dtype and
            strides of k_pages; must not overlap it. If value_dim is not head_dim, store each
            slot's value behind its key, so that the strides are the same.
        slots: Slot of each token, i64[num_tokens]. Slot s is token s % page_tokens of page
            s // page_tokens. Tokens with a negative slot (`NO_SLOT`) are skipped.
        k_scale: Factor that restores a stored key, f32[1] or f32[num_kv_heads]; only with a float8
            cache, where None means 1.
        v_scale: Factor that restores a stored value, as k_scale.
        k_slot_scales: Factor that restores the key of each slot and head, written in place,
            f32[num_pages, page_tokens, num_kv_heads], any strides. Replaces k_scale with
            float8_e4m3fn, and is required with int8. With uint8, step and least element side by
            side, bf16[num_pages, page_tokens, num_kv_heads, 2]: element n is step * n + least. A
            head with an element that is not finite is read back as NaN.
        v_slot_scales: As k_slot_scales, for values; strides of k_slot_scales, not overlapping it.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit, or a gradient is
            required.
    """
    given = (k, v, k_pages, v_pages, slots, k_scale, v_scale, k_slot_scales, v_slot_scales)
    call = call_like(_calls, *given)
    is_first = call.launches is None
    if is_first:
        call.facts = _check(_Arguments(*given))
    _check_no_overlap(k_pages, v_pages)
    slot_scales = NO_SCALES
    if k_slot_scales is not None:
        slot_scales = check_slot_scales(k_pages, k_slot_scales, v_slot_scales, k_scale, v_scale)
        _check_written_scales(k_slot_scales, v_slot_scales)
    if is_first:
        call.launches = _launches(_Arguments(*given), slot_scales, call.facts)
    tensors = dict(zip(_POINTERS, given, strict=True))
    tensors |= {"k_slot_scales_ptr": slot_scales.k, "v_slot_scales_ptr": slot_scales.v}
    call.run(tensors)


def _check(given: _Arguments) -> int:
    """Check everything that follows from the signature of a call, and return page_tokens.

    Raises:
        ValueError: If something does not fit.
    """
    k_pages, v_pages = given.k_pages, given.v_pages
    _, num_kv_heads, head_dim, value_dim = _check_new_tokens(given.k, given.v, given.slots)
    page_tokens = check_pages(
        k_pages, v_pages, num_kv_heads, head_dim, given.k.dtype, value_dim=value_dim
    )
    check_apart("k_pages", k_pages)
    check_apart("v_pages", v_pages)
    check_scales(k_pages, given.k_scale, given.v_scale, num_kv_heads)
    check_slot_scales(
        k_pages, given.k_slot_scales, given.v_slot_scales, given.k_scale, given.v_scale
    )
    check_same_device(**given._asdict())
    check_no_gradients(k=given.k, v=given.v, k_pages=k_pages, v_pages=v_pages)
    return page_tokens


def _launches(given: _Arguments, slot_scales: SlotScales, page_tokens: int) -> list[Launch]:
    """List the launches that store the tokens of a call."""
    k, v = given.k, given.v
    if k.numel() == 0 and v.numel() == 0:
        return []
    num_tokens, num_kv_heads, head_dim = k.shape
    value_dim = v.shape[2]
    machine = machine_of(k.device)
    widest = max(head_dim, value_dim)
    tiles = copy_tiles(machine, widest)
    stride_page, stride_slot, stride_head, _ = strides(given.k_pages)
    constants = {
        "num_tokens": num_tokens,
        "stride_pages_page": stride_page,
        "stride_pages_slot": stride_slot,
        "stride_pages_head": stride_head,
        "stride_scales_page": slot_scales.strides[0],
        "stride_scales_slot": slot_scales.strides[1],
        "stride_scales_head": slot_scales.strides[2],
        "stride_k_token": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_token": v.stride(0),
        "stride_v_head": v.stride(1),
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "PAGE_TOKENS": page_tokens,
        "IS_PER_HEAD_K": given.k_scale is not None and given.k_scale.numel() > 1,
        "IS_PER_HEAD_V": given.v_scale is not None and given.v_scale.numel() > 1,
        "HAS_FP8": machine.has_fp8,
        "BLOCK_ROWS": tiles.block_rows,
        "BLOCK_D": power_of_two(widest),
        "BLOCK_LINE": line_elements(machine, widest, k.element_size()),
        "THREAD_ELEMENTS": LOAD_BYTES // k.element_size(),
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
    }
    num_programs = triton.cdiv(num_tokens * num_kv_heads, tiles.block_rows)
    return [Launch(kernel=kv_store_kernel, grid=(num_programs,), constants=constants)]


def _check_new_tokens(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[int, int, int, int]:
    """Check new tokens; return num_tokens, num_kv_heads, head_dim and value_dim.

    Raises:
        ValueError: If one does not fit.
    """
    check_shape("k", k, (None, None, None))
    num_tokens, num_kv_heads, head_dim = k.shape
    check_shape("v", v, (num_tokens, num_kv_heads, None))
    check_shape("slots", slots, (num_tokens,))
    check_dtype("k", k, FLOAT_DTYPES)
    check_dtype("v", v, (k.dtype,))
    check_dtype("slots", slots, (torch.int64,))
    check_rows("k", k)
    check_rows("v", v)
    if slots.numel() > 1 and slots.stride(0) != 1:
        msg = f"slots must be contiguous, got stride {slots.stride(0)}"
        raise ValueError(msg)
    return num_tokens, num_kv_heads, head_dim, v.shape[2]


def _check_no_overlap(k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    first, second = sorted((k_pages, v_pages), key=torch.Tensor.data_ptr)
    row_bytes = first.shape[-1] * first.element_size()
    if first.numel() and second.data_ptr() - first.data_ptr() < row_bytes:
        msg = "v_pages must not overlap k_pages"
        raise ValueError(msg)


def _check_written_scales(
    k_slot_scales: torch.Tensor | None, v_slot_scales: torch.Tensor | None
) -> None:
    if k_slot_scales is None or v_slot_scales is None:
        return
    check_apart("k_slot_scales", k_slot_scales)
    check_apart("v_slot_scales", v_slot_scales)
    if k_slot_scales.numel() and k_slot_scales.data_ptr() == v_slot_scales.data_ptr():
        msg = "v_slot_scales must not be k_slot_scales"
        raise ValueError(msg)
