"""Caches that benchmarks read and write: what they store, and where a page has it."""

from dataclasses import dataclass
from enum import Enum

import torch

from jenga_kernels.reference.kv_store import quantised

SCALE_BYTES = 4
"""Of the scale of a head of a slot, a float32."""

PAGES_AT_ONCE = 4096
"""For which random numbers are made together: an arena is large."""


class Stored(Enum):
    """What a cache holds of keys and values."""

    BF16 = "bf16"
    FP8 = "fp8"
    """float8_e4m3fn, with a scale for all of them."""
    FP8_SLOTS = "fp8-slots"
    """float8_e4m3fn, with a scale for each head of each slot."""
    INT8_SLOTS = "int8-slots"
    """int8, with a scale for each head of each slot."""

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        if self is Stored.BF16:
            return torch.bfloat16
        return torch.int8 if self is Stored.INT8_SLOTS else torch.float8_e4m3fn

    @property
    def has_slot_scales(self) -> bool:
        """Whether each head of each slot has scales of its own."""
        return self in (Stored.FP8_SLOTS, Stored.INT8_SLOTS)

    @property
    def is_quantised(self) -> bool:
        """Whether elements take a byte."""
        return self is not Stored.BF16

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a key, or of a value, of one head, with its scale."""
        return head_dim * self.dtype.itemsize + SCALE_BYTES * self.has_slot_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One layer's keys and values in an arena, and what they are multiplied with.

    Attributes:
        stored: What it holds.
        k_pages: Keys, [num_pages, page_tokens, num_kv_heads, head_dim].
        v_pages: Values, as k_pages.
        scale: Of all keys and all values, f32[1]; None but for `Stored.FP8`.
        k_slot_scales: f32[num_pages, page_tokens, num_kv_heads], or None.
        v_slot_scales: As k_slot_scales.
    """

    stored: Stored
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    scale: torch.Tensor | None = None
    k_slot_scales: torch.Tensor | None = None
    v_slot_scales: torch.Tensor | None = None

    @property
    def page_stride_bytes(self) -> int:
        """From a page to the next."""
        return self.k_pages.stride(0) * self.k_pages.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a layer stores, and how many layers share a small page."""

    stored: Stored
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    num_layers: int

    @property
    def layer_bytes(self) -> int:
        """Of a layer's part of a small page."""
        return 2 * self.num_kv_heads * self.page_tokens * self.stored.row_bytes(self.head_dim)

    @property
    def small_page_bytes(self) -> int:
        """From a page to the next, all layers' parts."""
        return self.num_layers * self.layer_bytes

    def parts(self, num_pages: int, device: torch.device) -> torch.Tensor:
        """Zeros: one layer's parts of an arena's pages, u8[num_pages, layer_bytes]."""
        arena = torch.zeros(
            num_pages, self.num_layers, self.layer_bytes, dtype=torch.uint8, device=device
        )
        return arena[:, 1 % self.num_layers]


def make_cache(shape: CacheShape, num_pages: int, device: torch.device) -> Cache:
    """A cache of zeros as our kernels read it: the scales of a page lie behind its slots."""
    parts = shape.parts(num_pages, device)
    heads, tokens, stored = shape.num_kv_heads, shape.page_tokens, shape.stored
    row_elements = 2 * shape.head_dim
    data_bytes = heads * tokens * row_elements * stored.dtype.itemsize
    rows = parts[:, :data_bytes].view(stored.dtype).view(num_pages, heads, tokens, row_elements)
    rows = rows.transpose(1, 2)
    sides: tuple[torch.Tensor | None, ...] = (None, None)
    if stored.has_slot_scales:
        scales = parts[:, data_bytes:].view(torch.float32).view(num_pages, 2, heads, tokens)
        sides = scales.transpose(2, 3).unbind(1)
    return Cache(
        stored=stored,
        k_pages=rows[..., : shape.head_dim],
        v_pages=rows[..., shape.head_dim :],
        scale=torch.ones(1, device=device) if stored is Stored.FP8 else None,
        k_slot_scales=sides[0],
        v_slot_scales=sides[1],
    )


def fill(cache: Cache, page_ids: torch.Tensor) -> None:
    """Put random keys and values into pages, i64[num_filled]."""
    device = cache.k_pages.device
    page_shape = cache.k_pages.shape[1:]
    for some in page_ids.to(device).split(PAGES_AT_ONCE):
        for pages, scales in (
            (cache.k_pages, cache.k_slot_scales),
            (cache.v_pages, cache.v_slot_scales),
        ):
            part = torch.randn(len(some), *page_shape, device=device)
            if scales is None:
                part = part.to(pages.dtype)
            else:
                part, of_rows = quantised(part.view(-1, page_shape[-1]), pages.dtype)
                part = part.view(len(some), *page_shape)
                scales[some] = of_rows.view(part.shape[:-1])
            # No index reaches float8 tensors: their bytes are written.
            elements = torch.uint8 if pages.dtype.itemsize == 1 else pages.dtype
            pages.view(elements)[some] = part.view(elements)


def as_vllm_has_it(cache: Cache, shape: CacheShape) -> Cache:
    """The same keys and values where vLLM's kernels read them; this cache if that is there.

    Where slots have scales, theirs lie behind each key and each value.

    Source: `TritonAttentionImpl._ensure_scale_caches` of vLLM 0.32.
    """
    stored, head_dim = shape.stored, shape.head_dim
    if cache.k_slot_scales is None or cache.v_slot_scales is None:
        return cache
    num_pages = cache.k_pages.shape[0]
    parts = shape.parts(num_pages, cache.k_pages.device)
    rows = parts.view(
        num_pages, shape.num_kv_heads, shape.page_tokens, 2, stored.row_bytes(head_dim)
    )
    k_rows, v_rows = rows.transpose(1, 2).unbind(3)
    k_scales, v_scales = (
        side[..., head_dim:].view(torch.float32)[..., 0] for side in (k_rows, v_rows)
    )
    k_rows[..., :head_dim] = cache.k_pages.view(torch.uint8)
    v_rows[..., :head_dim] = cache.v_pages.view(torch.uint8)
    k_scales.copy_(cache.k_slot_scales)
    v_scales.copy_(cache.v_slot_scales)
    return Cache(
        stored=stored,
        k_pages=k_rows[..., :head_dim].view(stored.dtype),
        v_pages=v_rows[..., :head_dim].view(stored.dtype),
        k_slot_scales=k_scales,
        v_slot_scales=v_scales,
    )
