"""Measure the simulator's speed and memory on one core of a CPU.

    python -m perf.manager.bench_replay [--requests 16 64 256] [--models ...] [--save]
    python -m perf.manager.bench_replay --traces 50000 200000 1000000 [--save]

A row of the first command replays requests that all arrive at the start and decode together. It
counts only the steps in which all of them decode, in CPU time of the process. The roofline's clock
runs, and the arena's memory is sampled as often as `jenga replay` does by default.

A row of the second command is a whole `jenga replay` of that many short requests on the model with
three layer types. The arena is full, and evicts, from early on. Each row runs in a process of its
own, and reports its CPU time and peak memory.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jenga.models import known_model
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.batching.step_time import StepTime, Weights
from jenga.sim.hardware.gpus import GPUS
from jenga.sim.replays.record import SAMPLED_EVERY
from jenga.sim.replays.replay import Replay
from jenga.sim.replays.session import Machine, Settings, Trace, outcome_of, replay_rows, run_row
from jenga.sim.workload.requests import Piece, Request
from jenga.sim.workload.sources import open_source
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State

GOAL_STEPS_PER_MINUTE = 50_000
"""Goal for 64 requests on the model with three layer types."""

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 2000
ARENA_BYTES = 400_000_000_000

THREE_TYPES = "three-types"
MODELS = ("llama-3.1-8b", "gemma-3-27b", "jamba-1.5-mini", THREE_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case.

    Attributes:
        model: Name of the model.
        num_types: Number of its layer types.
        num_requests: Number of requests that decode together.
        num_steps: Number of steps counted.
        step_us: CPU time of a step, in microseconds.
        steps_per_minute: Steps per minute of CPU time.
    """

    model: str
    num_types: int
    num_requests: int
    num_steps: int
    step_us: float
    steps_per_minute: float


def three_types() -> ModelSpec:
    """Make a model of full attention, windows and states.

    It has as many layers as Hymba, and states of Jamba's size.
    """
    return ModelSpec(
        name=THREE_TYPES,
        layer_types=(
            FullAttention(
                name="full", layers=tuple(Layer(name=f"f{i}", slot_bytes=4096) for i in range(4))
            ),
            SlidingWindow(
                name="sliding",
                layers=tuple(Layer(name=f"w{i}", slot_bytes=4096) for i in range(12)),
                window_tokens=1024,
            ),
            State(
                name="state",
                layers=tuple(Layer(name=f"s{i}", slot_bytes=311_296) for i in range(16)),
            ),
        ),
    )


def requests(count: int) -> Iterator[Request]:
    for number in range(count):
        # Lengths differ, so that pages fill up in different steps.
        yield Request(
            name=str(number),
            prompt=(Piece(number, PROMPT_TOKENS + number),),
            output_tokens=OUTPUT_TOKENS,
        )


def measure(name: str, num_requests: int) -> Row:
    model = three_types() if name == THREE_TYPES else known_model(name).spec()
    arena = make_arena("jenga", model, ARENA_BYTES)
    clock = StepTime(model, Weights(num_bytes=16e9, total=8e9, active=8e9), GPUS["H200"])
    run = Replay(requests(num_requests), arena, clock=clock, chunk_tokens=1 << 20)
    num_steps = 0
    start_s = end_s = 0.0
    for step in run:
        if step.num_decoding == num_requests:
            end_s = time.process_time()
            if num_steps:
                num_steps += 1
            else:
                start_s, num_steps = end_s, 1
        if step.number % SAMPLED_EVERY == 0:
            run.memory()
    num_steps -= 1
    seconds = end_s - start_s
    return Row(
        model=name,
        num_types=len(model.layer_types),
        num_requests=num_requests,
        num_steps=num_steps,
        step_us=1e6 * seconds / num_steps,
        steps_per_minute=60 * num_steps / seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One trace.

    Attributes:
        model: Name of the model.
        trace: Trace in the notation of `jenga replay --trace`.
        num_requests: Number of requests.
        num_steps: Number of steps of the replay.
        evicted_pages: Number of cached small pages that were evicted.
        cpu_s: CPU seconds of the process, including two readings of the trace.
        peak_rss_bytes: Peak memory of the process, in bytes.
        start_rss_bytes: Peak memory before the trace was opened, in bytes.
    """

    model: str
    trace: str
    num_requests: int
    num_steps: int
    evicted_pages: int
    cpu_s: float
    peak_rss_bytes: int
    start_rss_bytes: int


TRACE = "static-lengths:n={},tokens=20-120,output=2-8"
TRACE_ARENA_BYTES = 20_000_000_000


def measure_trace(num_requests: int) -> TraceRow:
    """Replay a trace in this process."""
    model = three_types()
    clock = StepTime(model, Weights(num_bytes=16e9, total=8e9, active=8e9), GPUS["H200"])
    machine = Machine(model=model, arena_bytes=TRACE_ARENA_BYTES, clock=clock)
    start_rss_bytes = peak_rss_bytes()
    name = TRACE.format(num_requests)
    trace, settings = Trace(name, lambda: open_source(name)), Settings()
    row = run_row(machine, "jenga", trace, settings)
    summary = outcome_of(replay_rows(row, machine, trace, settings)).summary
    return TraceRow(
        model=model.name,
        trace=name,
        num_requests=summary.num_requests,
        num_steps=summary.num_steps,
        evicted_pages=summary.evicted_pages,
        cpu_s=round(time.process_time(), 1),
        peak_rss_bytes=peak_rss_bytes(),
        start_rss_bytes=start_rss_bytes,
    )


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure_in_a_process(num_requests: int) -> TraceRow:
    """Replay a trace in a new process, because Python does not return memory to the system."""
    command = [sys.executable, "-m", "perf.manager.bench_replay", "--one-trace", str(num_requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return TraceRow(**json.loads(done.stdout))


TRACE_HEADER = (
    f"{'requests':>9} {'steps':>8} {'evicted':>11} {'CPU s':>8} {'us a request':>13} "
    f"{'peak MB':>8} {'of them before':>15}"
)


def trace_line(row: TraceRow) -> str:
    return (
        f"{row.num_requests:9,} {row.num_steps:8,} {row.evicted_pages:11,} {row.cpu_s:8,.1f} "
        f"{1e6 * row.cpu_s / row.num_requests:13,.0f} {row.peak_rss_bytes / 1e6:8,.1f} "
        f"{row.start_rss_bytes / 1e6:15,.1f}"
    )


def line(row: Row) -> str:
    return (
        f"{row.model:16} {row.num_types:5} {row.num_requests:8} {row.step_us:9.1f} "
        f"{row.steps_per_minute:12,.0f} {1000 * row.step_us / row.num_requests:14.0f}"
    )


HEADER = (
    f"{'model':16} {'types':>5} {'requests':>8} {'step us':>9} {'steps/minute':>12} "
    f"{'ns per request':>14}"
)


def save(name: str, header: str, rows: Sequence[Row | TraceRow], lines: Sequence[str]) -> None:
    """Write the rows and the table to `perf/results/cpu`."""
    folder = Path(__file__).parents[1] / "results" / "cpu"
    here = {"machine": machine(), "commit": commit()}
    records = [json.dumps(asdict(row) | here) + "\n" for row in rows]
    (folder / f"{name}.jsonl").write_text("".join(records), encoding="utf-8")
    text = [f"# {name}", "", f"{here['machine']}, jenga {here['commit']}", "", "```"]
    text += [header, *lines, "```", ""]
    (folder / f"{name}.md").write_text("\n".join(text), encoding="utf-8")


def machine() -> str:
    names = [
        each.partition(":")[2].strip()
        for each in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if each.startswith("model name")
    ]
    return f"one core of {(names or [platform.machine()])[0]}, Python {platform.python_version()}"


def commit() -> str:
    command = ["git", "describe", "--always", "--exclude", "*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, check=False)
    return done.stdout.decode().strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.manager.bench_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of known models")
    parser.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[16, 64, 256],
        help="numbers of decoding requests",
    )
    parser.add_argument(
        "--traces",
        nargs="+",
        type=int,
        metavar="N",
        help="replay whole traces of these numbers of requests instead",
    )
    parser.add_argument("--one-trace", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument(
        "--json", action="store_true", help="print rows as JSON lines instead of a table"
    )
    parser.add_argument("--save", action="store_true", help="write the rows to perf/results/cpu")
    options = parser.parse_args(arguments)
    if options.one_trace:
        print(json.dumps(asdict(measure_trace(options.one_trace))))
        return
    rows: list[Row | TraceRow] = []
    lines: list[str] = []
    header = TRACE_HEADER if options.traces else HEADER
    if not options.json:
        print(machine(), header, sep="\n")

    def add(row: Row | TraceRow) -> None:
        rows.append(row)
        lines.append(trace_line(row) if isinstance(row, TraceRow) else line(row))
        print(json.dumps(asdict(row)) if options.json else lines[-1], flush=True)

    if options.traces:
        for count in options.traces:
            add(measure_in_a_process(count))
    else:
        for name in options.models:
            for count in options.requests:
                add(measure(name, count))
    if options.save:
        save("bench_replay_traces" if options.traces else "bench_replay", header, rows, lines)


if __name__ == "__main__":
    main()
