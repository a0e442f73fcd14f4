"""Shapes of latent attention from real models, and batches of them in page-layer layout.

Numbers of heads are 16 in DeepSeek-V2-Lite, 128 in DeepSeek-V2 and V3, 64 in Kimi-K2, and 32 in
Kimi-Linear (their config.json). In all of them latents have 512 elements, and rotary keys 64.
"""

from dataclasses import dataclass

import torch

from jenga_kernels.plans.attention_plan import AttentionKind

LATENT_DIM = 512
ROTARY_DIM = 64
WIDTH = LATENT_DIM + ROTARY_DIM
SCALE = (128 + ROTARY_DIM) ** -0.5
"""Scale of scores. It is that of the heads before absorption: 128 elements and the rotary key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """One layer of a model and one batch.

    Attributes:
        name: Name of the rows: model, batch.
        requests: (query tokens, stored tokens) of each request.
        num_heads: Number of query heads.
        page_tokens: Number of slots of a small page.
        num_layers: Number of layers that share a small page, which sets the stride between pages.
        is_fp8: Whether pages are float8_e4m3fn.
        are_neighbours: Whether a request's pages follow one another in the arena. Otherwise they
            are scattered over it.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    num_heads: int
    page_tokens: int = 64
    num_layers: int = 4
    is_fp8: bool = False
    are_neighbours: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of query tokens in the batch."""
        return sum(queries for queries, _ in self.requests)

    @property
    def max_query_tokens(self) -> int:
        """Number of query tokens of the longest request."""
        return max(queries for queries, _ in self.requests)

    @property
    def kind(self) -> AttentionKind:
        """Kind of attention that a plan is made for."""
        return AttentionKind(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=LATENT_DIM,
            page_tokens=self.page_tokens,
            is_quantised=self.is_fp8,
        )

    @property
    def num_bytes(self) -> int:
        """Least number of bytes: latents and queries read once, results written."""
        stored = sum(stored for _, stored in self.requests) * WIDTH * (1 if self.is_fp8 else 2)
        return stored + self.num_tokens * self.num_heads * (WIDTH + LATENT_DIM) * 2

    @property
    def num_flops(self) -> int:
        """Two products for each visible pair of query and key, with a multiply and an add each."""
        pairs = sum(
            queries * stored - queries * (queries - 1) // 2 for queries, stored in self.requests
        )
        return 2 * pairs * self.num_heads * (WIDTH + LATENT_DIM)


K = 1024

SHAPES = (
    LatentShape(name="D17 deepseek-v3 decode 128x4k", requests=((1, 4 * K),) * 128, num_heads=128),
    LatentShape(name="L1 deepseek-v3 decode 1x128k", requests=((1, 128 * K),), num_heads=128),
    LatentShape(
        name="L2 deepseek-v3 tp8 decode 128x4k", requests=((1, 4 * K),) * 128, num_heads=16
    ),
    LatentShape(name="L3 deepseek-v3 tp8 decode 1x32k", requests=((1, 32 * K),), num_heads=16),
    LatentShape(name="L4 kimi-k2 decode 64x8k", requests=((1, 8 * K),) * 64, num_heads=64),
    LatentShape(name="L5 kimi-linear decode 32x64k", requests=((1, 64 * K),) * 32, num_heads=32),
    LatentShape(
        name="L6 deepseek-v3 2 drafted tokens 64x4k", requests=((2, 4 * K),) * 64, num_heads=128
    ),
    LatentShape(
        name="L7 deepseek-v3 tp8 4 drafted tokens 64x4k", requests=((4, 4 * K),) * 64, num_heads=16
    ),
    LatentShape(
        name="L8 deepseek-v3 decode 128x4k, pages of 16",
        requests=((1, 4 * K),) * 128,
        num_heads=128,
        page_tokens=16,
    ),
    LatentShape(
        name="L9 deepseek-v3 fp8 decode 128x4k",
        requests=((1, 4 * K),) * 128,
        num_heads=128,
        is_fp8=True,
    ),
    LatentShape(
        name="L10 deepseek-v3 tp8 fp8 decode 128x4k",
        requests=((1, 4 * K),) * 128,
        num_heads=16,
        is_fp8=True,
    ),
    LatentShape(
        name="L11 deepseek-v3 uneven decode",
        requests=tuple((1, 512 * (1 + index * index)) for index in range(16)),
        num_heads=128,
    ),
    LatentShape(
        name="L12 deepseek-v3 tp8 chunk 512 on 30k", requests=((512, 30 * K),), num_heads=16
    ),
)

DRY_SHAPES = (
    LatentShape(name="dry decode", requests=((1, 40), (1, 70)), num_heads=16, page_tokens=16),
    LatentShape(name="dry drafted", requests=((2, 40), (2, 70)), num_heads=16, page_tokens=16),
    LatentShape(name="dry chunk", requests=((9, 40),), num_heads=16, page_tokens=16, is_fp8=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentBatch:
    """Tensors of a shape."""

    shape: LatentShape
    q: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    latent_scale: torch.Tensor | None


def make_batch(shape: LatentShape, device: torch.device, *, seed: int = 0) -> LatentBatch:
    """Make random bfloat16 tensors of a shape, in one layer of an arena of `num_layers`.

    Pages may be float8 instead.
    """
    torch.manual_seed(seed)
    pages_of = [-(-stored // shape.page_tokens) for _, stored in shape.requests]
    num_pages = sum(pages_of) + 1
    dtype = torch.float8_e4m3fn if shape.is_fp8 else torch.bfloat16
    rows = (shape.page_tokens, WIDTH)
    arena = torch.empty(num_pages, shape.num_layers, *rows, dtype=dtype, device=device)
    pages = arena[:, 1 % shape.num_layers]
    # float8 tensors cannot be indexed for writing, so their bytes are written.
    writable = torch.uint8 if shape.is_fp8 else dtype
    for some in torch.arange(num_pages).split(4096):  # piece by piece: the arena is large
        part = torch.randn(len(some), *rows, device=device).to(dtype)
        pages.view(writable)[some.to(device)] = part.view(writable)
    arrange = torch.arange if shape.are_neighbours else torch.randperm
    order = (1 + arrange(num_pages - 1)).to(torch.int32)
    table = torch.zeros(len(pages_of), max(pages_of), dtype=torch.int32)
    taken = 0
    for request, count in enumerate(pages_of):
        table[request, :count] = order[taken : taken + count]
        taken += count
    queries = torch.tensor([0, *(queries for queries, _ in shape.requests)])
    stored = torch.tensor([stored for _, stored in shape.requests])
    q = torch.randn(shape.num_tokens, shape.num_heads, WIDTH, device=device)
    return LatentBatch(
        shape=shape,
        q=q.to(torch.bfloat16),
        pages=pages,
        page_table=table.to(device),
        query_starts=queries.cumsum(0).to(torch.int32).to(device),
        seq_lens=stored.to(torch.int32).to(device),
        latent_scale=torch.ones(1, device=device) if shape.is_fp8 else None,
    )
