"""Time prompts over quantised pages: read as they are, and through a scratch of 16 bits.

python -m perf.kernels.bench_scratch_attention [--only fp8] [--dry-run]

Each shape has three rows. For the first, "jenga", prompts read the quantised pages. For the second,
"jenga-scratch", they are restored first, which counts. The third, "jenga-16-bit", reads as many
tokens from bfloat16 pages, and is the speed to compare with. Shapes with few query tokens show from
where on a scratch pays: `MIN_ROWS_PER_TOKEN` of `jenga_kernels.plans.scratch_plan`.
"""

from dataclasses import replace

import torch

from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.attention.scratch_attention import scratch_attention
from jenga_kernels.plans.scratch_plan import page_bytes, plan_scratch
from perf.harness.timing import Benchmark, read_roofline
from perf.kernels.bench_paged_attention import jenga, measure_shape, plan_of
from perf.peers.attention_peers import Launch, UnsupportedError
from perf.shapes.attention_shapes import (
    DRY_SHAPES,
    GEMMA_3_27B,
    LLAMA_8B,
    AttentionBatch,
    AttentionShape,
    K,
    make_batch,
)
from perf.shapes.cache_layouts import Stored

TESTS = (
    "tests/kernels/attention/test_dequantise_pages.py",
    "tests/kernels/attention/test_scratch_attention.py",
)

PROMPTS = {
    "prefill 8k": ((8 * K, 8 * K),),
    "chunk 2k on 30k": ((2 * K, 30 * K),),
    "chunk 256 on 30k": ((256, 30 * K),),
    "chunk 128 on 30k": ((128, 30 * K),),
    "chunk 64 on 30k": ((64, 30 * K),),
    "2k beside 31 decoded": ((2 * K, 2 * K), *((1, 4 * K),) * 31),
}
"""Name -> (query tokens, stored tokens) of each request. In Llama 3.1 8B four heads are a group, so
that 64, 128 and 256 query tokens are 256, 512 and 1,024 rows."""

SHAPES = (
    *(
        AttentionShape(
            name=f"llama-8b {stored.value} {name}", requests=requests, stored=stored, **LLAMA_8B
        )
        for stored in (Stored.FP8, Stored.E5M2, Stored.FP8_SLOTS, Stored.INT8_SLOTS)
        for name, requests in PROMPTS.items()
    ),
    *(
        AttentionShape(
            name=f"llama-8b {Stored.INT4_SLOTS.value} {name}",
            requests=PROMPTS[name],
            stored=Stored.INT4_SLOTS,
            **LLAMA_8B,
        )
        for name in ("prefill 8k", "chunk 2k on 30k")
    ),
    AttentionShape(
        name="gemma-3-27b window fp8 prefill 8k",
        requests=((8 * K, 8 * K),),
        stored=Stored.FP8,
        **GEMMA_3_27B,
    ),
)


def of_16_bits(batch: AttentionBatch, out: torch.Tensor) -> Launch:
    """Prepare the same prompts over bfloat16 pages, with other keys and values."""
    shape = replace(batch.shape, stored=Stored.BF16)
    return jenga(make_batch(shape, batch.q.device), out)


def through_scratch(batch: AttentionBatch, out: torch.Tensor) -> Launch:
    """Prepare the operation with a scratch as large as the prompts need.

    Raises:
        UnsupportedError: The batch has no prompts.
    """
    shape, cache = batch.shape, batch.cache
    plan = plan_scratch(
        plan_of(batch),
        batch.query_starts,
        batch.seq_lens,
        requests=shape.requests,
        scratch_bytes=1 << 40,
        min_rows_per_token=0,
    )
    if plan is None:
        msg = "it has no prompts"
        raise UnsupportedError(msg)
    num_bytes = plan.page_runs.shape[0] * page_bytes(shape.kind, batch.q.dtype)
    scratch = torch.empty(num_bytes, dtype=torch.uint8, device=batch.q.device)

    def attend(q: torch.Tensor, results: torch.Tensor, scale: float) -> None:
        scratch_attention(
            q,
            cache.k_pages,
            cache.v_pages,
            batch.page_table,
            batch.query_starts,
            batch.seq_lens,
            scale=scale,
            window_tokens=shape.window_tokens,
            is_causal=shape.is_causal,
            k_scale=cache.scale,
            v_scale=cache.scale,
            k_slot_scales=cache.k_slot_scales,
            v_slot_scales=cache.v_slot_scales,
            out=results,
            plan=plan,
            scratch=scratch,
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


IMPLEMENTATIONS = {"jenga": jenga, "jenga-scratch": through_scratch, "jenga-16-bit": of_16_bits}


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark("bench_scratch_attention", __doc__ or "", TESTS, arguments)
    dry_shapes = [
        replace(shape, requests=((33, 40),)) for shape in DRY_SHAPES if shape.stored.is_quantised
    ]
    for shape in dry_shapes if benchmark.is_dry else SHAPES:
        if benchmark.wants_shape(shape.name):
            measure_shape(benchmark, shape, IMPLEMENTATIONS)
            if benchmark.device.type == "cuda":
                torch.cuda.empty_cache()
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
