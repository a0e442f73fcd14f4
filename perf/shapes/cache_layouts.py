"""Caches that benchmarks read and write: their element types, and their layout in a page."""

from dataclasses import dataclass
from enum import Enum

import torch

from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.checks.pages import elements_per_item
from jenga_kernels.checks.tensors import E5M2_DTYPE, INT4_DTYPE
from jenga_kernels.reference.attention.kv_store import quantised

SCALE_BYTES = 4
"""Bytes of the scale of one head of one slot.

It is a float32. With four bits per element it is a step and a least element, both bfloat16.
"""

INT4_MAX = 15
"""Largest element of four bits."""

PAGES_AT_ONCE = 4096
"""Number of pages whose random contents are made at once, since an arena is large."""


class Stored(Enum):
    """Type of a cache's keys and values."""

    BF16 = "bf16"
    FP8 = "fp8"
    """float8_e4m3fn, with one scale for all keys and values."""
    E5M2 = "e5m2"
    """float8_e5m2, with one scale for all keys and values."""
    FP8_SLOTS = "fp8-slots"
    """float8_e4m3fn, with one scale for each head of each slot."""
    INT8_SLOTS = "int8-slots"
    """int8, with one scale for each head of each slot."""
    INT4_SLOTS = "int4-slots"
    """Four bits per element of rotated rows.

    Each head of each slot has a step and a least element.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the pages' tensors. With four bits, an item holds two elements."""
        return _DTYPES.get(self, torch.float8_e4m3fn)

    @property
    def has_slot_scales(self) -> bool:
        """Whether each head of each slot has scales of its own."""
        return self in (Stored.FP8_SLOTS, Stored.INT8_SLOTS, Stored.INT4_SLOTS)

    @property
    def is_quantised(self) -> bool:
        """Whether elements take a byte or less."""
        return self is not Stored.BF16

    @property
    def is_rotated(self) -> bool:
        """Whether keys, values and queries are rotated, and results are rotated back."""
        return self is Stored.INT4_SLOTS

    def num_items(self, head_dim: int) -> int:
        """Number of items of one key or value of one head."""
        return head_dim // elements_per_item(self.dtype)

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one key or value of one head, with its scale."""
        scale_bytes = SCALE_BYTES * self.has_slot_scales
        return self.num_items(head_dim) * self.dtype.itemsize + scale_bytes


_DTYPES = {
    Stored.BF16: torch.bfloat16,
    Stored.E5M2: E5M2_DTYPE,
    Stored.INT8_SLOTS: torch.int8,
    Stored.INT4_SLOTS: INT4_DTYPE,
}
"""Stored type -> element type, except those with float8_e4m3fn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One layer's keys and values in an arena, and their scales.

    Attributes:
        stored: Type of keys and values.
        k_pages: Keys, [num_pages, page_tokens, num_kv_heads, head_dim], or u8[.., head_dim // 2]
            with four bits per element.
        v_pages: Values, like k_pages.
        scale: Scale of all keys and all values, f32[1]. None except for float8 without scales of
            slots.
        k_slot_scales: Scales of keys, f32[num_pages, page_tokens, num_kv_heads]. In our cache of
            four bits they are steps and least elements, bf16[.., 2]. None if slots have no scales.
        v_slot_scales: Scales of values, like k_slot_scales.
    """

    stored: Stored
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    scale: torch.Tensor | None = None
    k_slot_scales: torch.Tensor | None = None
    v_slot_scales: torch.Tensor | None = None

    @property
    def page_stride_bytes(self) -> int:
        """Bytes from one page to the next."""
        return self.k_pages.stride(0) * self.k_pages.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Cache of one layer, and the number of layers that share a small page.

    Attributes:
        stored: Type of keys and values.
        num_kv_heads: Number of heads of keys and of values.
        head_dim: Number of elements of a head.
        page_tokens: Number of slots of a small page.
        num_layers: Number of layers that share a small page.
    """

    stored: Stored
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    num_layers: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part of a small page."""
        return 2 * self.num_kv_heads * self.page_tokens * self.stored.row_bytes(self.head_dim)

    @property
    def small_page_bytes(self) -> int:
        """Bytes from one page to the next, which include the parts of all layers."""
        return self.num_layers * self.layer_bytes

    def parts(self, num_pages: int, device: torch.device) -> torch.Tensor:
        """Make one layer's parts of an arena's pages, zero, u8[num_pages, layer_bytes]."""
        arena = torch.zeros(
            num_pages, self.num_layers, self.layer_bytes, dtype=torch.uint8, device=device
        )
        return arena[:, 1 % self.num_layers]


def make_cache(shape: CacheShape, num_pages: int, device: torch.device) -> Cache:
    """Make a cache of zeros in our layout: the scales of a page lie behind its slots."""
    parts = shape.parts(num_pages, device)
    heads, tokens, stored = shape.num_kv_heads, shape.page_tokens, shape.stored
    row_items = stored.num_items(shape.head_dim)
    data_bytes = heads * tokens * 2 * row_items * stored.dtype.itemsize
    rows = parts[:, :data_bytes].view(stored.dtype).view(num_pages, heads, tokens, 2 * row_items)
    rows = rows.transpose(1, 2)
    sides: tuple[torch.Tensor | None, ...] = (None, None)
    if stored.has_slot_scales:
        scales = parts[:, data_bytes:].view(torch.float32).view(num_pages, 2, heads, tokens)
        sides = scales.transpose(2, 3).unbind(1)
        if stored is Stored.INT4_SLOTS:
            sides = tuple(side[..., None].view(torch.bfloat16) for side in sides)
    return Cache(
        stored=stored,
        k_pages=rows[..., :row_items],
        v_pages=rows[..., row_items:],
        scale=torch.ones(1, device=device) if stored in (Stored.FP8, Stored.E5M2) else None,
        k_slot_scales=sides[0],
        v_slot_scales=sides[1],
    )


def fill(cache: Cache, page_ids: torch.Tensor) -> None:
    """Write random keys and values into pages, i64[num_filled]."""
    device = cache.k_pages.device
    *page_rows, row_items = cache.k_pages.shape[1:]
    head_dim = row_items * elements_per_item(cache.k_pages.dtype)
    for some in page_ids.to(device).split(PAGES_AT_ONCE):
        for pages, scales in (
            (cache.k_pages, cache.k_slot_scales),
            (cache.v_pages, cache.v_slot_scales),
        ):
            part = torch.randn(len(some), *page_rows, head_dim, device=device)
            if scales is None:
                part = part.to(pages.dtype)
            else:
                rows = part.view(-1, head_dim)
                is_int4 = pages.dtype == INT4_DTYPE
                part, of_rows = in_whole_steps(rows) if is_int4 else quantised(rows, pages.dtype)
                part = part.view(len(some), *page_rows, row_items)
                scales[some] = of_rows.view(len(some), *scales.shape[1:])
            # float8 tensors cannot be indexed for writing, so their bytes are written.
            elements = torch.uint8 if pages.dtype.itemsize == 1 else pages.dtype
            pages.view(elements)[some] = part.view(elements)


def in_whole_steps(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to four bits in such a way that vLLM's caches can hold the same values.

    The least element is a whole number of steps below zero. The step is rounded up to four binary
    digits. That number has four digits too, so their product is exact in bfloat16.

    Args:
        rows: f32[num_rows, head_dim]. Each row has elements below and above zero.

    Returns:
        The rows, two elements in each byte, and their steps and least elements, bf16[num_rows, 2].
    """
    least, greatest = rows.aminmax(dim=-1)
    digits, exponents = torch.frexp((greatest - least) / INT4_MAX)
    steps = torch.ldexp((digits * 16).ceil(), exponents - 4)
    steps_below = (-least / steps).round()
    elements = (rows / steps[:, None]).round() + steps_below[:, None]
    elements = elements.clamp(0, INT4_MAX).to(INT4_DTYPE)
    pairs = torch.stack([steps, -steps * steps_below], -1).to(torch.bfloat16)
    return elements[:, ::2] | (elements[:, 1::2] << 4), pairs


def vllm_gain(head_dim: int) -> float:
    """Return the ratio of vLLM's rotated rows to ours, if `head_dim` is a power of two."""
    return (head_dim / hadamard_rotation(head_dim, torch.float32, torch.device("cpu")).gain) ** 0.5


def as_vllm_has_it(cache: Cache, shape: CacheShape) -> Cache:
    """Return a cache in vLLM's layout with the same keys and values.

    If slots have no scales, the layouts agree, and the given cache is returned. vLLM's scales lie
    behind each key and each value.

    Source: `TritonAttentionImpl._ensure_scale_caches` of vLLM 0.32.
    """
    stored, row_items = shape.stored, shape.stored.num_items(shape.head_dim)
    if cache.k_slot_scales is None or cache.v_slot_scales is None:
        return cache
    num_pages = cache.k_pages.shape[0]
    parts = shape.parts(num_pages, cache.k_pages.device)
    rows = parts.view(
        num_pages, shape.num_kv_heads, shape.page_tokens, 2, stored.row_bytes(shape.head_dim)
    )
    k_rows, v_rows = rows.transpose(1, 2).unbind(3)
    k_scales, v_scales = (
        side[..., row_items:].view(torch.float32)[..., 0] for side in (k_rows, v_rows)
    )
    k_rows[..., :row_items] = cache.k_pages.view(torch.uint8)
    v_rows[..., :row_items] = cache.v_pages.view(torch.uint8)
    for theirs, ours in ((k_scales, cache.k_slot_scales), (v_scales, cache.v_slot_scales)):
        theirs.copy_(_with_zero_points(ours, shape.head_dim) if stored.is_rotated else ours)
    return Cache(
        stored=stored,
        k_pages=k_rows[..., :row_items].view(stored.dtype),
        v_pages=v_rows[..., :row_items].view(stored.dtype),
        k_slot_scales=k_scales,
        v_slot_scales=v_scales,
    )


def _with_zero_points(pairs: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return steps in vLLM's format, f32[..].

    Their last four bits hold the number of steps from the least element to zero.

    Args:
        pairs: Steps and least elements from `in_whole_steps`, or zeros, bf16[.., 2].
        head_dim: Number of elements of a row.

    Source: `_reshape_cache_int4_kernel` of vLLM 0.32.
    """
    steps, least = pairs.float().unbind(-1)
    steps_below = -least / steps.where(steps > 0, 1.0)
    words = (steps * vllm_gain(head_dim)).view(torch.int32) | steps_below.to(torch.int32)
    return words.view(torch.float32)
