"""Batches of requests over a paged cache of latents, for the tests of latent attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.plans.attention_plan import AttentionKind, AttentionPlan
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.reference.latent import latent_attention as reference
from tests.kernels.support import (
    DEVICE,
    check_close,
    generator,
    poison,
    randn,
    shuffled_page_table,
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch: (query tokens, tokens stored) of each request, and the layer."""

    requests: Sequence[tuple[int, int]]
    num_heads: int = 4
    latent_dim: int = 64
    rotary_dim: int = 16
    page_tokens: int = 16
    dtype: torch.dtype = torch.float32
    pages_dtype: torch.dtype | None = None
    is_fp8: bool = False
    has_scale: bool = False
    is_causal: bool = True
    num_padding_tokens: int = 0
    run_pages: int = 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arguments of one call."""

    shape: Shape
    q: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    latent_scale: torch.Tensor | None

    @property
    def arguments(self) -> dict:
        names = ("q", "pages", "page_table", "query_starts", "seq_lens", "latent_scale")
        return {name: getattr(self, name) for name in names} | {
            "scale": self.q.shape[2] ** -0.5,
            "latent_dim": self.shape.latent_dim,
            "is_causal": self.shape.is_causal,
        }

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(
            num_heads=self.q.shape[1],
            num_kv_heads=1,
            head_dim=self.shape.latent_dim,
            page_tokens=self.shape.page_tokens,
            is_causal=self.shape.is_causal,
            is_quantised=self.shape.is_fp8,
            is_other_float=self.shape.pages_dtype not in {None, self.shape.dtype},
        )

    def plan(self, **changes: object) -> AttentionPlan:
        arguments = {"num_tokens": self.q.shape[0], "dtype": self.q.dtype} | changes
        return plan_latent_attention(self.query_starts, self.seq_lens, self.kind, **arguments)


def strided_latents(
    num_pages: int, page_tokens: int, width: int, dtype: torch.dtype, *, num_layers: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of an arena whose pages hold all layers, every element NaN; and the arena."""
    arena = torch.full((num_pages, num_layers, page_tokens, width), poison(dtype))
    arena = arena.to(dtype).to(DEVICE)
    return arena[:, 1], arena


def make_batch(shape: Shape, *, seed: int = 0) -> Batch:
    """A batch over shuffled pages of a strided arena; every slot that no query reads is NaN."""
    rng = generator(seed)
    query_lens = torch.tensor([0, *(query_len for query_len, _ in shape.requests)])
    query_starts = query_lens.cumsum(0).to(torch.int32)
    seq_lens = [seq_len for _, seq_len in shape.requests]
    num_pages_of = [-(-seq_len // shape.page_tokens) for seq_len in seq_lens]
    num_pages = sum(num_pages_of) + 3
    width = shape.latent_dim + shape.rotary_dim
    dtype = torch.float8_e4m3fn if shape.is_fp8 else shape.pages_dtype or shape.dtype
    pages, _ = strided_latents(num_pages, shape.page_tokens, width, dtype)
    table = shuffled_page_table(num_pages_of, num_pages, rng, run_pages=shape.run_pages)
    # CUDA does not index float8: bytes go in.
    stored = pages.view(torch.uint8) if shape.is_fp8 else pages
    for request, (query_len, seq_len) in enumerate(shape.requests):
        if query_len:
            tokens = torch.arange(seq_len)
            page_ids = table[request, tokens // shape.page_tokens].long()
            rows = randn((seq_len, width), dtype, rng).view(stored.dtype)
            stored[page_ids, tokens % shape.page_tokens] = rows
        # Entries past a request's pages are out of the arena.
        table[request, num_pages_of[request] :] = 2**30
    num_tokens = int(query_starts[-1]) + shape.num_padding_tokens
    return Batch(
        shape=shape,
        q=randn((num_tokens, shape.num_heads + 2, width), shape.dtype, rng)[:, : shape.num_heads],
        pages=pages,
        page_table=table,
        query_starts=query_starts.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        latent_scale=torch.rand(1, generator=rng).to(DEVICE) + 0.5 if shape.has_scale else None,
    )


def expected(batch: Batch, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and log-sum-exps of the reference, computed in another dtype if given."""
    arguments = batch.arguments
    q = arguments["q"] = batch.q if dtype is None else batch.q.to(dtype)
    out = q.new_zeros(*q.shape[:2], batch.shape.latent_dim)
    lse = torch.zeros(*q.shape[:2], dtype=dtype or torch.float32, device=q.device)
    reference.latent_attention(**arguments, out=out, lse=lse)
    return out, lse


def check_batch(batch: Batch, **plan: object) -> None:
    """Compare the operation with the reference, results and log-sum-exps."""
    out = batch.q.new_full((*batch.q.shape[:2], batch.shape.latent_dim), 7.0)
    lse = torch.full(out.shape[:2], 7.0, device=out.device)
    used = int(batch.query_starts[-1])

    latent_attention(**batch.arguments, out=out, lse=lse, plan=batch.plan(**plan))

    exact, exact_lse = expected(batch, torch.float64)
    naive, naive_lse = expected(batch)
    slack = 0.0
    if batch.q.dtype == torch.float32:
        # As in `attention_cases`: each of a score's roundings adds a step of a random walk.
        slack = torch.finfo(torch.float32).eps * batch.q.shape[-1] ** 0.5
    largest = exact[:used].abs().max().item() if used else 0.0
    check_close(out[:used], exact[:used], naive[:used], slack=slack * largest)
    is_empty = torch.isinf(exact_lse[:used])
    assert torch.equal(torch.isinf(lse[:used]), is_empty)
    lses = [values[:used].masked_fill(is_empty, 0.0) for values in (lse, exact_lse, naive_lse)]
    check_close(*lses, slack=slack)
    assert (out[used:] == 7.0).all()
    assert (lse[used:] == 7.0).all()
