"""Results of the suite: gains and losses against stock's best setting."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, geometric_mean

from jenga.spec import FullAttention
from perf.serving.cases import LIMITS, LOADS, OURS, STOCK, is_stock, machine
from perf.serving.rows import CAPACITY, LOAD, Row, by_cell
from perf.serving.suite import FAILED, rate_of_load

LEAST_RATIO = 0.99
"""Least ratio of our hits, requests per second and capacity to stock's best. Less is a loss."""

MOST_TTFT_RATIO = 1.05
"""Largest ratio of our TTFT p99 to stock's best. More is a loss."""

MOST_PREEMPTED_SHARE = 0.02
"""Largest excess of our preemptions over stock's best, as a share of requests. More is a loss."""

HITS_OFFSET_PERCENT = 1.0
"""Percentage points added to both hit rates before their ratio is taken, since hits may be 0."""

LEAST_S = 1e-3
"""Seconds added to both times, and also to both rates of requests, before their ratio is taken.

Times well below it count as equal.
"""


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Cells that differ only in their seed."""

    model: str
    budget: float
    workload: str

    @property
    def text(self) -> str:
        """Text that names the group."""
        return f"{self.model} x{self.budget:g} {self.workload}"

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has other layers in addition to full attention."""
        return any(
            not isinstance(each, FullAttention) for each in machine(self.model).model.layer_types
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A metric in which our system falls behind stock's best setting.

    Attributes:
        group: The cells.
        load: Load in percent of stock's capacity. 0 means that the metric is the capacity itself.
        number: Name of the metric.
        ours: Mean of our values over seeds.
        stock: Mean of stock's values over seeds. For each seed it is the best setting in this
            metric.
        ratio: Geometric mean over seeds of ours / stock's. For preemptions it is the mean
            difference as a share of requests.
        worst: Ratio or difference of the worst seed.
        setting: Setting of stock that is best in most seeds.
        seeds: Number of seeds.
    """

    group: Group
    load: int
    number: str
    ours: float
    stock: float
    ratio: float
    worst: float
    setting: str
    seeds: int

    @property
    def name(self) -> str:
        """Name of the loss in a file of causes."""
        at = f"{self.load}" if self.load else "capacity"
        return f"{self.group.text} {at} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Replays of a cell at one load.

    Attributes:
        ours: Row of our system.
        stock: Rows of stock, one for each setting.
        others: Name of a system -> its row, for all systems.
    """

    ours: Row
    stock: Sequence[Row]
    others: dict[str, Row]

    def best(self, number: str) -> Row:
        """Return stock's best row in a metric: highest hits or requests per second, else lowest."""
        choose = max if number in ("hit_percent", "requests_per_s") else min
        return choose(self.stock, key=lambda row: row[number])

    def ratio(self, number: str, row: Row | None = None) -> float:
        """Return the ratio of our row, or another one, to stock's best in a metric."""
        return _ratio(number, row or self.ours, self.best(number))


def _ratio(number: str, row: Row, to: Row) -> float:
    offset = HITS_OFFSET_PERCENT if number == "hit_percent" else LEAST_S
    return (row[number] + offset) / (to[number] + offset)


Capacities = dict[tuple[str, int], Row]
"""(system, limit) -> row of the capacity."""


class Results:
    """Rows, sorted for the table.

    Attributes:
        system: Name of our system that is compared with stock.
        capacities: Group -> capacities of each seed.
        pairs: Group and load -> replays of each seed.
        failed: Rows of replays that failed.
    """

    def __init__(self, rows: Iterable[Row], *, system: str = OURS) -> None:
        """Sort the rows.

        Args:
            rows: Rows with the same scheduling. Cells without a capacity of stock are left out.
            system: Name of our system that is compared with stock.
        """
        rows = list(rows)
        self.system = system
        self.capacities: dict[Group, list[Capacities]] = {}
        self.pairs: dict[tuple[Group, int], list[Pair]] = {}
        self.failed = [
            row for row in rows if FAILED in row and not _is_refusal(row) and _counts(row, system)
        ]
        for cell, found in by_cell(rows).items():
            group = Group(cell.model, cell.budget, cell.workload)
            capacities = {
                (row["system"], row["limit"]): row for row in found if row["kind"] == CAPACITY
            }
            stock = capacities.get((STOCK, max(LIMITS)))
            if stock is None:
                continue
            self.capacities.setdefault(group, []).append(capacities)
            replays = [row for row in found if row["kind"] == LOAD and FAILED not in row]
            for load in LOADS:
                rate = rate_of_load(stock, load)
                others = {row["system"]: row for row in replays if row["rate"] == rate}
                of_stock = [row for row in others.values() if is_stock(row["system"])]
                if of_stock and system in others:
                    pair = Pair(ours=others[system], stock=of_stock, others=others)
                    self.pairs.setdefault((group, load), []).append(pair)

    def gains(
        self, group: Group, limit: int, system: str | None = None, *, beside: str | None = None
    ) -> list[float]:
        """Return a system's capacities divided by stock's best, for each seed that has both.

        Args:
            group: The cells.
            limit: TTFT p99 that a capacity allows, as a multiple.
            system: Name of the system. None means the compared one.
            beside: Name of a system. Seeds in which it has no capacity are left out.
        """
        name = system or self.system
        found: list[float] = []
        for capacities in self.capacities[group]:
            stock, other = capacities.get((STOCK, limit)), capacities.get((name, limit))
            if beside is not None and (beside, limit) not in capacities:
                continue
            if stock is not None and other is not None and stock["rate"] and other["rate"]:
                found.append(other["rate"] / stock["rate"])
        return found

    @cached_property
    def losses(self) -> list[Loss]:
        """Metrics in which our system falls behind stock's best, worst first."""
        found = [*self._lost_capacities(), *self._lost_at_loads()]
        return sorted(found, key=_severity)

    def _lost_capacities(self) -> Iterable[Loss]:
        for group, seeds in self.capacities.items():
            for limit in LIMITS:
                ratios = self.gains(group, limit)
                if not ratios or geometric_mean(ratios) >= LEAST_RATIO:
                    continue
                both = [
                    (each[self.system, limit], each[STOCK, limit])
                    for each in seeds
                    if (self.system, limit) in each and (STOCK, limit) in each
                ]
                yield Loss(
                    group=group,
                    load=0,
                    number=f"rate within {limit} times",
                    ours=fmean(ours["rate"] for ours, _ in both),
                    stock=fmean(stock["rate"] for _, stock in both),
                    ratio=geometric_mean(ratios),
                    worst=min(ratios),
                    setting=_most(stock["best"] for _, stock in both),
                    seeds=len(ratios),
                )

    def _lost_at_loads(self) -> Iterable[Loss]:
        for (group, load), pairs in self.pairs.items():
            for number in ("hit_percent", "requests_per_s", "ttft_p99_s"):
                is_time = number == "ttft_p99_s"
                ratios = [pair.ratio(number) for pair in pairs]
                ratio = geometric_mean(ratios)
                if ratio <= MOST_TTFT_RATIO if is_time else ratio >= LEAST_RATIO:
                    continue
                worst = max(ratios) if is_time else min(ratios)
                yield _loss(group, load, number, pairs, ratio, worst)
            shares = [
                (pair.ours["preemptions"] - pair.best("preemptions")["preemptions"])
                / max(1, pair.ours["num_requests"])
                for pair in pairs
            ]
            if fmean(shares) > MOST_PREEMPTED_SHARE:
                yield _loss(group, load, "preemptions", pairs, fmean(shares), max(shares))


def _counts(row: Row, system: str) -> bool:
    """Whether a failed row belongs to the compared system or to stock."""
    return row["system"] == system or is_stock(row["system"])


def _is_refusal(row: Row) -> bool:
    """Whether a row failed because stock refuses the model in a setting."""
    return is_stock(row["system"]) and row[FAILED].startswith("ValueError")


def _loss(
    group: Group, load: int, number: str, pairs: Sequence[Pair], ratio: float, worst: float
) -> Loss:
    return Loss(
        group=group,
        load=load,
        number=number,
        ours=fmean(pair.ours[number] for pair in pairs),
        stock=fmean(pair.best(number)[number] for pair in pairs),
        ratio=ratio,
        worst=worst,
        setting=_most(pair.best(number)["system"] for pair in pairs),
        seeds=len(pairs),
    )


def _most(names: Iterable[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def _severity(loss: Loss) -> float:
    """Return a sort key that is smaller for worse losses."""
    if loss.number == "preemptions":
        return 1 - loss.ratio
    return 1 / loss.ratio if loss.number == "ttft_p99_s" else loss.ratio
