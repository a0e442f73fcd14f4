"""Table of the suite's rows: losses first, then capacities, then means by workload and load."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from math import log
from pathlib import Path
from statistics import fmean, geometric_mean

from perf.serving.cases import LIMITS, LOADS, ORACLE, OURS, STOCK, UNLIMITED
from perf.serving.results import (
    LEAST_RATIO,
    MOST_PREEMPTED_SHARE,
    MOST_TTFT_RATIO,
    Group,
    Pair,
    Results,
)
from perf.serving.rows import CAPACITY, Row
from perf.serving.suite import FAILED

BOUND_GAIN = 1.1
"""Least ratio of the oracle's capacity to stock's at which a group counts as one with room to gain.
"""

HITS_LOAD = 75
"""Load, in percent, at which our hits are compared with the oracle's."""

AGENTS = "agents"

_RATIOS = {
    "requests_per_s": "requests/s",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "longest_wait_s": "longest wait",
    "tpot_p50_s": "TPOT p50",
    "tpot_p99_s": "TPOT p99",
}
"""Metrics shown as ratios to stock's best -> their names in the table."""


def read_causes(path: Path | None) -> dict[str, str]:
    """Read the causes of losses, by `Loss.name`, from a JSON object.

    Without a file there are none.
    """
    if path is None or not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def as_markdown(rows: Iterable[Row], *, system: str = OURS, causes: dict[str, str]) -> str:
    """Make the table.

    Args:
        rows: Rows with the same scheduling.
        system: Name of our system that is compared with stock.
        causes: `Loss.name` -> cause of the loss.
    """
    rows = list(rows)
    results = Results(rows, system=system)
    sections = [
        _head(rows, results),
        _goals(results),
        _losses(results, causes),
        *(_capacities(results, limit) for limit in LIMITS),
        _by_load(results),
        _systems(rows, results),
        _settings(rows),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _head(rows: Sequence[Row], results: Results) -> str:
    versions = sorted({f"jenga {row['commit']}, vLLM {row['vllm']}" for row in rows})
    num_cells = sum(map(len, results.capacities.values()))
    return f"""# Serving in time

`{results.system}` beside vLLM's own manager in its best setting, on made-up requests that arrive
over time. All seconds are a roofline's. Scheduling is {_scheduling(rows)}.
{num_cells} cells (model, arena, workload, seed), {len(rows)} rows; {"; ".join(versions)}.

* A capacity is the highest rate of arrivals at which TTFT p99 stays within {LIMITS[0]} times that
  of the longest prompt alone, on a grid of 2.9 %. Of stock it is that of its best setting.
* A load is a share of that capacity of stock. There each number of stock is that of the setting
  that is best in this number.
* The first quarter of the arrivals only warms the cache up and does not count, unless said so.
* `{ORACLE}` is ours with a policy that knows the trace, `{UNLIMITED}` ours with memory without end.
  `x0.25` is a quarter of the arena."""


def _scheduling(rows: Sequence[Row]) -> str:
    return " and ".join(sorted({row["scheduling"] for row in rows})) or "unknown"


def _goals(results: Results) -> str:
    """Format the numbers that the suite should show, with their goals."""
    gains: dict[Group, float] = {}
    bound: dict[Group, float] = {}
    beside: dict[Group, float] = {}  # our gains in the seeds that have a bound
    for group in results.capacities:
        if ours := results.gains(group, LIMITS[0]):
            gains[group] = geometric_mean(ours)
            ours = results.gains(group, LIMITS[0], beside=ORACLE)
            if (oracle := results.gains(group, LIMITS[0], ORACLE)) and ours:
                bound[group], beside[group] = geometric_mean(oracle), geometric_mean(ours)
    agents = [each for each in gains if each.workload == AGENTS and each.is_hybrid]
    gaining = [each for each in bound if bound[each] >= BOUND_GAIN]
    hybrids = [each for each in gaining if each.is_hybrid]
    most = sum(log(bound[each]) for each in gaining)
    hits = [
        pair.ours["hit_percent"] / pair.others[ORACLE]["hit_percent"]
        for (_, load), pairs in results.pairs.items()
        for pair in pairs
        if load == HITS_LOAD and ORACLE in pair.others and pair.others[ORACLE]["hit_percent"]
    ]
    share = sum(log(beside[each]) for each in gaining) / most if gaining else None
    oracle_hits = f"hits over the oracle's at {HITS_LOAD} % load"
    rows = [
        ("capacity over stock's best, least", 1.0, min(gains.values(), default=None), len(gains)),
        ("same, hybrids with agents", 2.0, _mean(gains[each] for each in agents), len(agents)),
        (
            f"same, hybrids where the oracle gains {BOUND_GAIN}",
            1.6,
            _mean(beside[each] for each in hybrids),
            len(hybrids),
        ),
        ("of what the oracle gains there, in logarithms", 0.7, share, len(gaining)),
        (f"{oracle_hits}, mean", 0.8, fmean(hits) if hits else None, len(hits)),
        (f"{oracle_hits}, least", 0.8, min(hits, default=None), len(hits)),
    ]
    counts = [
        ("numbers behind stock's best", 0, len(results.losses), len(results.pairs)),
        ("replays that failed", 0, len(results.failed), ""),
    ]
    shown = [(name, goal, _text(number), count) for name, goal, number, count in rows]
    return "## Goals\n\n" + _grid(("number", "goal", "is", "cells"), [*shown, *counts])


def _mean(numbers: Iterable[float]) -> float | None:
    """Return the geometric mean; None without numbers."""
    found = list(numbers)
    return geometric_mean(found) if found else None


def _text(number: float | None, digits: int = 2) -> str:
    return "-" if number is None else f"{number:.{digits}f}"


def _losses(results: Results, causes: dict[str, str]) -> str:
    text = f"""## Behind stock's best

Capacities, hits and requests a second below {LEAST_RATIO} of stock's best, TTFT p99 above
{MOST_TTFT_RATIO}, preemptions above by more than {MOST_PREEMPTED_SHARE:.0%} of requests; means over
seeds, the worst first.

"""
    failed = [
        f"* failed: {row['model']} x{row['budget']:g} {row['workload']} seed {row['seed']} "
        f"{row['system']} at {row['rate']:g} a second: {row[FAILED]}\n"
        for row in results.failed
    ]
    text += "".join([*failed, "\n"] if failed else [])
    columns = ("model", "arena", "workload", "load", "number", "ours", "stock's best", "ratio")
    rows = [
        (
            loss.group.model,
            f"x{loss.group.budget:g}",
            loss.group.workload,
            f"{loss.load} %" if loss.load else "capacity",
            loss.number,
            f"{loss.ours:.4g}",
            f"{loss.stock:.4g}",
            _text(loss.ratio, 3),
            _text(loss.worst, 3),
            loss.seeds,
            loss.setting,
            causes.get(loss.name, ""),
        )
        for loss in results.losses
    ]
    more = ("worst seed", "seeds", "setting", "cause")
    return text + (_grid((*columns, *more), rows) if rows else "None.")


def _capacities(results: Results, limit: int) -> str:
    """Format capacities over stock's best, by model and arena (rows) and workload (columns)."""
    groups = list(results.capacities)
    if not groups:
        return ""
    workloads = list(dict.fromkeys(group.workload for group in groups))
    rows: list[list[str]] = []
    for model, budget in sorted({(group.model, group.budget) for group in groups}):
        of_model = [Group(model, budget, workload) for workload in workloads]
        texts = [_mark(results, each, limit) + _gains(results, [each], limit) for each in of_model]
        rows.append([f"{model} x{budget:g}", *texts, _gains(results, of_model, limit)])
    by_workload = [
        _gains(results, [group for group in groups if group.workload == workload], limit)
        for workload in workloads
    ]
    rows.append(["all", *by_workload, _gains(results, groups, limit)])
    return f"""## Capacity over stock's best, within {limit} times

Ours / the oracle's, geometric means over the seeds of each. `>`: no rate that was
tried is too high for ours; `=`: nor for stock.

""" + _grid(("", *workloads, "all"), rows)


def _mark(results: Results, group: Group, limit: int) -> str:
    """Return a mark if no tried rate was too high for our system, or for both."""
    for capacities in results.capacities.get(group, ()):
        ours, stock = capacities.get((results.system, limit)), capacities.get((STOCK, limit))
        if ours is not None and stock is not None and not ours["is_bounded"]:
            return ">" if stock["is_bounded"] else "="
    return ""


def _gains(results: Results, groups: Sequence[Group], limit: int) -> str:
    there = [group for group in groups if group in results.capacities]
    ours, oracle = (
        _text(_mean(gain for group in there for gain in results.gains(group, limit, name)))
        for name in (None, ORACLE)
    )
    return f"{ours} / {oracle}" if there else ""


def _by_load(results: Results) -> str:
    """Format means by workload and load."""
    if not results.pairs:
        return ""
    rows: list[list[str]] = []
    for workload in [*dict.fromkeys(group.workload for group, _ in results.pairs), "all"]:
        for load in LOADS:
            groups = [
                group
                for group, of in results.pairs
                if of == load and workload in (group.workload, "all")
            ]
            pairs = [pair for group in groups for pair in results.pairs[group, load]]
            if pairs:
                rows.append([workload, f"{load} %", *_load_columns(pairs), str(len(pairs))])
    columns = ("workload", "load", "hits", "stock", ORACLE, UNLIMITED, *_RATIOS.values())
    sides = ("preempted", "stock", "waste", "stock", "CPU s", "stock", "cells")
    return """## At shares of stock's capacity

Hits and waste in percent, and preemptions of a hundred requests, are means; times and requests a
second are ratios to stock's best, geometric means. A longest wait is for a first token.

""" + _grid((*columns, *sides), rows)


def _load_columns(pairs: Sequence[Pair]) -> list[str]:
    ours = [pair.ours for pair in pairs]
    stock = [pair.best("hit_percent") for pair in pairs]
    preempted = [pair.best("preemptions") for pair in pairs]
    others = [
        [pair.others[name] for pair in pairs if name in pair.others] for name in (ORACLE, UNLIMITED)
    ]
    hits = [_average(rows, "hit_percent") for rows in (ours, stock, *others)]
    ratios = [_mean(pair.ratio(number) for pair in pairs) for number in _RATIOS]
    return [
        *(_text(each, 1) for each in hits),
        *map(_text, ratios),
        *(_text(_preempted(rows), 1) for rows in (ours, preempted)),
        *(_text(_average(rows, "waste_percent"), 1) for rows in (ours, stock)),
        *(_text(_average(rows, "cpu_s"), 1) for rows in (ours, stock)),
    ]


def _average(rows: Iterable[Row], name: str) -> float | None:
    found = [row[name] for row in rows if row[name] is not None]
    return fmean(found) if found else None


def _preempted(rows: Iterable[Row]) -> float:
    return fmean(100 * row["preemptions"] / max(1, row["num_requests"]) for row in rows)


def _systems(rows: Sequence[Row], results: Results) -> str:
    """Format every system of ours relative to stock's best."""
    names = dict.fromkeys(
        row["system"] for row in rows if row["kind"] == CAPACITY and row["system"] != STOCK
    )
    lines: list[list[str]] = []
    for name in names:
        gains = [
            [gain for group in results.capacities for gain in results.gains(group, limit, name)]
            for limit in LIMITS
        ]
        pairs = [pair for some in results.pairs.values() for pair in some if name in pair.others]
        ratios = [
            _text(_mean(pair.ratio(number, pair.others[name]) for pair in pairs))
            for number in ("hit_percent", *_RATIOS)
        ]
        lines.append([name, *(_text(_mean(each)) for each in gains), *ratios, str(len(gains[0]))])
    limits = (f"within {limit} times" for limit in LIMITS)
    columns = ("system", *limits, "hits", *_RATIOS.values(), "cells")
    return (
        f"""## All systems

Capacities, and numbers at all loads, over stock's best; geometric means over cells.

{_grid(columns, lines)}"""
        if lines
        else ""
    )


def _settings(rows: Sequence[Row]) -> str:
    """Count the capacities for which each setting of stock is the best."""
    best = Counter(
        row["best"]
        for row in rows
        if row["kind"] == CAPACITY and row["system"] == STOCK and row["best"]
    )
    columns = ("setting", "best for so many capacities")
    return f"## Stock's settings\n\n{_grid(columns, best.most_common())}" if best else ""
