"""Compare prefix hits of eviction policies and of vLLM's manager on workloads with shared prefixes.

    python -m perf.sweeps.sweep_eviction [--models ...] [--workloads ...] [--systems ...]
        [--mooncake FILE] [--save FOLDER]

A number is the percentage of prompt tokens that were found cached at the first admission. `best` is
an upper bound: the hits of an eviction that knows the future, with requests one after another.
`unlimited` is a cache of unlimited size. All replays run in bfloat16, on as many GPUs as the
weights need, under the same scheduler. Seconds come from a roofline, so all machines give the same
rows.

Questions on articles come in random order, in rounds or in cycles. A round has each article once,
in a new order. A cycle has the same order each time, so that the least recently used article is
needed next. All questions are there from the start: `perf.serving` has requests that arrive over
time. The trace consists of the first 1,000 rows of Mooncake's, four times as fast.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from jenga.eviction.known import EVICTION_POLICIES
from jenga.models import ModelFacts, ReadOptions, known_model
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.batching.step_time import StepTime, weights_of
from jenga.sim.hardware.budget import memory_budget
from jenga.sim.hardware.gpus import Gpu, find_gpu
from jenga.sim.replays.bounds import best_eviction, unlimited
from jenga.sim.replays.replay import Replay
from jenga.sim.workload.generators import agentic, articles
from jenga.sim.workload.requests import Request
from jenga.sim.workload.traces import read_mooncake
from jenga.spec import ModelSpec

CASES = (
    ("llama-3.1-8b", "H100"),
    ("ministral-8b-2410", "H100"),
    ("gemma-3-27b", "H200"),
    ("gemma-3-12b", "H100"),
    ("gemma-4-31b", "H200"),
    ("gemma-4-26b-a4b", "H100"),
    ("gpt-oss-20b", "H100"),
    ("llama-4-scout", "H200"),
    ("qwen3-next-80b-a3b", "H200"),
    ("nemotron-h-8b", "H100"),
    ("falcon-h1-7b", "H100"),
    ("granite-4.0-h-small", "H100"),
    ("jamba-1.5-mini", "H200"),
)
"""Models, each with the GPU that it runs on."""

STOCK = "vllm"
SYSTEMS = (*EVICTION_POLICIES, STOCK)

ARTICLE_TOKENS = 30_000
MOONCAKE_ROWS = 1000
MOONCAKE_SPEED = 4
LEAST_ARENA_SHARE = 0.1
"""Least share of a GPU's usable memory for the arena.

If a model leaves less, it runs on more GPUs.
"""

Requests = Callable[[], Iterable[Request]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on a machine.

    Attributes:
        facts: Facts about the model.
        model: Layers of one rank.
        gpu: Kind of GPU of each rank.
        ranks: Number of ranks that the weights are divided over.
        arena_bytes: Size of the arena on one rank, in bytes.
    """

    facts: ModelFacts
    model: ModelSpec
    gpu: Gpu
    ranks: int
    arena_bytes: int


def setting(name: str, gpu_name: str) -> Setting:
    """Return a model on the smallest number of GPUs that leaves room for an arena."""
    facts, gpu = known_model(name), find_gpu(gpu_name)
    for ranks in (1, 2, 4, 8):
        budget = memory_budget([facts], gpu, ranks=ranks)
        if budget.arena_bytes >= LEAST_ARENA_SHARE * budget.usable_bytes:
            return Setting(
                facts=facts,
                model=facts.spec(ReadOptions(tensor_parallel=ranks)),
                gpu=gpu,
                ranks=ranks,
                arena_bytes=budget.arena_bytes,
            )
    msg = f"{name!r} does not fit on 8 {gpu_name}"
    raise ValueError(msg)


def asked(num_articles: int, order: str) -> Requests:
    """Return a workload of eight questions on each article."""
    return lambda: articles(
        num_articles=num_articles, num_questions=8, article_tokens=ARTICLE_TOKENS, order=order
    )


def mooncake(path: Path) -> Requests:
    """Return a workload of the first rows of a trace, sped up."""
    return lambda: (
        replace(each, arrival_s=each.arrival_s / MOONCAKE_SPEED)
        for each in islice(read_mooncake(path), MOONCAKE_ROWS)
    )


def workloads(trace: Path | None) -> dict[str, Requests]:
    """Return name -> workload."""
    found: dict[str, Requests] = {
        "3 articles": asked(3, "random"),
        "8 articles": asked(8, "random"),
        "24 articles": asked(24, "random"),
        "24 in rounds": asked(24, "rounds"),
        "24 in cycles": asked(24, "cyclic"),
        "agentic": agentic,
        "chat": lambda: agentic(
            num_sessions=96,
            num_turns=10,
            system_tokens=1000,
            turn_tokens=(50, 400),
            output_tokens=(300, 2000),
            arrivals_per_s=1.0,
            think_s=60.0,
        ),
        "agentic, busy": lambda: agentic(num_sessions=128, arrivals_per_s=2.0, think_s=5.0),
    }
    if trace is not None:
        found["mooncake"] = mooncake(trace)
    return found


def replay(one: Setting, requests: Requests, system: str) -> dict[str, Any]:
    """Replay requests with our manager and one eviction policy, or with vLLM's manager."""
    clock = StepTime(one.model, weights_of(one.facts, ranks=one.ranks), one.gpu)
    if system == STOCK:
        arena = make_arena("vllm", one.model, one.arena_bytes)
    else:
        arena = make_arena(
            "jenga",
            one.model,
            one.arena_bytes,
            eviction_policy=EVICTION_POLICIES[system],
            step_tokens=clock.step_tokens,
        )
    run = Replay(requests(), arena, clock=clock)
    start = time.process_time()
    for _ in run:
        pass
    return {
        "hit_percent": round(100 * run.hit_tokens / run.prompt_tokens, 2),
        "steps": run.num_steps,
        "preemptions": run.scheduler.num_preemptions,
        "refused": run.num_refused,
        "modelled_s": round(run.time_s, 1),
        "cpu_s": round(time.process_time() - start, 1),
    }


def rows(
    one: Setting, workload: str, requests: Requests, systems: Sequence[str]
) -> list[dict[str, Any]]:
    """Return rows of the bounds and of each system on a workload."""
    case = {
        "model": one.facts.name,
        "gpu": one.gpu.name,
        "ranks": one.ranks,
        "arena_bytes": one.arena_bytes,
        "workload": workload,
    }
    best = best_eviction(requests(), one.model, one.arena_bytes).hit_rate
    found = [
        case
        | {"system": "unlimited", "hit_percent": round(100 * unlimited(requests()).hit_rate, 2)},
        case | {"system": "best", "hit_percent": round(100 * best, 2)},
    ]
    for system in systems:
        try:
            found.append(case | {"system": system} | replay(one, requests, system))
        except ValueError as error:
            found.append(case | {"system": system, "refusal": str(error)})
    return found


def line(found: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Format the rows of one case."""
    by_system = {row["system"]: row for row in found}
    cells = [
        f"{by_system[name]['hit_percent']:10.1f}"
        if "hit_percent" in by_system.get(name, {})
        else f"{'-':>10}"
        for name in columns
    ]
    row = found[0]
    machine = f"{row['ranks']} {row['gpu']}"
    return f"{row['model']:20} {machine:12} {row['workload']:14}" + "".join(cells)


def header(columns: Sequence[str]) -> str:
    """Format the head of the table."""
    return f"{'model':20} {'GPU':12} {'workload':14}" + "".join(f"{name:>10}" for name in columns)


def save(all_rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write rows, which replace older rows of the same cases, and the table of all rows."""
    from perf.harness.timing import machine_line

    path = folder / "sweep_eviction.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    machine = machine_line()
    new = [row | {"machine": machine} for row in all_rows]
    for row in [*map(json.loads, old), *new]:
        kept[row["model"], row["workload"], row["system"]] = row
    path.write_text("".join(json.dumps(row) + "\n" for row in kept.values()), encoding="utf-8")
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in kept.values():
        cases.setdefault((row["model"], row["workload"]), []).append(row)
    columns = list(dict.fromkeys(row["system"] for row in kept.values()))
    machines = sorted({row["machine"] for row in kept.values()})
    table = ["# Prefix hits by eviction policy", "", *machines, "", "```", header(columns)]
    table += [line(found, columns) for found in cases.values()]
    text = "\n".join([*table, "```", ""])
    (folder / "sweep_eviction.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.sweeps.sweep_eviction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [name for name, _ in CASES]
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, help="models to replay (default: all)"
    )
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="workloads to replay (default: all)"
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=SYSTEMS,
        help="systems to compare (default: all)",
    )
    parser.add_argument(
        "--mooncake", type=Path, metavar="FILE", help="Mooncake's trace, conversation_trace.jsonl"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="write rows and the table to this folder"
    )
    arguments = parser.parse_args()
    known = workloads(arguments.mooncake)
    chosen = arguments.workloads or list(known)
    if unknown := set(chosen) - set(known):
        parser.error(f"--workloads must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    columns = ("unlimited", "best", *arguments.systems)
    print(header(columns), flush=True)
    for name, gpu_name in CASES:
        if name not in arguments.models:
            continue
        one = setting(name, gpu_name)
        for workload in chosen:
            found = rows(one, workload, known[workload], arguments.systems)
            print(line(found, columns), flush=True)
            if arguments.save:
                save(found, arguments.save)


if __name__ == "__main__":
    main()
