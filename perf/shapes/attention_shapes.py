"""Shapes of attention from real models, and batches of them on an arena in page-layer layout."""

from dataclasses import dataclass

import torch

from jenga_kernels.plans.attention_plan import AttentionKind
from perf.shapes.cache_layouts import Cache, CacheShape, Stored, fill, make_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer of a model and one batch.

    Attributes:
        name: Name of the rows: model, kind of layer, batch.
        requests: (query tokens, stored tokens) of each request.
        num_heads: Number of query heads.
        num_kv_heads: Number of heads of keys and of values.
        head_dim: Number of elements of a head.
        page_tokens: Number of slots of a small page.
        num_layers: Number of layers that share a small page, which sets the stride between pages.
        window_tokens: The same argument of `paged_attention`.
        soft_cap: The same argument of `paged_attention`.
        has_sinks: Whether heads have a sink.
        is_causal: The same argument of `paged_attention`.
        stored: Type of keys and values in pages.
        arena_bytes: Least size of the arena, in bytes. The requests' pages are scattered over all
            of it.
        are_neighbours: Whether a request's pages follow one another in the arena instead.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int = 16
    num_layers: int = 4
    window_tokens: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_causal: bool = True
    stored: Stored = Stored.BF16
    arena_bytes: int = 0
    are_neighbours: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of query tokens in the batch."""
        return sum(queries for queries, _ in self.requests)

    @property
    def kind(self) -> AttentionKind:
        """Kind of attention that a plan is made for."""
        return AttentionKind(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
            window_tokens=self.window_tokens,
            is_causal=self.is_causal,
            is_quantised=self.stored.is_quantised,
            has_slot_scales=self.stored.has_slot_scales,
            is_int4=self.stored is Stored.INT4_SLOTS,
        )

    @property
    def cache(self) -> CacheShape:
        """Shape of the layer's cache."""
        return CacheShape(
            stored=self.stored,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
            num_layers=self.num_layers,
        )

    @property
    def small_page_bytes(self) -> int:
        """Bytes from one page to the next, which include the parts of all layers."""
        return self.cache.small_page_bytes

    @property
    def num_bytes(self) -> int:
        """Least number of bytes: keys, values, scales and queries are read, results written."""
        keys = sum(self._read_keys(queries, stored) for queries, stored in self.requests)
        cache = 2 * keys * self.num_kv_heads * self.stored.row_bytes(self.head_dim)
        return cache + 2 * self.num_tokens * self.num_heads * self.head_dim * 2

    @property
    def num_flops(self) -> int:
        """Two products for each visible pair of query and key, with a multiply and an add each."""
        pairs = sum(self._pairs(queries, stored) for queries, stored in self.requests)
        return 4 * pairs * self.num_heads * self.head_dim

    def _read_keys(self, queries: int, stored: int) -> int:
        if self.window_tokens is None:
            return stored
        return min(stored, queries + self.window_tokens - 1)

    def _pairs(self, queries: int, stored: int) -> int:
        if not self.is_causal:
            return queries * stored
        window = self.window_tokens or stored
        return sum(min(window, position + 1) for position in range(stored - queries, stored))


def _decode(batch: int, stored: int) -> tuple[tuple[int, int], ...]:
    return ((1, stored),) * batch


LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LLAMA_70B = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128}
GEMMA_2_27B = {"num_heads": 32, "num_kv_heads": 16, "head_dim": 128, "soft_cap": 50.0}
GEMMA_3_27B = {"num_heads": 32, "num_kv_heads": 16, "head_dim": 128, "window_tokens": 1024}
# From the configurations of google/gemma-4-31B and google/gemma-4-26B-A4B. Layers with a window
# have heads of head_dim elements. Layers with full attention have heads of global_head_dim
# elements, and fewer heads of keys.
GEMMA_4_31B_FULL = {"num_heads": 32, "num_kv_heads": 4, "head_dim": 512}
GEMMA_4_31B_WINDOW = {
    "num_heads": 32,
    "num_kv_heads": 16,
    "head_dim": 256,
    "window_tokens": 1024,
}
GEMMA_4_26B_FULL = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 512}
GPT_OSS_120B = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "has_sinks": True}
K = 1024

SHAPES = (
    AttentionShape(name="D1 llama-8b decode 1x1k", requests=_decode(1, K), **LLAMA_8B),
    AttentionShape(name="D2 llama-8b decode 1x32k", requests=_decode(1, 32 * K), **LLAMA_8B),
    AttentionShape(name="D3 llama-8b decode 8x4k", requests=_decode(8, 4 * K), **LLAMA_8B),
    AttentionShape(name="D4 llama-8b decode 8x16k", requests=_decode(8, 16 * K), **LLAMA_8B),
    AttentionShape(name="D5 llama-8b decode 32x4k", requests=_decode(32, 4 * K), **LLAMA_8B),
    AttentionShape(name="D6 llama-8b decode 8x32k", requests=_decode(8, 32 * K), **LLAMA_8B),
    AttentionShape(name="D7 llama-70b decode 1x128k", requests=_decode(1, 128 * K), **LLAMA_70B),
    AttentionShape(
        name="D8 llama-70b tp4 decode 64x8k",
        requests=_decode(64, 8 * K),
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
    ),
    AttentionShape(
        name="D9 gemma-2-27b full decode 32x8k", requests=_decode(32, 8 * K), **GEMMA_2_27B
    ),
    AttentionShape(
        name="D10 gemma-2-27b window decode 32x8k",
        requests=_decode(32, 8 * K),
        window_tokens=4096,
        **GEMMA_2_27B,
    ),
    AttentionShape(
        name="D11 gemma-3-27b window decode 64x32k", requests=_decode(64, 32 * K), **GEMMA_3_27B
    ),
    AttentionShape(
        name="D12 ministral-8b window decode 16x128k",
        requests=_decode(16, 128 * K),
        window_tokens=32 * K,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="D13 gpt-oss-120b window decode 128x8k",
        requests=_decode(128, 8 * K),
        window_tokens=128,
        **GPT_OSS_120B,
    ),
    AttentionShape(
        name="D14 gpt-oss-120b full decode 128x8k", requests=_decode(128, 8 * K), **GPT_OSS_120B
    ),
    AttentionShape(
        name="D15 llama-8b fp8 decode 64x8k",
        requests=_decode(64, 8 * K),
        stored=Stored.FP8,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="D16 llama-3.2-11b-vision cross decode 32x6404",
        requests=_decode(32, 6404),
        is_causal=False,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="D17 gemma-4-31b full decode 32x8k", requests=_decode(32, 8 * K), **GEMMA_4_31B_FULL
    ),
    AttentionShape(
        name="D18 gemma-4-31b full decode 1x128k", requests=_decode(1, 128 * K), **GEMMA_4_31B_FULL
    ),
    AttentionShape(
        name="D19 gemma-4-31b window decode 32x8k",
        requests=_decode(32, 8 * K),
        **GEMMA_4_31B_WINDOW,
    ),
    AttentionShape(
        name="D20 gemma-4-26b full decode 64x8k", requests=_decode(64, 8 * K), **GEMMA_4_26B_FULL
    ),
    AttentionShape(
        name="D21 gemma-4-31b full fp8 decode 32x8k",
        requests=_decode(32, 8 * K),
        stored=Stored.FP8,
        **GEMMA_4_31B_FULL,
    ),
    AttentionShape(
        name="D22 llama-8b int8-slots decode 64x8k",
        requests=_decode(64, 8 * K),
        stored=Stored.INT8_SLOTS,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="D23 llama-8b fp8-slots decode 64x8k",
        requests=_decode(64, 8 * K),
        stored=Stored.FP8_SLOTS,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="D24 llama-8b int4-slots decode 64x8k",
        requests=_decode(64, 8 * K),
        stored=Stored.INT4_SLOTS,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="D25 gpt-oss-120b full int4-slots decode 128x8k",
        requests=_decode(128, 8 * K),
        stored=Stored.INT4_SLOTS,
        **GPT_OSS_120B,
    ),
    AttentionShape(
        name="D26 llama-8b e5m2 decode 64x8k",
        requests=_decode(64, 8 * K),
        stored=Stored.E5M2,
        **LLAMA_8B,
    ),
    AttentionShape(name="P1 llama-8b prefill 8k", requests=((8 * K, 8 * K),), **LLAMA_8B),
    AttentionShape(name="P2 llama-8b prefill 16k", requests=((16 * K, 16 * K),), **LLAMA_8B),
    AttentionShape(name="P3 llama-8b chunk 2k on 30k", requests=((2 * K, 30 * K),), **LLAMA_8B),
    AttentionShape(
        name="P4 gemma-3-27b window prefill 32k", requests=((32 * K, 32 * K),), **GEMMA_3_27B
    ),
    AttentionShape(
        name="P5 gpt-oss-120b window prefill 8k",
        requests=((8 * K, 8 * K),),
        window_tokens=128,
        **GPT_OSS_120B,
    ),
    AttentionShape(
        name="P6 gemma-2-27b full prefill 8k", requests=((8 * K, 8 * K),), **GEMMA_2_27B
    ),
    AttentionShape(
        name="P7 llama-3.2-11b-vision cross prefill 2k",
        requests=((2 * K, 6404),),
        is_causal=False,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="P8 gemma-4-31b full prefill 8k", requests=((8 * K, 8 * K),), **GEMMA_4_31B_FULL
    ),
    AttentionShape(
        name="P9 gemma-4-31b window prefill 8k", requests=((8 * K, 8 * K),), **GEMMA_4_31B_WINDOW
    ),
    AttentionShape(
        name="P10 llama-8b int8-slots prefill 8k",
        requests=((8 * K, 8 * K),),
        stored=Stored.INT8_SLOTS,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="P11 llama-8b int4-slots prefill 8k",
        requests=((8 * K, 8 * K),),
        stored=Stored.INT4_SLOTS,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="P12 llama-8b fp8 prefill 8k",
        requests=((8 * K, 8 * K),),
        stored=Stored.FP8,
        **LLAMA_8B,
    ),
    AttentionShape(
        name="X1 llama-8b mixed 1x2k prefill, 31x4k decode",
        requests=((2 * K, 2 * K), *_decode(31, 4 * K)),
        **LLAMA_8B,
    ),
    AttentionShape(
        name="X2 llama-8b uneven decode",
        requests=tuple((1, 512 * (1 + index * index)) for index in range(16)),
        **LLAMA_8B,
    ),
)

DRY_SHAPES = (
    AttentionShape(
        name="dry decode", requests=_decode(2, 40), num_heads=4, num_kv_heads=2, head_dim=64
    ),
    AttentionShape(
        name="dry prefill", requests=((33, 40),), num_heads=4, num_kv_heads=2, head_dim=64
    ),
    AttentionShape(
        name="dry wide heads",
        requests=((1, 40), (20, 40)),
        num_heads=4,
        num_kv_heads=2,
        head_dim=512,
    ),
    AttentionShape(
        name="dry int8-slots",
        requests=((1, 40), (20, 40)),
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        stored=Stored.INT8_SLOTS,
    ),
    AttentionShape(
        name="dry int4-slots",
        requests=((1, 40), (20, 40)),
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        stored=Stored.INT4_SLOTS,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Tensors of a shape."""

    shape: AttentionShape
    q: torch.Tensor
    cache: Cache
    page_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None


def make_batch(shape: AttentionShape, device: torch.device, *, seed: int = 0) -> AttentionBatch:
    """Make random tensors of a shape, in one layer of an arena of `num_layers`.

    Queries are bfloat16.
    """
    torch.manual_seed(seed)
    pages_of = [-(-stored // shape.page_tokens) for _, stored in shape.requests]
    num_pages = max(sum(pages_of) + 1, shape.arena_bytes // shape.small_page_bytes)
    arrange = torch.arange if shape.are_neighbours else torch.randperm
    order = (1 + arrange(num_pages - 1)[: sum(pages_of)]).to(torch.int32)
    cache = make_cache(shape.cache, num_pages, device)
    fill(cache, order.long())
    table = torch.zeros(len(pages_of), max(pages_of), dtype=torch.int32)
    taken = 0
    for request, count in enumerate(pages_of):
        table[request, :count] = order[taken : taken + count]
        taken += count
    starts = [0]
    for queries, _ in shape.requests:
        starts.append(starts[-1] + queries)
    q_shape = (shape.num_tokens, shape.num_heads, shape.head_dim)
    return AttentionBatch(
        shape=shape,
        q=torch.randn(q_shape, device=device).to(torch.bfloat16),
        cache=cache,
        page_table=table.to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(
            [stored for _, stored in shape.requests], dtype=torch.int32, device=device
        ),
        sinks=torch.randn(shape.num_heads, device=device) if shape.has_sinks else None,
    )
