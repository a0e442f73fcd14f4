"""Runs read back from rows, thinned for figures, with labels that tell them apart."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jenga.sim.results.rows import Row, RunRow, StepRow, SummaryRow, read_rows

MAX_STEPS = 2048
"""Most steps of a run that are kept. A figure has fewer pixels."""

_NAMED_FIELDS = ("model", "gpu", "tp", "kv_format", "trace", "arena_bytes")

_MOST_PARAMETER = 1e18
"""Largest number of a parameter on the axis of a figure."""

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(slots=True)
class Run:
    """The rows of one replay.

    Attributes:
        row: First row of the run, with the settings of the replay.
        source: File from which it was read.
        steps: Some of its steps, at even distances.
        summary: Its summary. None if the replay did not end.
        label: Text that tells it from the other runs that were read.
        manager: Its manager. The name of its eviction policy is added if the runs of this manager
            have several.
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
        """Keep a step if its turn comes. If there are too many, every second one is dropped."""
        if self._seen % self._stride == 0:
            self.steps.append(step)
            if len(self.steps) > MAX_STEPS:
                del self.steps[1::2]
                self._stride *= 2
        self._seen += 1

    def required_summary(self) -> SummaryRow:
        """Return its summary.

        Raises:
            ValueError: The replay did not end.
        """
        if self.summary is None:
            msg = f"{self.source}: run {self.row.run!r} has no summary: its replay did not end"
            raise ValueError(msg)
        return self.summary

    def parameter(self, name: str) -> float:
        """Return a number from the settings of the run.

        Args:
            name: Name of an option, or of an argument of the trace: "n" of "articles:n=24".

        Raises:
            ValueError: The run has no number with this name.
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
    """Read all runs of some files, in their order, and give each a label of its own.

    Raises:
        ValueError: A row cannot be read, comes before the first row of its run, or there is no run.
        OSError: A file cannot be read.
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
    """Return labels of the differences between runs, with a number if there are none."""
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
    """Return values without repetitions, in the order of their first occurrence."""
    return list(dict.fromkeys(values))
