"""Checks of operations on a paged cache of keys and values."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from jenga_kernels.checks.tensors import (
    CACHED_FLOAT_DTYPES,
    FP8_DTYPE,
    INT4_DTYPE,
    QUANTISED_DTYPES,
    SCALED_DTYPES,
    SLOT_SCALED_DTYPES,
    check_dtype,
    check_rows,
    check_shape,
)
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import machine_of


def check_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    value_dim: int | None = None,
) -> int:
    """Check the pages of a cache; return page_tokens.

    Args:
        k_pages: Keys.
        v_pages: Values.
        num_kv_heads: Number of heads that both must have.
        head_dim: Number of elements that a key must have.
        dtype: Element type of the activations. Both must have it, bfloat16, float16, float8, int8,
            or uint8 with two elements in each.
        value_dim: Number of elements that a value must have. None means head_dim.

    Raises:
        ValueError: If shape, dtype, strides or alignment do not fit.
    """
    value_dim = head_dim if value_dim is None else value_dim
    per_byte = elements_per_item(k_pages.dtype)
    for name, num_elements in (("head_dim", head_dim), ("value_dim", value_dim)):
        if num_elements % per_byte:
            msg = f"{name} must be even with pages of {INT4_DTYPE}, got {num_elements}"
            raise ValueError(msg)
    check_shape("k_pages", k_pages, (None, None, num_kv_heads, head_dim // per_byte))
    check_shape("v_pages", v_pages, (*k_pages.shape[:3], value_dim // per_byte))
    check_cached_dtype("k_pages", k_pages, dtype, QUANTISED_DTYPES)
    check_dtype("v_pages", v_pages, (k_pages.dtype,))
    if k_pages.dtype == FP8_DTYPE and not machine_of(k_pages.device).has_fp8:
        msg = f"k_pages must not be {FP8_DTYPE} on a GPU without it, before compute capability 8.9"
        raise ValueError(msg)
    check_rows("k_pages", k_pages)
    check_rows("v_pages", v_pages)
    if k_pages.stride() != v_pages.stride() and strides(k_pages)[:3] != strides(v_pages)[:3]:
        msg = (
            f"v_pages must have the strides of k_pages, {k_pages.stride()}, got {v_pages.stride()}"
        )
        raise ValueError(msg)
    if k_pages.shape[1] == 0:
        msg = f"k_pages must have at least one token per page, got shape {tuple(k_pages.shape)}"
        raise ValueError(msg)
    return k_pages.shape[1]


def check_cached_dtype(
    name: str, pages: torch.Tensor, dtype: torch.dtype, quantised: Sequence[torch.dtype]
) -> None:
    """Check a cache's element type: that of activations, 16-bit floating point, or quantised.

    Raises:
        ValueError: If it is another one.
    """
    others = [other for other in CACHED_FLOAT_DTYPES if other != dtype]
    check_dtype(name, pages, (dtype, *others, *quantised))


def is_other_float(pages_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a cache holds a 16-bit floating-point type that is not that of activations."""
    return pages_dtype != dtype and pages_dtype in CACHED_FLOAT_DTYPES


def check_scales(
    k_pages: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    num_kv_heads: int,
) -> None:
    """Check the scales of a quantised cache.

    Raises:
        ValueError: If the cache is not quantised, or shape or dtype do not fit.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_pages.dtype not in SCALED_DTYPES:
            wanted = " or ".join(map(str, SCALED_DTYPES))
            msg = f"{name} needs pages of {wanted}, got {k_pages.dtype}"
            raise ValueError(msg)
        check_dtype(name, scale, (torch.float32,))
        if tuple(scale.shape) not in ((1,), (num_kv_heads,)) or not scale.is_contiguous():
            msg = (
                f"{name} must have shape (1,) or ({num_kv_heads},), contiguous, got "
                f"{tuple(scale.shape)} with strides {scale.stride()}"
            )
            raise ValueError(msg)


class SlotScales(NamedTuple):
    """Scales of slots and heads, as kernels take them.

    Attributes:
        k: Scales of keys, f32, or pairs of bf16 as words of i32, [num_pages, page_tokens,
            num_kv_heads]. None means that there are none.
        v: Scales of values, as k.
        strides: Strides of both in elements, by page, slot and head; zeros if there are none.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    strides: tuple[int, ...] = (0, 0, 0)


NO_SCALES = SlotScales()


def check_slot_scales(
    k_pages: torch.Tensor,
    k_slot_scales: torch.Tensor | None,
    v_slot_scales: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> SlotScales:
    """Check the scales of a cache with one for each slot and head; return them for kernels.

    Raises:
        ValueError: If only one of the two is given, the cache is not quantised, it has other scales
            too, or shape, dtype or strides do not fit.
    """
    if k_slot_scales is None or v_slot_scales is None:
        if k_slot_scales is not v_slot_scales:
            msg = "k_slot_scales and v_slot_scales must be given together, got one of them"
            raise ValueError(msg)
        if k_pages.dtype in (torch.int8, INT4_DTYPE):
            msg = f"k_slot_scales and v_slot_scales must be given with pages of {k_pages.dtype}"
            raise ValueError(msg)
        return NO_SCALES
    if k_pages.dtype not in SLOT_SCALED_DTYPES:
        wanted = " or ".join(map(str, SLOT_SCALED_DTYPES))
        msg = f"k_slot_scales needs pages of {wanted}, got {k_pages.dtype}"
        raise ValueError(msg)
    if k_scale is not None or v_scale is not None:
        msg = "k_scale and v_scale must be None where slots have scales of their own"
        raise ValueError(msg)
    is_int4 = k_pages.dtype == INT4_DTYPE
    for name, scales in (("k_slot_scales", k_slot_scales), ("v_slot_scales", v_slot_scales)):
        check_shape(name, scales, (*k_pages.shape[:3], 2) if is_int4 else k_pages.shape[:3])
        check_dtype(name, scales, (torch.bfloat16 if is_int4 else torch.float32,))
        if is_int4 and not _is_of_words(scales):
            msg = (
                f"{name} must have steps and least elements side by side, at multiples of 4 bytes, "
                f"got strides {scales.stride()} from element {scales.storage_offset()} on"
            )
            raise ValueError(msg)
    if is_int4:
        k_slot_scales = k_slot_scales.view(torch.int32)[..., 0]
        v_slot_scales = v_slot_scales.view(torch.int32)[..., 0]
    found = strides(k_slot_scales)
    if found != strides(v_slot_scales):
        msg = (
            f"v_slot_scales must have the strides of k_slot_scales, {k_slot_scales.stride()}, got "
            f"{v_slot_scales.stride()}"
        )
        raise ValueError(msg)
    return SlotScales(k_slot_scales, v_slot_scales, found)


def elements_per_item(dtype: torch.dtype) -> int:
    """Number of elements of a key or value in one item of pages of this type."""
    return 2 if dtype == INT4_DTYPE else 1


def _is_of_words(scales: torch.Tensor) -> bool:
    """Whether pairs bf16[num_pages, page_tokens, num_kv_heads, 2] are whole words of 4 bytes."""
    *others, last = scales.stride()
    return (
        last == 1
        and scales.data_ptr() % 4 == 0
        and scales.storage_offset() % 2 == 0
        and all(stride % 2 == 0 for stride in others)
    )
