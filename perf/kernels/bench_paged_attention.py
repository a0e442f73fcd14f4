"""Time paged attention on shapes of real models, with our kernels and peers on the same pages.

python -m perf.kernels.bench_paged_attention [--only D5] [--peers vllm-triton,flashinfer]
[--dry-run]
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.plans.attention_plan import AttentionPlan, plan_attention
from jenga_kernels.triton.lib.tiles import AttentionTiles
from perf.harness.geometric_means import geometric_means
from perf.harness.timing import Benchmark, Row, commit_of, read_roofline
from perf.peers.attention_peers import PEERS, Launch, UnsupportedError
from perf.shapes.attention_shapes import (
    DRY_SHAPES,
    SHAPES,
    AttentionBatch,
    AttentionShape,
    make_batch,
)

TESTS = (
    "tests/kernels/attention/test_paged_attention.py",
    "tests/kernels/attention/test_slot_scales.py",
    "tests/kernels/attention/test_rotation.py",
)

Prepare = Callable[[AttentionBatch, torch.Tensor], Launch]
"""Function that prepares an implementation's launch, whose results go to the given tensor."""


def plan_of(
    batch: AttentionBatch,
    *,
    is_warp_specialized: bool | None = None,
    tiles: AttentionTiles | None = None,
) -> AttentionPlan:
    """Return the plan of a batch, with the given tiles or the chosen ones."""
    shape = batch.shape
    return plan_attention(
        batch.query_starts,
        batch.seq_lens,
        shape.kind,
        num_tokens=shape.num_tokens,
        dtype=batch.q.dtype,
        max_query_tokens=max(queries for queries, _ in shape.requests),
        min_query_tokens=min(queries for queries, _ in shape.requests),
        is_warp_specialized=is_warp_specialized,
        tiles=tiles,
    )


def jenga(
    batch: AttentionBatch,
    out: torch.Tensor,
    *,
    is_warp_specialized: bool | None = None,
    change: Callable[[AttentionTiles], AttentionTiles] | None = None,
) -> Launch:
    """Prepare our operation. Its plan is not timed, because all layers of a step share it.

    Rotations of queries and results are timed if there are any, because vLLM's call includes them.

    Args:
        batch: Queries and pages.
        out: Tensor for the results.
        is_warp_specialized: The same argument of `plan_attention`.
        change: Function that turns the chosen tiles into those to use. None keeps the chosen ones.

    Raises:
        UnsupportedError: The warp-specialized kernel is asked for and does not support the shape.
    """
    shape = batch.shape
    plan = plan_of(batch, is_warp_specialized=is_warp_specialized)
    if change is not None:
        plan = plan_of(batch, tiles=change(plan.tiles))
    if is_warp_specialized and plan.tiles.specialized_prefill is None:
        msg = "its prefill kernel is for Hopper, 16-bit pages and heads of up to 256 elements"
        raise UnsupportedError(msg)

    def attend(q: torch.Tensor, results: torch.Tensor, scale: float) -> None:
        paged_attention(
            q,
            batch.cache.k_pages,
            batch.cache.v_pages,
            batch.page_table,
            batch.query_starts,
            batch.seq_lens,
            scale=scale,
            window_tokens=shape.window_tokens,
            is_causal=shape.is_causal,
            soft_cap=shape.soft_cap,
            sinks=batch.sinks,
            k_scale=batch.cache.scale,
            v_scale=batch.cache.scale,
            k_slot_scales=batch.cache.k_slot_scales,
            v_slot_scales=batch.cache.v_slot_scales,
            out=results,
            plan=plan,
        )

    scale = shape.head_dim**-0.5
    if not shape.stored.is_rotated:
        return lambda: attend(batch.q, out, scale)
    rotation = hadamard_rotation(shape.head_dim, batch.q.dtype, batch.q.device)

    def launch() -> None:
        results = torch.empty_like(out)
        attend(batch.q @ rotation.forward, results, scale / rotation.gain)
        torch.matmul(results, rotation.back, out=out)

    return launch


IMPLEMENTATIONS: dict[str, Prepare] = {"jenga": jenga, **PEERS}


def measure_shape(
    benchmark: Benchmark, shape: AttentionShape, implementations: Mapping[str, Prepare]
) -> None:
    """Add the rows of one shape. Each result is compared with that of "jenga", which runs first.

    A shape whose arena does not fit the GPU is reported and skipped.
    """
    if benchmark.compiles_only:  # the arena takes most of the memory, and other processes run too
        shape = dataclasses.replace(shape, num_layers=1, arena_bytes=0)
    try:
        batch = make_batch(shape, benchmark.device)
    except torch.OutOfMemoryError:
        print(f"  {shape.name}: the arena does not fit this GPU", flush=True)
        return
    ours = torch.empty_like(batch.q)
    for name, prepare in implementations.items():
        if not name.startswith("jenga") and not benchmark.wants_peer(name):
            continue
        out = ours if name == "jenga" else torch.empty_like(batch.q)
        details: dict[str, object] = {
            "page_tokens": shape.page_tokens,
            "page_stride_bytes": batch.cache.page_stride_bytes,
        }
        try:
            launch = prepare(batch, out)
            timing = benchmark.measure(launch)
        except UnsupportedError as reason:
            print(f"  {shape.name}: no {name}: {reason}", flush=True)
            continue
        except Exception as error:  # a peer that fails must not end the run
            if name == "jenga":
                raise
            print(f"  {shape.name}: {name} failed: {str(error)[:300]}", flush=True)
            continue
        details["max_difference_from_jenga"] = (out.float() - ours.float()).abs().max().item()
        benchmark.add(
            Row(
                shape=shape.name,
                implementation=name,
                timing=timing,
                num_bytes=shape.num_bytes,
                num_flops=shape.num_flops,
                details=details,
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_paged_attention",
        __doc__ or "",
        TESTS,
        arguments,
    )
    for shape in DRY_SHAPES if benchmark.is_dry else SHAPES:
        if benchmark.wants_shape(shape.name):
            measure_shape(benchmark, shape, IMPLEMENTATIONS)
            if benchmark.device.type == "cuda":
                torch.cuda.empty_cache()
    path = benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))
    if path.exists():
        print(geometric_means(path, commit_of()))


if __name__ == "__main__":
    main()
