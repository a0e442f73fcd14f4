"""Runs read back from rows, thinned to what a figure can show, named by what tells them apart."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jenga.sim.results.rows import Row, RunRow, StepRow, SummaryRow, read_rows

MAX_STEPS = 2048
"""Steps of a run that are kept: more than a figure has pixels for."""

_NAMED_FIELDS = ("model", "gpu", "tp", "kv_format", "trace", "arena_bytes")

_MOST_PARAMETER = 1e18
"""The largest number that a figure is drawn against."""

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(slots=True)
class Run:
    """One replay's rows.

    Attributes:
        row: As it was asked for.
        source: The file it was read from.
        steps: Some of its steps, evenly spread.
        summary: What it came to; None where the replay was cut short.
        label: What tells it from the runs it was read with.
        manager: Its manager, with the eviction order where it was read with another one.
    """

    row: RunRow
    source: str
    steps: list[StepRow] = field(default_factory=list[StepRow])
    summary: SummaryRow | None = None
    label: str = ""
    manager: str = ""
    _stride: int = 1
    _seen: int = 0

    def add_step(self, step: StepRow) -> None:
        """Keep a step, unless it is one too many; steps stay evenly spread."""
        if self._seen % self._stride == 0:
            self.steps.append(step)
            if len(self.steps) > MAX_STEPS:
                del self.steps[1::2]
                self._stride *= 2
        self._seen += 1

    def required_summary(self) -> SummaryRow:
        """Its summary.

        Raises:
            ValueError: The replay was cut short.
        """
        if self.summary is None:
            msg = f"{self.source}: run {self.row.run!r} has no summary: its replay did not end"
            raise ValueError(msg)
        return self.summary

    def parameter(self, name: str) -> float:
        """A number that the run was asked for with.

        Args:
            name: Of an option, or as it stands in the trace's own: "n" of "articles:n=24".

        Raises:
            ValueError: The run has none of this name.
        """
        value = self.row.options.get(name)
        is_flag = isinstance(value, bool)
        if isinstance(value, int | float) and not is_flag and abs(value) <= _MOST_PARAMETER:
            return float(value)
        found = re.search(rf"(?:^|[:,]){re.escape(name)}=({_NUMBER.pattern})", self.row.trace)
        if found is None or not float(found[1]) <= _MOST_PARAMETER:
            msg = (
                f"{self.source}: run {self.row.run!r} must have a number {name!r} among its "
                f"options or in its trace, got {self.row.trace!r}"
            )
            raise ValueError(msg)
        return float(found[1])


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Every run of some files, in their order, each with a label of its own.

    Raises:
        ValueError: A row that cannot be read, rows of a run that no row begins, or no run at all.
        OSError: A file that cannot be read.
    """
    runs = [run for path in paths for run in _file_runs(path)]
    if not runs:
        msg = f"rows must hold at least one run, got none in {', '.join(map(str, paths))}"
        raise ValueError(msg)
    for run in runs:
        name = run.row.manager
        orders = {each.row.eviction for each in runs if each.row.manager == name}
        run.manager = f"{name} {run.row.eviction}".strip() if len(orders) > 1 else name
    for run, label in zip(runs, _labels(runs), strict=True):
        run.label = label
    return runs


def _file_runs(path: Path) -> Iterator[Run]:
    runs: dict[str, Run] = {}
    for row in read_rows(path):
        _add(runs, row, str(path))
    yield from runs.values()


def _add(runs: dict[str, Run], row: Row, source: str) -> None:
    if isinstance(row, RunRow):
        runs[row.run] = Run(row=row, source=source)
        return
    run = runs.get(row.run)
    if run is None:
        msg = f"{source}: a row of run {row.run!r} comes before the row that begins it"
        raise ValueError(msg)
    if isinstance(row, StepRow):
        run.add_step(row)
    elif isinstance(row, SummaryRow):
        run.summary = row


def _labels(runs: Sequence[Run]) -> list[str]:
    """What differs between runs, and their number where nothing does."""
    differing = [
        name for name in _NAMED_FIELDS if len({getattr(run.row, name) for run in runs}) > 1
    ]
    options = sorted(
        {
            name
            for run in runs
            for name in run.row.options
            if len({repr(each.row.options.get(name)) for each in runs}) > 1
        }
    )
    several_managers = len({run.manager for run in runs}) > 1
    labels = [
        " ".join(
            [
                *([run.manager] if several_managers else []),
                *(_words(name, getattr(run.row, name)) for name in differing),
                *(f"{name}={run.row.options[name]}" for name in options if name in run.row.options),
            ]
        ).strip()
        for run in runs
    ]
    labels = [label or run.manager for label, run in zip(labels, runs, strict=True)]
    return [
        f"{label} ({index + 1})" if labels.count(label) > 1 else label
        for index, label in enumerate(labels)
    ]


def _words(name: str, value: object) -> str:
    match name:
        case "arena_bytes" if isinstance(value, int):
            return f"{value / 1e9:.4g} GB"
        case "tp":
            return f"tp={value}"
        case _:
            return str(value)


def of_each(values: Iterable[str]) -> list[str]:
    """Values without repetitions, in the order of their first."""
    return list(dict.fromkeys(values))
