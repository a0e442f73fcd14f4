"""Views of a layer's cache as kernel arguments: keys, values and their scales."""

from typing import Any, TypedDict

import torch

from jenga_kernels.checks.tensors import E5M2_DTYPE, FP8_DTYPE

E5M2 = "fp8_e5m2"
"""Value of --kv-cache-dtype for elements of float8_e5m2."""

INT4 = "int4_per_token_head"
"""Value of --kv-cache-dtype for elements of four bits, two in each uint8."""

SLOT_SCALE_DTYPES = ("int8_per_token_head", "fp8_per_token_head", INT4)
"""Values of --kv-cache-dtype for caches in which each head of each slot has its own scales."""

SLOT_SCALES_BYTES = 2 * torch.float32.itemsize
"""Bytes of the scales of one head of one slot, one for the key and one for the value.

With four bits an element, a scale is a pair of bfloat16: the step and the smallest element.
"""


class CacheViews(TypedDict):
    """Arguments that `kv_store` and `paged_attention` have in common."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_slot_scales: torch.Tensor | None
    v_slot_scales: torch.Tensor | None


def cache_views(
    layer: Any,  # noqa: ANN401
    kv_cache: torch.Tensor,
    *,
    head_dim: int,
    cache_dtype: str,
) -> CacheViews:
    """Make the kernels' views of a layer's cache.

    Args:
        layer: vLLM's layer. It has the scales of a cache whose slots share them.
        kv_cache: [num_pages, num_kv_heads, page_tokens, bytes or elements of a slot's key and
            value]. uint8 stands for float8, except with four bits an element.
        head_dim: Number of elements in a key.
        cache_dtype: Value of --kv-cache-dtype.
    """
    if cache_dtype == INT4:
        views = _views_of_scaled_slots(kv_cache, head_dim // 2)
        views["k_slot_scales"] = _pairs(views["k_slot_scales"])
        views["v_slot_scales"] = _pairs(views["v_slot_scales"])
        return views
    elements = kv_cache
    if kv_cache.dtype == torch.uint8:
        elements = kv_cache.view(E5M2_DTYPE if cache_dtype == E5M2 else FP8_DTYPE)
    if cache_dtype in SLOT_SCALE_DTYPES:
        return _views_of_scaled_slots(elements, head_dim)
    by_token = elements.transpose(1, 2)
    scales = (None, None)
    if kv_cache.dtype == torch.uint8:
        scales = (layer._k_scale.reshape(-1), layer._v_scale.reshape(-1))
    return CacheViews(
        k_pages=by_token[..., :head_dim],
        v_pages=by_token[..., head_dim:],
        k_scale=scales[0],
        v_scale=scales[1],
        k_slot_scales=None,
        v_slot_scales=None,
    )


def _views_of_scaled_slots(kv_cache: torch.Tensor, key_bytes: int) -> CacheViews:
    """Make views of a cache whose slots have their own scales.

    Args:
        kv_cache: [num_pages, num_kv_heads, page_tokens, bytes of a key, a value and 8 of scales],
            elements of one byte. A page is contiguous, with its dimensions in any order.
        key_bytes: Number of bytes in a key.
    """
    rows, (k_scales, v_scales) = split_pages(kv_cache, num_words=2)
    return CacheViews(
        k_pages=rows[..., :key_bytes],
        v_pages=rows[..., key_bytes:],
        k_scale=None,
        v_scale=None,
        k_slot_scales=k_scales,
        v_slot_scales=v_scales,
    )


def split_pages(
    kv_cache: torch.Tensor, *, num_words: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Make views of a cache whose slots hold words of four bytes beside the rows of each head.

    In a page, the words lie after all rows. vLLM puts the words of a slot next to its key and
    value. Then rows would begin at multiples of four bytes, and each load would have only four.

    Args:
        kv_cache: [num_pages, num_kv_heads, page_tokens, elements of a key, a value and the words].
            A page is contiguous, with its dimensions in any order.
        num_words: Number of words of a head's slot.

    Returns:
        The rows of keys and values, [num_pages, page_tokens, num_kv_heads, elements of both], and
        num_words tensors f32[num_pages, page_tokens, num_kv_heads].
    """
    num_pages, num_kv_heads, page_tokens, slot_elements = kv_cache.shape
    words = torch.empty(0, dtype=torch.float32, device=kv_cache.device)
    element_bytes, word_bytes = kv_cache.element_size(), words.element_size()
    row_elements = slot_elements - num_words * word_bytes // element_bytes
    page_elements = int(kv_cache.stride(0)) if num_pages > 1 else 0
    head_elements = page_tokens * row_elements
    rows = kv_cache.as_strided(
        (num_pages, page_tokens, num_kv_heads, row_elements),
        (page_elements, row_elements, head_elements, 1),
    )
    num_in_page = num_kv_heads * page_tokens
    first_element = int(kv_cache.storage_offset()) + num_kv_heads * head_elements
    first_word = first_element * element_bytes // word_bytes
    views = [
        words.new_empty(0).set_(
            kv_cache.untyped_storage(),
            first_word + number * num_in_page,
            (num_pages, page_tokens, num_kv_heads),
            (page_elements * element_bytes // word_bytes, 1, page_tokens),
        )
        for number in range(num_words)
    ]
    return rows, views


def _pairs(words: torch.Tensor | None) -> torch.Tensor | None:
    """View words of 4 bytes, [num_pages, page_tokens, num_kv_heads], as pairs bf16[.., 2]."""
    return None if words is None else words[..., None].view(torch.bfloat16)
