"""Serve traces with vLLM, on JENGA_TRITON and on a stock backend beside it.

    python -m perf.bench_engine [--only nemotron] [--peers FLASH_ATTN,TRITON_ATTN]
    python -m perf.bench_engine --model FOLDER --trace mooncake.jsonl --cache 20GiB [--limit 200]

An engine gets the same bytes for all that it remembers of requests, the same requests in the same
order, prefix caching on, and a process of its own. A row says how long a trace took, how much of
its prompts was found, how many requests ran at a time; each run begins with an empty cache.

Without --model these are models as wide as real ones with random weights. With it, a model of your
own, with its weights (--random-weights: without), and any trace that `jenga replay` takes.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jenga.sim.gpus import parse_bytes
from jenga.sim.sources import open_source
from perf.engine_cases import CASES, DRY_CASES, EngineCase, save_config
from perf.harness import ROOT, Benchmark

OURS = "JENGA_TRITON"
STOCK_ON_A_GPU, STOCK_ON_A_CPU = "FLASH_ATTN", "CPU_ATTN"

TESTS = ("tests/vllm_plugin/test_engine.py", "tests/vllm_plugin/test_hybrid_engine.py")

ENGINE_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "enable_prefix_caching": True,
    "seed": 0,
    # Graphs of decoding steps for all: no backend waits for more to be compiled than others.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256],
    },
}

COLUMNS = (
    # Of a row, how it is written, and what it is called.
    ("seconds", "8.2f", "seconds"),
    ("output_tokens_per_s", "8.0f", "out/s"),
    ("found_share", "7.1%", "found"),
    ("mean_running", "8.1f", "running"),
    ("most_running", "5.0f", "most"),
    ("preemptions", "8.0f", "preempt"),
    ("first_token_p50_s", "9.3f", "ttft s"),
    ("token_p50_ms", "8.2f", "token ms"),
)


class EngineError(RuntimeError):
    """An engine failed; the message holds the end of what it printed."""


def run_engine(
    case: EngineCase, backend: str, *, is_dry: bool, weights: str, logs: Path | None = None
) -> dict[str, Any]:
    """Serve a case's trace in a process of its own.

    Args:
        case: What is served.
        backend: Of attention.
        is_dry: Without a GPU.
        weights: As vLLM's `load_format`.
        logs: Folder for what the engine prints.

    Returns:
        Seconds it took to start, and what each run reports.

    Raises:
        EngineError: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="jenga-engine-") as name:
        folder = Path(name)
        options = ENGINE_OPTIONS | {
            "model": str(save_config(case, folder / "model")),
            "load_format": weights,
            "attention_backend": backend,
            "kv_cache_memory_bytes": case.cache_bytes,
        }
        environment = dict(os.environ)
        environment.pop("VLLM_ATTENTION_BACKEND", None)
        if is_dry:
            options |= {"dtype": "float32", "enforce_eager": True}
            del options["compilation_config"]
            environment |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        job = {
            "options": options | case.options,
            "trace": case.trace,
            "limit": case.limit,
            "speed": case.speed,
            "num_runs": case.num_runs,
        }
        job_path, result_path = folder / "job.json", folder / "result.json"
        job_path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "perf.engine_run", str(job_path), str(result_path)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{case.model}-{backend}.log").write_text(done.stdout)
        if done.returncode or not result_path.exists():
            lines = done.stdout.splitlines()[-25:]
            msg = "\n".join([f"{case.name} on {backend} ended with {done.returncode}:", *lines])
            raise EngineError(msg)
        return json.loads(result_path.read_text())


def row_of(case: EngineCase, implementation: str, result: dict[str, Any]) -> dict[str, Any]:
    """Get what is written of a case: of each number the median of its runs."""
    runs = result["runs"]
    return {
        "shape": case.name,
        "implementation": implementation,
        **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
        "seconds_of_runs": [run["seconds"] for run in runs],
        "start_s": result["start_s"],
        "cache_bytes": case.cache_bytes,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text; the last column is a row's time over ours."""
    ours = {row["shape"]: row["seconds"] for row in rows if row["implementation"] == "jenga"}
    lines: list[str] = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        widths = [max(len(format(0.0, how)), len(title)) for _, how, title in COLUMNS]
        titles = (title.rjust(width) for (_, _, title), width in zip(COLUMNS, widths, strict=True))
        lines += [shape, f"  {'':14}" + " ".join(titles) + "  jenga is"]
        for row in rows:
            if row["shape"] != shape:
                continue
            values = (
                format(row[name], how).rjust(width)
                for (name, how, _), width in zip(COLUMNS, widths, strict=True)
            )
            ratio = ""
            if row["implementation"] != "jenga" and shape in ours:
                ratio = f"{row['seconds'] / ours[shape]:8.2f}x"
            lines.append(f"  {row['implementation']:14}" + " ".join(values) + f" {ratio}")
    return "\n".join(lines)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model and a trace of one's own."""
    parser.add_argument("--model", type=Path, help="folder of a model to serve in place of these")
    parser.add_argument("--trace", help="that it serves, as `jenga replay` takes it")
    parser.add_argument("--cache", help="bytes of the cache, as in 20GiB")
    parser.add_argument("--limit", type=int, help="no more requests than these")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals come so much faster")
    parser.add_argument("--runs", type=int, help="of the trace; otherwise 2")
    parser.add_argument("--logs", type=Path, help="folder for what engines print")
    parser.add_argument("--random-weights", action="store_true", help="read no weights")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="more arguments of the engine, as JSON"
    )


def own_case(options: argparse.Namespace, parser: argparse.ArgumentParser) -> EngineCase:
    """Get the case that the command line describes."""
    missing = [name for name in ("trace", "cache") if getattr(options, name) is None]
    if missing:
        parser.error(f"--model needs --{' and --'.join(missing)} too")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model must be a folder with a config.json, got {options.model}")
    try:
        cache_bytes = parse_bytes(options.cache)
    except ValueError as error:
        parser.error(f"--cache: {error}")
    try:
        open_source(options.trace)
    except ValueError as error:
        parser.error(f"--trace: {error}")
    return EngineCase(
        model=options.model.resolve().name,
        config=options.model,
        trace=options.trace,
        cache_bytes=cache_bytes,
        options=options.engine,
        limit=options.limit,
        speed=options.speed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases.

    Returns:
        1 where an engine failed.
    """
    benchmark = Benchmark("bench_engine", __doc__ or "", TESTS, arguments, configure=configure)
    options = benchmark.options
    cases = DRY_CASES if benchmark.is_dry else CASES
    weights = "dummy"
    if options.model is not None:
        cases = (own_case(options, benchmark.parser),)
        weights = "dummy" if options.random_weights else "auto"
    if options.runs is not None:
        cases = tuple(dataclasses.replace(case, num_runs=options.runs) for case in cases)
    stock = STOCK_ON_A_CPU if benchmark.is_dry else STOCK_ON_A_GPU
    peers = {"all": [stock], "none": []}.get(options.peers, options.peers.split(","))
    rows: list[dict[str, Any]] = []
    has_failed = False
    for case in cases:
        if not benchmark.wants_shape(case.name):
            continue
        for implementation in ("jenga", *peers):
            backend = OURS if implementation == "jenga" else implementation
            try:
                result = run_engine(
                    case, backend, is_dry=benchmark.is_dry, weights=weights, logs=options.logs
                )
            except EngineError as error:
                print(error, flush=True)
                has_failed = True
                continue
            rows.append(row_of(case, implementation, result))
            benchmark.write(rows[-1])
            print(f"  {case.name}: {implementation} {rows[-1]['seconds']:.2f} s", flush=True)
    print(benchmark.machine)
    print(table(rows))
    print(f"rows: {benchmark.path}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
