"""What the rows of the suite come to: gains and losses against stock's best."""

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
"""Of our hits, requests a second and capacity to those of stock's best setting: less is a loss."""

MOST_TTFT_RATIO = 1.05
"""Of our TTFT p99 to that of stock's best setting: more is a loss."""

MOST_PREEMPTED_SHARE = 0.02
"""Of requests, by which our preemptions may be above those of stock's best setting."""

HITS_OFFSET_PERCENT = 1.0
"""Added to hits before their ratio is taken, since some cells have none."""

LEAST_S = 1e-3
"""Seconds below which two times are alike."""


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Cells that differ in their seed alone."""

    model: str
    budget: float
    workload: str

    @property
    def text(self) -> str:
        """The group in words."""
        return f"{self.model} x{self.budget:g} {self.workload}"

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has layers besides full attention."""
        return any(
            not isinstance(each, FullAttention) for each in machine(self.model).model.layer_types
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A number of ours that falls behind stock's best.

    Attributes:
        group: The cells.
        load: In percent of stock's capacity; 0 of the capacity itself.
        number: What falls behind.
        ours: Mean over seeds.
        stock: Likewise, each of the setting of stock that is best for this number.
        ratio: Geometric mean over seeds; of preemptions the difference in requests.
        worst: The worst of the seeds.
        setting: Of stock, best in most seeds.
        seeds: How many there are.
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
        """What names the loss in a file of causes."""
        at = f"{self.load}" if self.load else "capacity"
        return f"{self.group.text} {at} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A cell at one load.

    Attributes:
        ours: The row of the system that is compared.
        stock: Rows of stock, one for each setting.
        others: Rows of all systems, by name.
    """

    ours: Row
    stock: Sequence[Row]
    others: dict[str, Row]

    def best(self, number: str) -> Row:
        """The row of stock that is best in a number: of hits and rates the most, else the least."""
        choose = max if number in ("hit_percent", "requests_per_s") else min
        return choose(self.stock, key=lambda row: row[number])

    def ratio(self, number: str, row: Row | None = None) -> float:
        """Ours, or another row's, to stock's best."""
        return _ratio(number, row or self.ours, self.best(number))


def _ratio(number: str, row: Row, to: Row) -> float:
    offset = HITS_OFFSET_PERCENT if number == "hit_percent" else LEAST_S
    return (row[number] + offset) / (to[number] + offset)


Capacities = dict[tuple[str, int], Row]
"""(system, limit) -> its row."""


class Results:
    """Rows, sorted for the table.

    Attributes:
        system: Ours, which is compared.
        capacities: Of each group, those of its seeds.
        pairs: Of each group and load, those of its seeds.
        failed: Rows of replays that failed.
    """

    def __init__(self, rows: Iterable[Row], *, system: str = OURS) -> None:
        """Sort the rows.

        Args:
            rows: Scheduled alike; cells whose rows are not complete are left out.
            system: To compare.
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

    def gains(self, group: Group, limit: int, system: str | None = None) -> list[float]:
        """Capacities of a system over those of stock's best setting, for each seed of both."""
        name = system or self.system
        found: list[float] = []
        for capacities in self.capacities[group]:
            stock, other = capacities.get((STOCK, limit)), capacities.get((name, limit))
            if stock is not None and other is not None and stock["rate"] and other["rate"]:
                found.append(other["rate"] / stock["rate"])
        return found

    @cached_property
    def losses(self) -> list[Loss]:
        """Numbers of ours that fall behind stock's best, the worst first."""
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
    """Whether a failure of a row is one of what is compared."""
    return row["system"] == system or is_stock(row["system"])


def _is_refusal(row: Row) -> bool:
    """Whether stock refuses a model in a setting."""
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
    """Smaller of worse losses."""
    if loss.number == "preemptions":
        return 1 - loss.ratio
    return 1 / loss.ratio if loss.number == "ttft_p99_s" else loss.ratio
