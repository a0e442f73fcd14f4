"""Batches of requests over a paged cache, for the tests and benchmarks of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.checks.pages import is_other_float
from jenga_kernels.checks.tensors import INT4_DTYPE, QUANTISED_DTYPES
from jenga_kernels.plans.attention_plan import AttentionKind, AttentionPlan, plan_attention
from jenga_kernels.reference.attention import paged_attention as reference
from jenga_kernels.triton.lib.tiles import AttentionTiles, LoopTiles
from tests.kernels.support import (
    DEVICE,
    check_close,
    generator,
    randn,
    shuffled_page_table,
    strided_layer,
)

SMALL_TILES = AttentionTiles(
    decode=LoopTiles(block_m=16, block_n=32, num_warps=4, num_stages=2),
    prefill=LoopTiles(block_m=32, block_n=32, num_warps=4, num_stages=2, reads_pairs=True),
    num_programs=7,
    block_splits=4,
)
"""Tiles that cut even short requests into many pieces."""

HALVED_TILES = replace(
    SMALL_TILES,
    decode=replace(SMALL_TILES.decode, value_parts=2),
    prefill=replace(SMALL_TILES.prefill, value_parts=2, reads_pairs=False),
)
"""Such tiles where two programs share the results of the same rows, and prompts read no pairs."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch: (query tokens, tokens stored) of each request, and the layer."""

    requests: Sequence[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    page_tokens: int = 16
    dtype: torch.dtype = torch.float32
    pages_dtype: torch.dtype | None = None
    is_head_major: bool = True
    num_padding_tokens: int = 0
    run_pages: int = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `paged_attention`, as numbers a test can write."""

    window_tokens: int | None = None
    chunk_tokens: int | None = None
    is_causal: bool = True
    soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    has_spans: bool = False
    num_scales: int = 0
    has_slot_scales: bool = False


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arguments of one call."""

    shape: Shape
    options: Options
    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    spans: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_slot_scales: torch.Tensor | None
    v_slot_scales: torch.Tensor | None

    @property
    def arguments(self) -> dict:
        names = ("q", "k_pages", "v_pages", "page_table", "query_starts", "seq_lens", "sinks")
        names += ("alibi_slopes", "spans", "k_scale", "v_scale", "k_slot_scales", "v_slot_scales")
        options = ("window_tokens", "chunk_tokens", "is_causal", "soft_cap")
        return (
            {name: getattr(self, name) for name in names}
            | {name: getattr(self.options, name) for name in options}
            | {"scale": self.shape.head_dim**-0.5}
        )

    @property
    def kind(self) -> AttentionKind:
        shape, options = self.shape, self.options
        return AttentionKind(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            page_tokens=shape.page_tokens,
            window_tokens=options.window_tokens,
            chunk_tokens=options.chunk_tokens,
            is_causal=options.is_causal,
            is_quantised=shape.pages_dtype in QUANTISED_DTYPES,
            is_other_float=is_other_float(shape.pages_dtype or shape.dtype, shape.dtype),
            has_slot_scales=options.has_slot_scales,
            is_int4=shape.pages_dtype == INT4_DTYPE,
        )

    def plan(self, **changes: object) -> AttentionPlan:
        # On Hopper too the kernel of all GPUs is tested, unless a test asks for that one's.
        arguments = {
            "num_tokens": self.q.shape[0],
            "dtype": self.q.dtype,
            "is_warp_specialized": False,
        }
        if self.spans is not None:
            arguments["decode_query_tokens"] = 0
        if "tiles" in changes and self.q.dtype == torch.float32 and self.q.shape[-1] > 256:
            # Two steps of 32 keys this wide do not fit into the shared memory of an A100.
            tiles = changes["tiles"]
            decode, prefill = (
                replace(loop, block_n=16, num_stages=1) for loop in (tiles.decode, tiles.prefill)
            )
            changes = changes | {"tiles": replace(tiles, decode=decode, prefill=prefill)}
        return plan_attention(self.query_starts, self.seq_lens, self.kind, **arguments | changes)


def read_range(query_len: int, seq_len: int, options: Options, spans: Sequence) -> tuple[int, int]:
    """Keys [start, end) that some query of a request reads."""
    first = max(0, seq_len - query_len)
    start = 0
    if options.window_tokens is not None:
        start = max(start, first - options.window_tokens + 1)
    if options.chunk_tokens is not None:
        start = max(start, first // options.chunk_tokens * options.chunk_tokens)
    for span_start, span_end in spans:
        if span_start < span_end:
            start = min(start, span_start)
    return (start, seq_len) if query_len else (0, 0)


def random_spans(query_len: int, seq_len: int, rng: torch.Generator) -> list[tuple[int, int]]:
    """One image of up to 40 tokens somewhere in the request; (0, 0) for its other tokens."""
    length = int(torch.randint(1, 41, (), generator=rng))
    image_start = int(torch.randint(0, max(1, seq_len - length), (), generator=rng))
    image = (image_start, min(seq_len, image_start + length))
    positions = range(seq_len - query_len, seq_len)
    return [image if image[0] <= position < image[1] else (0, 0) for position in positions]


def make_batch(shape: Shape, options: Options, *, seed: int = 0) -> Batch:
    """A batch over shuffled pages of a strided arena; every slot that no query reads is NaN."""
    rng = generator(seed)
    query_lens = [query_len for query_len, _ in shape.requests]
    seq_lens = [seq_len for _, seq_len in shape.requests]
    query_starts = [0]
    for query_len in query_lens:
        query_starts.append(query_starts[-1] + query_len)
    num_tokens = query_starts[-1] + shape.num_padding_tokens
    num_pages_of = [-(-seq_len // shape.page_tokens) for seq_len in seq_lens]
    num_pages = sum(num_pages_of) + 3
    layer = strided_layer(
        num_pages,
        shape.page_tokens,
        shape.num_kv_heads,
        shape.head_dim,
        shape.pages_dtype or shape.dtype,
        is_head_major=shape.is_head_major,
        value_dim=shape.value_dim,
    )
    slot_scales: list[torch.Tensor] = []
    if options.has_slot_scales:
        is_int4 = shape.pages_dtype == INT4_DTYPE
        sides = (2, shape.num_kv_heads, shape.page_tokens, *((2,) if is_int4 else ()))
        scales = torch.full((num_pages, 3, *sides), float("nan"), device=DEVICE)
        scales = scales.bfloat16() if is_int4 else scales
        slot_scales = [scales[:, 1, side].transpose(1, 2) for side in range(2)]
    table = shuffled_page_table(num_pages_of, num_pages, rng, run_pages=shape.run_pages)
    spans = [
        random_spans(query_len, seq_len, rng) if options.has_spans else []
        for query_len, seq_len in shape.requests
    ]
    for request, (query_len, seq_len) in enumerate(shape.requests):
        start, end = read_range(query_len, seq_len, options, spans[request])
        tokens = torch.arange(start, end)
        page_ids = table[request, tokens // shape.page_tokens].long()
        for pages in (layer.k_pages, layer.v_pages):
            values = randn((len(tokens), *pages.shape[2:]), pages.dtype, rng)
            if pages.dtype == torch.int8:
                values = torch.randint(-127, 128, values.shape, generator=rng).to(values)
            elif pages.dtype == INT4_DTYPE:
                values = torch.randint(0, 256, values.shape, generator=rng).to(values)
            # CUDA does not index float8: bytes go in.
            stored = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
            stored[page_ids, tokens % shape.page_tokens] = values.view(stored.dtype)
        for place, scales in enumerate(slot_scales):
            drawn = torch.rand(len(tokens), shape.num_kv_heads, generator=rng)
            # Those of values differ by powers of ten, and are too small for half precision.
            drawn = (0.5 + drawn) / 127 if place == 0 else 10 ** (4 * drawn - 9)
            if shape.pages_dtype == INT4_DTYPE:
                # A range of which a tenth to nine tenths are below zero.
                steps = drawn * 16
                below = 0.1 + 0.8 * torch.rand(drawn.shape, generator=rng)
                drawn = torch.stack([steps, -15 * below * steps], -1).bfloat16()
            scales[page_ids, tokens % shape.page_tokens] = drawn.to(DEVICE)
        # Pages before everything read are stale: another request's, or out of the arena; so are
        # those past a request's end, or the null page.
        table[request, : start // shape.page_tokens] = 1 + request % 2 * (2**30)
        if request % 2:
            table[request, max(1, num_pages_of[request]) :] = 2**30
    scales = [None, None]
    if options.num_scales:
        scales = [torch.rand(options.num_scales, generator=rng).to(DEVICE) + 0.5 for _ in range(2)]
    wide = randn((num_tokens, shape.num_heads + 2, shape.head_dim), shape.dtype, rng)
    span_rows = [span for request in spans for span in request]
    span_rows += [(0, 0)] * shape.num_padding_tokens
    return Batch(
        shape=shape,
        options=options,
        q=wide[:, : shape.num_heads],
        k_pages=layer.k_pages,
        v_pages=layer.v_pages,
        page_table=table,
        query_starts=torch.tensor(query_starts, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        sinks=randn((shape.num_heads,), torch.float32, rng) if options.has_sinks else None,
        alibi_slopes=(
            torch.rand(shape.num_heads, generator=rng).to(DEVICE) if options.has_alibi else None
        ),
        spans=(
            torch.tensor(span_rows, dtype=torch.int32, device=DEVICE).reshape(-1, 2)
            if options.has_spans
            else None
        ),
        k_scale=scales[0],
        v_scale=scales[1],
        k_slot_scales=slot_scales[0] if slot_scales else None,
        v_slot_scales=slot_scales[1] if slot_scales else None,
    )


def expected(batch: Batch, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and log-sum-exps of the reference, computed in another dtype if given."""
    arguments = dict(batch.arguments)
    if dtype is not None:
        arguments["q"] = arguments["q"].to(dtype)
    out = arguments["q"].new_zeros(*batch.q.shape[:2], batch.kind.result_dim)
    lse = torch.zeros(*out.shape[:2], dtype=dtype or torch.float32, device=out.device)
    reference.paged_attention(**arguments, out=out, lse=lse)
    return out, lse


def check_batch(batch: Batch, **plan: object) -> None:
    """Compare the operation with the reference, results and log-sum-exps."""
    out = batch.q.new_full((*batch.q.shape[:2], batch.kind.result_dim), 7.0)
    lse = torch.full(out.shape[:2], 7.0, device=out.device)
    used = int(batch.query_starts[-1])

    paged_attention(**batch.arguments, out=out, lse=lse, plan=batch.plan(**plan))

    exact, exact_lse = expected(batch, torch.float64)
    naive, naive_lse = expected(batch)
    # Through exp2, tanh loses the last places of 1, so a capped score those of the cap; a weight
    # errs by the same share.
    slack = 2 * torch.finfo(torch.float32).eps * (batch.options.soft_cap or 0.0)
    if batch.q.dtype == torch.float32:
        # A score sums its products one after another, plain PyTorch on a CPU in blocks: each of
        # head_dim roundings adds a step of a random walk.
        slack += torch.finfo(torch.float32).eps * batch.q.shape[-1] ** 0.5
    largest = exact[:used].abs().max().item() if used else 0.0
    check_close(out[:used], exact[:used], naive[:used], slack=slack * largest)
    is_empty = torch.isinf(exact_lse[:used])
    assert torch.equal(torch.isinf(lse[:used]), is_empty)
    lses = [values[:used].masked_fill(is_empty, 0.0) for values in (lse, exact_lse, naive_lse)]
    check_close(*lses, slack=slack)
    assert (out[used:] == 7.0).all()
    assert (lse[used:] == 7.0).all()
