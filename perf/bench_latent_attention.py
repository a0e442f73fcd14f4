"""Time latent attention on the shapes of real models, beside its peers on the same pages.

python -m perf.bench_latent_attention [--only D17] [--peers flash-mla,vllm-triton] [--dry-run]
"""

import torch

from jenga_kernels.latent_attention import latent_attention
from jenga_kernels.latent_plan import plan_latent_attention
from perf.attention_peers import Launch, UnsupportedError
from perf.harness import Benchmark, Row, read_roofline
from perf.latent_peers import PEERS
from perf.latent_shapes import (
    DRY_SHAPES,
    LATENT_DIM,
    SCALE,
    SHAPES,
    LatentBatch,
    LatentShape,
    make_batch,
)

MOST_DRAFTED_TOKENS = 8
"""Batches of longer requests are not decoded."""


def jenga(batch: LatentBatch, out: torch.Tensor) -> Launch:
    """Ours; the plan is made once a step and shared by layers, so it is not timed."""
    shape = batch.shape
    longest = shape.max_query_tokens
    plan = plan_latent_attention(
        batch.query_starts,
        batch.seq_lens,
        shape.kind,
        num_tokens=shape.num_tokens,
        dtype=batch.q.dtype,
        max_query_tokens=longest,
        decode_query_tokens=longest if longest <= MOST_DRAFTED_TOKENS else 0,
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


def measure_shape(benchmark: Benchmark, shape: LatentShape) -> None:
    """Add the rows of one shape: ours and its peers', each compared with ours."""
    batch = make_batch(shape, benchmark.device)
    ours = batch.q.new_empty(shape.num_tokens, shape.num_heads, LATENT_DIM)
    for name, prepare in {"jenga": jenga, **PEERS}.items():
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
        ["tests/kernels/test_latent_attention.py"],
        arguments,
    )
    for shape in DRY_SHAPES if benchmark.is_dry else SHAPES:
        if benchmark.wants_shape(shape.name):
            measure_shape(benchmark, shape)
            if benchmark.device.type == "cuda":
                torch.cuda.empty_cache()
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
