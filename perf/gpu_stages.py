"""What a session of GPU work runs, in the order of what it tells."""

from dataclasses import dataclass
from pathlib import Path

from perf.machine import ROOT

KERNEL_TESTS = "tests/kernels"
ENGINE_TESTS = "tests/vllm_plugin"

BENCHMARKS = (
    "roofline",
    "bench_paged_attention --only D",
    "bench_paged_attention --only P",
    "bench_specialized_prefill",
    "bench_paged_attention --only X",
    "bench_latent_attention",
    "bench_state_update",
    "bench_state_replay",
    "bench_delta_replay",
    "bench_kv_store",
    "bench_conv_update",
    "bench_delta --only qwen3-next",
    "bench_delta --only kimi-linear",
    "bench_state_scan --only jamba",
    "bench_state_scan --only nemotron",
    "bench_state_scan --only granite",
    "bench_state_scan --only falcon",
    "bench_linear_attention",
    "bench_latent_store",
    "bench_pages",
    "bench_host_memory",
)
"""The longest are run by parts of their shapes' names."""

SWEEPS = ("sweep_page_size", "sweep_tokens_per_page", "sweep_attention_tiles")

ENGINE_BENCHMARKS = ("bench_engine --only nemotron", "bench_engine --only gemma")
"""Engines beside stock vLLM's: they start, read a trace twice and end, one after the other."""

HOST_BENCHMARKS = (
    "bench_calls",
    "bench_manager",
    "bench_replay",
    "sweep_eviction_order",
    "sweep_host_memory",
)
"""Benchmarks that time the host alone, and so need no GPU's minutes."""

COMPILED = (
    # FlashInfer compiles a module for each of these.
    ("bench_paged_attention", "D5 "),
    ("bench_paged_attention", "D9 "),
    ("bench_paged_attention", "D10 "),
    ("bench_paged_attention", "D11 "),
    ("bench_paged_attention", "D15 "),
    ("bench_paged_attention", "P1 "),
    ("bench_paged_attention", "P4 "),
    ("bench_paged_attention", "P6 "),
    ("bench_latent_attention", "L3 "),
    # These try dozens of tiles for each model.
    ("bench_state_scan", "nemotron-h-8b 1x2048"),
    ("bench_state_scan", "granite-4.0-h-small 1x2048"),
    ("bench_state_scan", "falcon-h1-7b 1x2048"),
    ("bench_delta", "qwen3-next-80b-a3b f32 1x2048"),
    ("bench_delta", "qwen3-next-80b-a3b tp2 f32 1x2048"),
    ("bench_delta", "kimi-linear-48b-a3b f32 1x2048"),
)
"""What peers compile for minutes: done on all cores before anything is timed."""

ENGINE_FIRST = (
    "test_hybrid_engine",
    "test_model_runner_v2",
    "test_replayed_states",
    "test_engine",
    "test_compiled_engine",
    "test_latent_attention",
    "test_gated_delta_engine",
    "test_replayed_gated_delta_engine",
    "test_attention_features",
    "test_fp8_cache",
    "test_host_memory",
)
"""Tests of engines that read most from real kernels."""

SANITIZERS = ("memcheck", "racecheck")
"""Tools of compute-sanitizer that look at a test or two of each operation."""

TEST_LIMIT_SECONDS = 480
SLOW_LIMIT_SECONDS = 1800
BENCHMARK_LIMIT_SECONDS = 300
ENGINE_BENCHMARK_LIMIT_SECONDS = 480
TEST_HANGS_SECONDS = 300
"""Tests of random batches compile most of them anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command, and whether it is a test.

    Attributes:
        name: Names its row and its log.
        command: What runs, without the interpreter.
        is_test: Whether it runs tests, and not a benchmark.
        is_timed: Whether it times something, so that nothing may run beside it.
        sees_peers: Whether libraries to compare with are on the path: vLLM chooses others then.
        limit_seconds: After which it is taken to hang.
    """

    name: str
    command: tuple[str, ...]
    is_test: bool = True
    is_timed: bool = False
    sees_peers: bool = False
    limit_seconds: float = TEST_LIMIT_SECONDS


def stages(root: Path = ROOT, *, num_workers: int = 0) -> list[Stage]:
    """List all stages in the order they run.

    Args:
        root: Of the repository.
        num_workers: Processes of one pytest; 0 where pytest-xdist is not used.
    """
    workers = ("-n", str(num_workers)) if num_workers else ()
    # Warnings are errors in the tests, and other versions warn of other things. A test that waits
    # for the GPU is stopped by another thread or not at all.
    limits = ("--timeout", str(TEST_HANGS_SECONDS), "--timeout-method", "thread")
    options = ("-q", "-W", "default", "--durations", "5", *limits, *workers)

    def tests(folder: str, marks: str, prefix: str) -> list[Stage]:
        return [
            Stage(
                name=f"{prefix} {path.stem}",
                command=("-m", "pytest", *options, "-m", marks, f"{folder}/{path.name}"),
                sees_peers=folder == KERNEL_TESTS,
                limit_seconds=SLOW_LIMIT_SECONDS if marks == "slow" else TEST_LIMIT_SECONDS,
            )
            for path in sorted((root / folder).glob("test_*.py"))
        ]

    def timed(
        benchmarks: tuple[str, ...],
        *,
        sees_peers: bool = True,
        limit_seconds: float = BENCHMARK_LIMIT_SECONDS,
    ) -> list[Stage]:
        return [
            Stage(
                name=benchmark,
                command=("-m", *f"perf.{benchmark}".split()),
                is_test=False,
                is_timed=True,
                sees_peers=sees_peers,
                limit_seconds=limit_seconds,
            )
            for benchmark in benchmarks
        ]

    compiled = [
        Stage(
            name=f"compile {benchmark} {shape.strip()}",
            command=("-m", f"perf.{benchmark}", "--compile-only", "--only", shape),
            is_test=False,
            sees_peers=True,
        )
        for benchmark, shape in COMPILED
    ]
    engines = tests(ENGINE_TESTS, "not slow", "engine") + tests(ENGINE_TESTS, "slow", "engine slow")
    by_file = {name: [e for e in engines if e.name.split()[-1] == name] for name in ENGINE_FIRST}
    telling = [stage for together in by_file.values() for stage in together]
    return [
        *tests(KERNEL_TESTS, "not slow", "native"),
        *compiled,
        *timed(BENCHMARKS),
        *(
            Stage(name=f"sanitize {tool}", command=("-m", "perf.sanitize", tool))
            for tool in SANITIZERS
        ),
        *telling,
        *timed(ENGINE_BENCHMARKS, sees_peers=False, limit_seconds=ENGINE_BENCHMARK_LIMIT_SECONDS),
        *(stage for stage in engines if stage not in telling),
        *tests(KERNEL_TESTS, "slow", "native slow"),
        *timed(SWEEPS),
    ]
