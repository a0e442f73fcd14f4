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
import contextlib
import dataclasses
import json
import os
import signal
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
from perf.engine_run import JOB, RESULT
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

LAST_WORDS_S = 3.0
"""For an engine that has to be ended to say where it was."""

LAST_LINES = 25
"""Of what an engine printed that are shown if it fails."""

PATIENCE_S = 3600.0

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


class Engine:
    """An engine that serves a case's trace in a process of its own.

    Args:
        case: What is served.
        backend: Of attention.
        is_dry: Without a GPU.
        weights: As vLLM's `load_format`.
        logs: Folder for what it prints; None: kept no longer than it runs.
    """

    def __init__(
        self,
        case: EngineCase,
        backend: str,
        *,
        is_dry: bool,
        weights: str,
        logs: Path | None = None,
    ) -> None:
        self._name = f"{case.name} on {backend}"
        self._temporary = tempfile.TemporaryDirectory(prefix="jenga-engine-")
        self._folder = folder = Path(self._temporary.name)
        logs = folder if logs is None else logs
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{case.model}-{backend}.log"
        options = ENGINE_OPTIONS | {
            "model": str(save_config(case, folder / "model")),
            "load_format": weights,
            "attention_backend": backend,
            "kv_cache_memory_bytes": case.cache_bytes,
        }
        # So that a process that is ended with SIGABRT says where it was.
        environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
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
        (folder / JOB).write_text(json.dumps(job))
        command = [sys.executable, "-m", "perf.engine_run", str(folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all of its processes can be ended
            )

    def result(self, patience_s: float) -> dict[str, Any]:
        """Wait until it has served.

        Args:
            patience_s: For that, its start included.

        Returns:
            Seconds it took to start, and what each run reports.

        Raises:
            EngineError: It failed, or took longer.
        """
        how = "ended with {}"
        try:
            status = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            how = f"took longer than {patience_s:.0f} s, and was ended with {{}}"
            status = self._end()
        result_path = self._folder / RESULT
        if status or not result_path.exists():
            lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise EngineError("\n".join([f"{self._name} {how.format(status)}:", *lines]))
        return json.loads(result_path.read_text())

    def close(self) -> None:
        """End what still runs of it."""
        self._end()
        self._temporary.cleanup()

    def _end(self) -> int:
        """End all of its processes; the log then says where each thread was."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGABRT)
                self._process.wait(LAST_WORDS_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


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
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds after which an engine that has not served is ended",
    )
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
    jobs = [
        (case, implementation)
        for case in cases
        if benchmark.wants_shape(case.name)
        for implementation in ("jenga", *peers)
    ]
    rows: list[dict[str, Any]] = []
    num_failed = 0
    for case, implementation in jobs:
        backend = OURS if implementation == "jenga" else implementation
        engine = Engine(case, backend, is_dry=benchmark.is_dry, weights=weights, logs=options.logs)
        try:
            result = engine.result(options.patience)
        except EngineError as error:
            print(error, flush=True)
            num_failed += 1
            continue
        finally:
            engine.close()
        rows.append(row_of(case, implementation, result))
        benchmark.write(rows[-1])
        print(f"  {case.name}: {implementation} {rows[-1]['seconds']:.2f} s", flush=True)
    print(benchmark.machine)
    print(table(rows))
    print(f"rows: {benchmark.path}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
