"""Measure the host time of our memory manager and of vLLM's own KVCacheManager.

    python -m perf.manager.bench_manager [model ...] [--arena-gb 400] [--arena-factors 1 10 100]
    [--memory]
        [--metrics] [--rounds 3] [--save FOLDER]

Both managers run in one process, in turn, on the same layers. The hashes of both are made
beforehand. The columns are microseconds of the thread's CPU time:

- a decode step of 256 running requests, in which our manager also keeps states of answers;
- a 2,048-token chunk of a prefill;
- the lookup of a cached prefix of 32,768 tokens;
- the admission with this prefix;
- the end of a request of 32,768 tokens.

Each number is the median of the repetitions in a round, and the least of all rounds. The least is
used because the disturbance of CPU caches by other programs varies. Python's garbage collector is
off, because its cost depends on all living objects, including the other manager's.

Stock runs with its defaults: prefix caching is on, and hybrids run in `align` mode with the
attention block that vLLM chooses. Our manager looks up, shares and frees pages of 16 tokens on
every model. If a model has states, stock's blocks have hundreds or thousands of tokens, so it
handles correspondingly fewer of them.
"""

import argparse
import gc
import json
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from jenga.models import known_model
from jenga.planning.planner import plan
from perf.manager.manager_sides import PREFIX_TOKENS, Ours, Stock

MODELS = (
    "llama-3.1-8b",
    "ministral-8b-2410",
    "gpt-oss-20b",
    "gemma-3-27b",
    "jamba-1.5-mini",
    "nemotron-h-8b",
    "qwen3-next-80b-a3b",
)
"""One model with a single layer type, three models with windows, three with states.

In Llama and gpt-oss each small page is a large page.
"""

NUM_RUNNING = 256
DECODE_STEPS = 48
FIRST_STEPS = 64
"""Number of decode steps that are not timed. After them, every request has kept a state."""

CHUNK_TOKENS = 2048
PROMPT_TOKENS = 1024
REPETITIONS = 9
MOST_REQUESTS = 2000

TABLES = {
    "models": "us of CPU time: ours, stock, ratio; last, ours over ours on the first model",
    "arenas": "us of CPU time of ours, the same geometry in arenas so many times larger",
    "metrics": "us of CPU time: a decode step, asking in it for metrics, a reading of all series",
    "memory": "bytes of the manager for each small page: empty arena, all of it cached",
}
"""Name of a table -> the text above it."""


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of one manager, in microseconds.

    None means that the arena is too small for the case.
    """

    decode_step: float | None
    chunk: float | None
    lookup: float | None
    admission: float | None
    finish: float | None


def median_us(durations: Sequence[float]) -> float:
    return statistics.median(durations) * 1e6


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
    """Return the seconds of this thread's CPU time, without other programs, and the result."""
    start = time.thread_time()
    result = call(*args, **kwargs)
    return time.thread_time() - start, result


def decode_step_us(side: Ours | Stock) -> float:
    for number in range(NUM_RUNNING):
        name = f"d{number}"
        # Lengths differ, so that page boundaries are spread evenly over the steps.
        prompt_tokens = PROMPT_TOKENS + 37 * number % 512
        side.begin(name, 1000 + number, prompt_tokens)
        side.advance(name, prompt_tokens)
    durations = []
    for _ in range(FIRST_STEPS + DECODE_STEPS):
        start = time.thread_time()
        side.new_step()
        for number in range(NUM_RUNNING):
            side.advance(f"d{number}", 1)
        durations.append(time.thread_time() - start)
    for number in range(NUM_RUNNING):
        side.finish(f"d{number}")
    return median_us(durations[FIRST_STEPS:])


def chunk_us(side: Ours | Stock) -> float:
    durations = []
    for repetition in range(REPETITIONS):
        name = f"c{repetition}"
        side.begin(name, 5000 + repetition, 4 * CHUNK_TOKENS)
        for chunk in range(4):
            side.new_step()
            duration, _ = timed(side.advance, name, CHUNK_TOKENS)
            if chunk:
                durations.append(duration)
        side.finish(name)
    return median_us(durations)


def long_request_us(side: Ours | Stock) -> tuple[float, float, float]:
    """Time lookup, admission and end of a request whose first 32k tokens are cached."""
    side.begin("long", 9000, PREFIX_TOKENS)
    for _ in range(PREFIX_TOKENS // CHUNK_TOKENS):
        side.new_step()
        side.advance("long", CHUNK_TOKENS)
        side.keep_states("long")
    side.finish("long")
    lookups, admissions, ends = [], [], []
    for repetition in range(REPETITIONS):
        name = f"l{repetition}"
        side.begin(name, 9000, PREFIX_TOKENS + 64)
        side.new_step()
        duration, hit = timed(side.lookup, name, PREFIX_TOKENS + 64)
        lookups.append(duration)
        admissions.append(timed(side.advance, name, 64, hit)[0])
        side.new_step()
        ends.append(timed(side.finish, name)[0])
    return median_us(lookups), median_us(admissions), median_us(ends)


def unless_too_small(measure_case: Callable[[Ours | Stock], T], side: Ours | Stock) -> T | None:
    """Measure a case; return None if the arena is too small for it."""
    try:
        return measure_case(side)
    except (MemoryError, OutOfPagesError):
        return None


def measure(*sides: Ours | Stock, rounds: int) -> list[Times]:
    """Measure all cases of all sides in turn, and return the least time of the rounds."""
    best: list[dict[str, float | None]] = [{} for _ in sides]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for side, least in zip(sides, best, strict=True):
                # Each round needs new content. Otherwise the cache would know everything already.
                side.first_seed = number * 1_000_000
                for case, value in asdict(measure_once(side)).items():
                    known = least.get(case)
                    least[case] = value if known is None or value is None else min(known, value)
    finally:
        gc.enable()
    return [Times(**each) for each in best]


def measure_once(side: Ours | Stock) -> Times:
    long = unless_too_small(long_request_us, side) or (None, None, None)
    return Times(
        decode_step=unless_too_small(decode_step_us, side),
        chunk=unless_too_small(chunk_us, side),
        lookup=long[0],
        admission=long[1],
        finish=long[2],
    )


CASES = ("decode_step", "chunk", "lookup", "admission", "finish")

MODEL_HEADER = (
    f"{'model':20} {'tab':>3} {'grp':>3} | "
    + " | ".join(f"{case:^21}" for case in CASES)
    + " | ours over ours on the first model"
)


def cell(ours: float | None, stock: float | None) -> str:
    if ours is None or stock is None:
        return f"{'-' if ours is None else f'{ours:.0f}':>7} {'-':>7} {'-':>6}"
    return f"{ours:7.0f} {stock:7.0f} {ours / stock:5.2f}x"


def model_line(row: dict[str, Any], first: dict[str, Any]) -> str:
    cells = " | ".join(cell(row["ours"][case], row["stock"][case]) for case in CASES)
    ratios = " ".join(
        f"{row['ours'][case] / first['ours'][case]:5.2f}"
        if row["ours"][case] and first["ours"][case]
        else f"{'-':>5}"
        for case in CASES
    )
    return f"{row['model']:20} {row['page_tables']:3} {row['groups']:3} | {cells} | {ratios}"


def measure_models(names: Sequence[str], arena_bytes: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"arena {arena_bytes / 1e9:.0f} GB; us: ours, stock, ratio\n{MODEL_HEADER}")
    for name in names:
        model = known_model(name).spec()
        geometry = plan(model, arena_bytes=arena_bytes)
        stock_side = Stock(model, arena_bytes)
        ours, stock = measure(Ours(geometry, arena_bytes), stock_side, rounds=rounds)
        row = {
            "table": "models",
            "model": name,
            "arena_bytes": arena_bytes,
            "page_tables": len(geometry.page_tables),
            "groups": stock_side.num_groups,
            "ours": rounded(ours),
            "stock": rounded(stock),
        }
        rows.append(row)
        print(model_line(row, rows[0]), flush=True)
    return rows


def rounded(times: Times) -> dict[str, float | None]:
    return {case: value and round(value, 1) for case, value in asdict(times).items()}


ARENA_HEADER = f"{'model':20} {'arena':>6} {'small pages':>12} " + " ".join(
    f"{case:>11}" for case in CASES
)


def arena_line(row: dict[str, Any]) -> str:
    cells = " ".join(f"{row['ours'][case] or 0:11.0f}" for case in CASES)
    return f"{row['model']:20} {row['factor']:5}x {row['small_pages']:12} {cells}"


def measure_arenas(
    names: Sequence[str], arena_bytes: int, factors: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"\nus of ours, the same geometry in arenas so many times larger\n{ARENA_HEADER}")
    for name in names:
        geometry = plan(known_model(name).spec(), arena_bytes=arena_bytes)
        for factor in factors:
            side = Ours(geometry, arena_bytes * factor)
            row = {
                "table": "arenas",
                "model": name,
                "arena_bytes": arena_bytes * factor,
                "factor": factor,
                "small_pages": count_small_pages(side.manager),
                "ours": rounded(measure(side, rounds=rounds)[0]),
            }
            rows.append(row)
            print(arena_line(row), flush=True)
    return rows


def count_small_pages(manager: Manager) -> int:
    tables = manager.geometry.page_tables
    return manager.num_large_pages * sum(each.small_pages_per_large_page for each in tables)


MEMORY_HEADER = f"{'model':20} {'small pages':>12} {'empty':>7} {'full':>7}"


def memory_line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:20} {row['small_pages']:12} {row['empty_bytes_per_page']:7.1f} "
        f"{row['full_bytes_per_page']:7.1f}"
    )


def measure_memory(names: Sequence[str], arena_bytes: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(
        "\nmemory of the manager: bytes (MB per million) of each small page of any page table, in"
    )
    print(f"an empty arena and in one full of cached pages\n{MEMORY_HEADER}")
    for name in names:
        geometry = plan(known_model(name).spec(), arena_bytes=arena_bytes)
        tracemalloc.start()
        side = Ours(geometry, arena_bytes)
        num_small_pages = count_small_pages(side.manager)
        empty, _ = tracemalloc.get_traced_memory()
        for number in range(MOST_REQUESTS):
            if any(each.own_large for each in side.manager.cache_report().evictions):
                break
            side.begin(f"m{number}", number, CHUNK_TOKENS)
            side.advance(f"m{number}", CHUNK_TOKENS)
            side.keep_states(f"m{number}")
            side.finish(f"m{number}")
            # The engine owns the hashes, so their memory does not count.
            side.hashes.clear()
        full, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        row = {
            "table": "memory",
            "model": name,
            "arena_bytes": arena_bytes,
            "small_pages": num_small_pages,
            "empty_bytes_per_page": round(empty / num_small_pages, 1),
            "full_bytes_per_page": round(full / num_small_pages, 1),
        }
        rows.append(row)
        print(memory_line(row), flush=True)
    return rows


METRICS_HEADER = f"{'model':20} {'tab':>3} {'decode step':>12} {'asking':>7} {'reading':>8}"


def metrics_line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:20} {row['page_tables']:3} {row['decode_step']:12.1f} "
        f"{row['asking']:7.2f} {row['reading']:8.1f}"
    )


def measure_metrics(names: Sequence[str], arena_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Measure the cost of metrics: a query in every step, and a reading once a second."""
    from jenga.vllm_plugin.metrics.readings import MetricReader, read_values

    rows: list[dict[str, Any]] = []
    print(f"\n{TABLES['metrics']}; {NUM_RUNNING} requests\n{METRICS_HEADER}")
    for name in names:
        geometry = plan(known_model(name).spec(), arena_bytes=arena_bytes)
        side = Ours(geometry, arena_bytes)
        reader = MetricReader(side.manager)
        gc.collect()
        gc.disable()
        try:
            steps, questions, readings = [], [], []
            for number in range(rounds):
                side.first_seed = number * 1_000_000
                steps.append(decode_step_us(side))
                for index in range(NUM_RUNNING):
                    side.begin(f"d{index}", 1000 + index, PROMPT_TOKENS)
                    side.advance(f"d{index}", PROMPT_TOKENS + 37 * index % 512)
                reader.read()
                questions += [timed(reader.read)[0] for _ in range(REPETITIONS)]
                readings += [
                    timed(read_values, side.manager, reader.held_back)[0]
                    for _ in range(REPETITIONS)
                ]
                for index in range(NUM_RUNNING):
                    side.finish(f"d{index}")
        finally:
            gc.enable()
        row = {
            "table": "metrics",
            "model": name,
            "arena_bytes": arena_bytes,
            "page_tables": len(geometry.page_tables),
            "decode_step": round(min(steps), 1),
            "asking": round(median_us(questions), 2),
            "reading": round(median_us(readings), 1),
        }
        rows.append(row)
        print(metrics_line(row), flush=True)
    return rows


def machine_line() -> str:
    import vllm

    from perf.harness.timing import machine_line as harness_line

    with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        names = {line.split(":")[1].strip() for line in file if line.startswith("model name")}
    processor = ", ".join(sorted(names)) or platform.machine()
    versions = f"Python {platform.python_version()}, vllm {vllm.__version__}"
    return f"{processor}, {versions}; {harness_line()}"


def save(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write the rows of a run and a text of all rows.

    Older rows of the same tables are replaced.
    """
    path = folder / "bench_manager.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    machine = machine_line()
    tables = {row["table"] for row in rows}
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [row for row in map(json.loads, old) if row["table"] not in tables]
    kept += [row | {"machine": machine} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    text = ["# Host time of the manager", "", *sorted({row["machine"] for row in kept})]
    parts = {name: [row for row in kept if row["table"] == name] for name in TABLES}
    for name, title in TABLES.items():
        if parts[name]:
            text += ["", title, "", "```"]
        match name:
            case "models" if parts[name]:
                text += [MODEL_HEADER, *(model_line(row, parts[name][0]) for row in parts[name])]
            case "arenas" if parts[name]:
                text += [ARENA_HEADER, *map(arena_line, parts[name])]
            case "metrics" if parts[name]:
                text += [METRICS_HEADER, *map(metrics_line, parts[name])]
            case "memory" if parts[name]:
                text += [MEMORY_HEADER, *map(memory_line, parts[name])]
            case _:
                continue
        text.append("```")
    (folder / "bench_manager.md").write_text("\n".join([*text, ""]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.manager.bench_manager",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", default=MODELS, help="names of known models")
    parser.add_argument(
        "--arena-gb",
        type=float,
        default=400,
        help="size of the arena, in GB (default: %(default)s)",
    )
    parser.add_argument(
        "--arena-factors",
        type=int,
        nargs="*",
        default=[],
        help="compare arenas that are this number of times as large",
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure the host memory of the managers instead"
    )
    parser.add_argument(
        "--metrics", action="store_true", help="measure the host time of the metrics instead"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="write rows and text to this folder"
    )
    arguments = parser.parse_args()
    arena_bytes = int(arguments.arena_gb * 1e9)
    print(machine_line())
    if arguments.arena_factors:
        rows = measure_arenas(
            arguments.models, arena_bytes, arguments.arena_factors, arguments.rounds
        )
    elif arguments.metrics:
        rows = measure_metrics(arguments.models, arena_bytes, arguments.rounds)
    elif arguments.memory:
        rows = measure_memory(arguments.models, arena_bytes)
    else:
        rows = measure_models(arguments.models, arena_bytes, arguments.rounds)
    if arguments.save:
        save(rows, arguments.save)


if __name__ == "__main__":
    main()
