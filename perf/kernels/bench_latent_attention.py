"""Time latent attention on shapes of real models, with our kernels and peers on the same pages.

python -m perf.kernels.bench_latent_attention [--only D17] [--peers flash-mla,jenga-plain]
[--dry-run]

Shapes of small pages are also timed with pages that follow one another in the arena. There the
warp-specialized kernel can load a tile's pages as one box (`jenga-joined`).
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.plans.latent_plan import plan_latent_attention
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import Launch, UnsupportedError
from perf.peers.latent_peers import PEERS
from perf.shapes.latent_shapes import (
    DRY_SHAPES,
    LATENT_DIM,
    SCALE,
    SHAPES,
    LatentBatch,
    LatentShape,
    make_batch,
)
from perf.shapes.neighbours import with_neighbours

MOST_DRAFTED_TOKENS = 8
"""Largest number of query tokens per request that counts as a decode step."""


def jenga(
    batch: LatentBatch,
    out: torch.Tensor,
    *,
    is_warp_specialized: bool | None = None,
    changes: Mapping[str, bool] | None = None,
) -> Launch:
    """Prepare our operation. Its plan is not timed, because all layers of a step share it.

    Args:
        batch: Queries and pages.
        out: Tensor for the results.
        is_warp_specialized: The same argument of `plan_latent_attention`.
        changes: Fields of the chosen `TeamTiles` to replace.

    Raises:
        UnsupportedError: One of the two is given, but the warp-specialized kernel does not support
            the shape.
    """
    shape = batch.shape
    longest = shape.max_query_tokens
    make_plan = functools.partial(
        plan_latent_attention,
        batch.query_starts,
        batch.seq_lens,
        shape.kind,
        num_tokens=shape.num_tokens,
        dtype=batch.q.dtype,
        max_query_tokens=longest,
        decode_query_tokens=longest if longest <= MOST_DRAFTED_TOKENS else 0,
    )
    plan = make_plan()
    team = plan.tiles.specialized_decode
    if is_warp_specialized is not None or changes is not None:
        if team is None:
            msg = "has no kernel whose warps specialise"
            raise UnsupportedError(msg)
        tiles = plan.tiles
        if changes is not None:
            tiles = replace(tiles, specialized_decode=replace(team, **changes))
        plan = make_plan(
            is_warp_specialized=is_warp_specialized,
            tiles=None if is_warp_specialized is False else tiles,
        )

    def launch() -> None:
        latent_attention(
            batch.q,
            batch.pages,
            batch.page_table,
            batch.query_starts,
            batch.seq_lens,
            scale=SCALE,
            latent_dim=LATENT_DIM,
            latent_scale=batch.latent_scale,
            out=out,
            plan=plan,
        )

    return launch


IMPLEMENTATIONS = {
    "jenga": jenga,
    "jenga-plain": functools.partial(jenga, is_warp_specialized=False),
    "jenga-at-once": functools.partial(jenga, changes={"takes_turns": False}),
    "jenga-joined": functools.partial(jenga, changes={"joins_pages": True}),
    **PEERS,
}
"""Name in a row -> function that prepares the launch.

- `jenga` is our operation with its own choice of kernel.
- `jenga-plain` uses the generic kernel.
- `jenga-at-once` uses the warp-specialized kernel, and issues the scores of both tiles of a step at
  once.
- `jenga-joined` uses the warp-specialized kernel, and loads neighbouring pages as one box.
"""


def measure_shape(benchmark: Benchmark, shape: LatentShape) -> None:
    """Add the rows of one shape: ours and the peers'. Each result is compared with ours."""
    batch = make_batch(shape, benchmark.device)
    ours = batch.q.new_empty(shape.num_tokens, shape.num_heads, LATENT_DIM)
    for name, prepare in IMPLEMENTATIONS.items():
        if name != "jenga" and not benchmark.wants_peer(name):
            continue
        out = ours if name == "jenga" else torch.empty_like(ours)
        try:
            timing = benchmark.measure(prepare(batch, out))
        except UnsupportedError as reason:
            print(f"  {shape.name}: no {name}: {reason}", flush=True)
            continue
        except Exception as error:  # a peer that fails must not end the run
            if name == "jenga":
                raise
            print(f"  {shape.name}: {name} failed: {str(error)[:300]}", flush=True)
            continue
        benchmark.add(
            Row(
                shape=shape.name,
                implementation=name,
                timing=timing,
                num_bytes=shape.num_bytes,
                num_flops=shape.num_flops,
                details={
                    "page_tokens": shape.page_tokens,
                    "page_stride_bytes": batch.pages.stride(0) * batch.pages.element_size(),
                    "max_difference_from_jenga": (out.float() - ours.float()).abs().max().item(),
                },
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_latent_attention",
        __doc__ or "",
        [
            "tests/kernels/latent/test_latent_attention.py",
            "tests/kernels/latent/test_specialized_latents.py",
        ],
        arguments,
    )
    for shape in with_neighbours(DRY_SHAPES if benchmark.is_dry else SHAPES):
        if benchmark.wants_shape(shape.name):
            measure_shape(benchmark, shape)
            if benchmark.device.type == "cuda":
                torch.cuda.empty_cache()
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
