"""Replay workloads without host memory, with as much as the arena, and with more.

    python -m perf.sweeps.sweep_host_memory [--models ...] [--workloads ...] [--times ...]
        [--mooncake FILE] [--save FOLDER]

The first line of a case has the percentage of prompt tokens that were found cached at the first
admission. The line below has the seconds of the replay, which come from a roofline. Bytes are
copied to host memory and back at 25 GB per second. Copies that are made ahead overlap with a step,
and all others run while nothing else does. Models, machines and workloads are those of
`perf.sweeps.sweep_eviction`. `unlimited` is a cache of unlimited size.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jenga.sim.arenas.by_name import make_arena
from jenga.sim.batching.step_time import HOST_BYTES_PER_S, HostedTime, StepTime, weights_of
from jenga.sim.replays.bounds import unlimited
from jenga.sim.replays.replay import Replay
from perf.sweeps.sweep_eviction import CASES, Requests, Setting, setting, workloads

TIMES = (0, 1, 4)
"""Sizes of host memory, as multiples of the arena."""


def replay(one: Setting, requests: Requests, times: int) -> dict[str, Any]:
    """Replay requests with our manager and host memory of `times` times the arena."""
    clock = StepTime(one.model, weights_of(one.facts, ranks=one.ranks), one.gpu)
    arena = make_arena(
        "jenga",
        one.model,
        one.arena_bytes,
        step_tokens=clock.step_tokens,
        host_bytes=times * one.arena_bytes,
    )
    run = Replay(requests(), arena, clock=HostedTime(clock, arena, HOST_BYTES_PER_S))
    start = time.process_time()
    for _ in run:
        pass
    moved = arena.moved_bytes
    return {
        "hit_percent": round(100 * run.hit_tokens / run.prompt_tokens, 2),
        "modelled_s": round(run.time_s, 1),
        "waited_s": round((moved.stored - moved.ahead + moved.loaded) / HOST_BYTES_PER_S, 1),
        "stored_bytes": moved.stored,
        "ahead_bytes": moved.ahead,
        "loaded_bytes": moved.loaded,
        "steps": run.num_steps,
        "refused": run.num_refused,
        "cpu_s": round(time.process_time() - start, 1),
    }


def rows(
    one: Setting, workload: str, requests: Requests, all_times: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each size of host memory on a workload. Each row has the bound too."""
    case = {
        "model": one.facts.name,
        "gpu": one.gpu.name,
        "ranks": one.ranks,
        "arena_bytes": one.arena_bytes,
        "workload": workload,
        "unlimited_percent": round(100 * unlimited(requests()).hit_rate, 2),
    }
    return [case | {"times": times} | replay(one, requests, times) for times in all_times]


def lines(found: Sequence[dict[str, Any]], all_times: Sequence[int]) -> list[str]:
    """Format the rows of one case."""
    by_times = {row["times"]: row for row in found}
    row = found[0]
    machine = f"{row['ranks']} {row['gpu']}"
    chosen = [by_times.get(times) for times in all_times]
    hits = [f"{each['hit_percent']:12.1f}" if each else f"{'-':>12}" for each in chosen]
    seconds = [
        f"{each['modelled_s']:9,.0f} s " if each is not None else f"{'':>12}" for each in chosen
    ]
    return [
        f"{row['model']:20} {machine:12} {row['workload']:14}"
        f"{row['unlimited_percent']:10.1f}" + "".join(hits),
        f"{'':59}" + "".join(seconds).rstrip(),
    ]


def header(all_times: Sequence[int]) -> str:
    """Format the head of the table."""
    names = ["none" if not times else f"{times} x arena" for times in all_times]
    return f"{'model':20} {'GPU':12} {'workload':14}{'unlimited':>10}" + "".join(
        f"{name:>12}" for name in names
    )


def save(all_rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write rows, which replace older rows of the same cases, and the table of all rows."""
    from perf.harness.timing import machine_line

    path = folder / "sweep_host_memory.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    machine = machine_line()
    for row in [*map(json.loads, old), *(row | {"machine": machine} for row in all_rows)]:
        kept[row["model"], row["workload"], row["times"]] = row
    path.write_text("".join(json.dumps(row) + "\n" for row in kept.values()), encoding="utf-8")
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in kept.values():
        cases.setdefault((row["model"], row["workload"]), []).append(row)
    all_times = sorted({row["times"] for row in kept.values()})
    machines = sorted({row["machine"] for row in kept.values()})
    table = ["# Prefix hits with host memory", "", *machines, ""]
    table += ["Percent of prompt tokens, and modelled seconds; command and meaning in the script."]
    table += ["", "```", header(all_times)]
    table += [text for found in cases.values() for text in lines(found, all_times)]
    text = "\n".join([*table, "```", ""])
    (folder / "sweep_host_memory.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.sweeps.sweep_host_memory",
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
        "--times",
        nargs="+",
        type=int,
        default=TIMES,
        metavar="N",
        help="sizes of host memory, in multiples of the arena",
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
    print(header(arguments.times), flush=True)
    for name, gpu_name in CASES:
        if name not in arguments.models:
            continue
        one = setting(name, gpu_name)
        for workload in chosen:
            found = rows(one, workload, known[workload], arguments.times)
            print("\n".join(lines(found, arguments.times)), flush=True)
            if arguments.save:
                save(found, arguments.save)


if __name__ == "__main__":
    main()
