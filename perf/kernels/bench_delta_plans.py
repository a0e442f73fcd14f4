"""Time the ways to compute prompts of gated delta nets: two kernels, one, and segments.

python -m perf.kernels.bench_delta_plans [--only "4x2048"] [--peers none] [--dry-run]

"jenga" is what runs today: a kernel that prepares chunks, and one that scans them.

- "jenga-fused" is one kernel for both.
- "jenga-cut-512" cuts prompts into segments of 512 tokens.
- "jenga-estimated" is the way that `estimated_delta_plan` chooses.
- Peers are vLLM's kernels and FlashInfer's, as in `bench_delta`.
"""

from collections.abc import Callable
from functools import partial

import torch

from jenga_kernels.plans.delta_plan import DeltaPlan, estimated_delta_plan
from jenga_kernels.triton.lib.tiles import machine_of
from perf.harness.timing import Benchmark, read_roofline
from perf.kernels.bench_delta import Peers, flashinfer_scan, jenga_scan, measure, vllm_scan
from perf.shapes.delta_shapes import (
    DRY_DELTA_MODELS,
    EIGHT_HEADS,
    KIMI_LINEAR,
    QWEN3_NEXT,
    QWEN3_NEXT_EIGHTH,
    DeltaBatch,
    make_delta_batch,
)

TESTS = ("tests/kernels/delta/test_delta_scan.py", "tests/kernels/delta/test_delta_plan.py")

PROMPTS = {
    QWEN3_NEXT: {"4x2048": [2048] * 4, "16 odd": [517, 33, 1200, 740, 5, 999, 250, 611] * 2}
    | {"1x2048": [2048]},
    EIGHT_HEADS: {"1x8192": [8192], "1x2048": [2048]},
    QWEN3_NEXT_EIGHTH: {"1x8192": [8192], "1x32768": [32768]},
    KIMI_LINEAR: {"1x8192": [8192]},
}
"""Model -> name and lengths of its prompts. Many heads first, then few, for which segments are."""

DRY_PROMPTS = {model: {"5+200": [5, 200]} for model in DRY_DELTA_MODELS}


def estimated(batch: DeltaBatch) -> Callable[[], None]:
    """Prepare the way that is estimated to be the fastest."""
    plan = estimated_delta_plan(
        machine_of(batch.mixed.device),
        num_v_heads=batch.model.num_v_heads,
        head_k_dim=batch.model.head_dim,
        head_v_dim=batch.model.head_dim,
        num_requests=len(batch.slots),
        num_tokens=len(batch.mixed),
        is_per_channel=batch.model.is_per_channel,
    )
    return jenga_scan(batch, plan=plan)


IMPLEMENTATIONS: Peers = {
    "jenga": jenga_scan,
    "jenga-fused": partial(jenga_scan, plan=DeltaPlan(is_fused=True)),
    "jenga-cut-256": partial(jenga_scan, plan=DeltaPlan(segment_tokens=256)),
    "jenga-cut-512": partial(jenga_scan, plan=DeltaPlan(segment_tokens=512)),
    "jenga-cut-1024": partial(jenga_scan, plan=DeltaPlan(segment_tokens=1024)),
    "jenga-estimated": estimated,
    "vllm": vllm_scan,
    "flashinfer": flashinfer_scan,
}


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark("bench_delta_plans", __doc__ or "", TESTS, arguments)
    for model, prompts in (DRY_PROMPTS if benchmark.is_dry else PROMPTS).items():
        for text, lengths in prompts.items():
            name = f"{model.name} f32 {text}"
            if benchmark.wants_shape(name):
                batch = make_delta_batch(model, lengths, torch.float32, benchmark.device)
                measure(benchmark, name, batch, IMPLEMENTATIONS)
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
