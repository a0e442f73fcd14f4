"""Stages of a session of GPU work, the most informative ones first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.harness.machine import ROOT, module_of, path_of_test

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
    "bench_delta --only plans",
    "bench_state_scan --only jamba",
    "bench_state_scan --only nemotron",
    "bench_state_scan --only granite",
    "bench_state_scan --only falcon",
    "bench_linear_attention",
    "bench_latent_store",
    "bench_pages",
    "bench_token_budgets",
    "bench_scratch_attention",
    "bench_host_memory",
)
"""Benchmarks. The longest ones run in several parts, selected by their shapes' names."""

SWEEPS = ("sweep_page_size", "sweep_tokens_per_page", "sweep_attention_tiles")

HOST_BENCHMARKS = (
    "bench_calls",
    "bench_manager",
    "bench_replay",
    "sweep_eviction",
    "sweep_host_memory",
)
"""Benchmarks that time only the host, and so need no time on a GPU."""

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
"""Benchmarks and shapes whose peers compile for minutes.

They are compiled on all cores before anything is timed.
"""

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
"""Engine tests that exercise real kernels most."""

SANITIZERS = ("memcheck", "racecheck")
"""Tools of compute-sanitizer that check a few tests of each operation."""

TEST_LIMIT_SECONDS = 480
SLOW_LIMIT_SECONDS = 1800
BENCHMARK_LIMIT_SECONDS = 300
TEST_HANGS_SECONDS = 300
"""Seconds after which a test counts as hung.

Tests with random batches compile most of their kernels.
"""

BRIEF_TEST_HANGS_SECONDS = 60
MAX_PROCESSES_LOST = 40
"""Number of pytest-xdist processes that may be lost.

A failing kernel may make the GPU unusable for its process.
"""

NEEDS_NO_GPU = "not compile and not few_instructions and not more_pages_than"
"""Expression that deselects tests which only compile kernels, and those that need other memory."""

BRIEF_TESTS, BRIEF_LIST = "all native tests", "list"
"""Names of the stages of a brief session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command, and the way to run it.

    Attributes:
        name: Name of its row and of its log.
        command: Arguments of the Python interpreter.
        is_test: Whether it runs tests. Otherwise it runs a benchmark.
        is_timed: Whether it times something, so that nothing else may run at the same time.
        is_list: Whether it runs a list of benchmarks, which gets a time limit as an argument.
        sees_peers: Whether libraries of peers are on the path. With them, vLLM chooses other
            implementations.
        limit_seconds: Seconds after which it counts as hung.
    """

    name: str
    command: tuple[str, ...]
    is_test: bool = True
    is_timed: bool = False
    is_list: bool = False
    sees_peers: bool = False
    limit_seconds: float = TEST_LIMIT_SECONDS


def stages(root: Path = ROOT, *, num_workers: int = 0) -> list[Stage]:
    """List all stages in the order they run.

    Args:
        root: Folder of the repository.
        num_workers: Number of processes of each pytest. 0 means that pytest-xdist is not used.
    """
    workers = ("-n", str(num_workers)) if num_workers else ()
    # Tests turn warnings into errors, and other versions of packages give other warnings. Only
    # another thread can stop a test that waits for the GPU.
    limits = ("--timeout", str(TEST_HANGS_SECONDS), "--timeout-method", "thread")
    options = ("-q", "-W", "default", "--durations", "5", *limits, *workers)

    def tests(folder: str, marks: str, prefix: str) -> list[Stage]:
        return [
            Stage(
                name=f"{prefix} {path.stem}",
                command=("-m", "pytest", *options, "-m", marks, path.relative_to(root).as_posix()),
                sees_peers=folder == KERNEL_TESTS,
                limit_seconds=SLOW_LIMIT_SECONDS if marks == "slow" else TEST_LIMIT_SECONDS,
            )
            for path in sorted((root / folder).rglob("test_*.py"), key=lambda path: path.name)
        ]

    def timed(benchmarks: tuple[str, ...]) -> list[Stage]:
        return [
            Stage(
                name=benchmark,
                command=("-m", module_of(benchmark.split()[0]), *benchmark.split()[1:]),
                is_test=False,
                is_timed=True,
                sees_peers=True,
                limit_seconds=BENCHMARK_LIMIT_SECONDS,
            )
            for benchmark in benchmarks
        ]

    compiled = [
        Stage(
            name=f"compile {benchmark} {shape.strip()}",
            command=("-m", module_of(benchmark), "--compile-only", "--only", shape),
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
            Stage(name=f"sanitize {tool}", command=("-m", "perf.gpu.sanitize", tool))
            for tool in SANITIZERS
        ),
        *telling,
        *(stage for stage in engines if stage not in telling),
        *tests(KERNEL_TESTS, "slow", "native slow"),
        *timed(SWEEPS),
    ]


def brief_stages(
    *,
    tests: Sequence[str] = (),
    list_path: Path | None = None,
    test_seconds: float,
    num_workers: int,
) -> list[Stage]:
    """List the two stages of a session of a few minutes: all tests in one pytest, then a list.

    Args:
        tests: Names of files of kernel tests, without `test_` and `.py`. Empty means all.
        list_path: File that `perf.gpu.gpu_list` reads. None means its own list.
        test_seconds: Time limit of the tests, in seconds.
        num_workers: Number of pytest processes. Below 2, pytest-xdist is not used.
    """
    options = ["-v", "-W", "default", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow"]
    options += ["--timeout", str(BRIEF_TEST_HANGS_SECONDS), "--timeout-method", "thread"]
    options += ["-k", NEEDS_NO_GPU]
    if num_workers > 1:
        options += ["-n", str(num_workers), "--max-worker-restart", str(MAX_PROCESSES_LOST)]
    files = [path_of_test(KERNEL_TESTS, f"test_{name}") for name in tests] or [KERNEL_TESTS]
    listed = () if list_path is None else (str(list_path.resolve()),)
    return [
        Stage(
            name=BRIEF_TESTS,
            command=("-m", "pytest", *options, *files),
            sees_peers=True,
            limit_seconds=test_seconds,
        ),
        Stage(
            name=BRIEF_LIST,
            command=("-m", "perf.gpu.gpu_list", *listed),
            is_test=False,
            is_timed=True,
            is_list=True,
            sees_peers=True,
            limit_seconds=float("inf"),
        ),
    ]
