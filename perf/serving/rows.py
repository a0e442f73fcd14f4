"""Rows of the suite: one JSON object a line, added as they come, the last of a kind counts."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf.serving.cases import Cell

Row = dict[str, Any]

CAPACITY, PROBE, LOAD, BOUNDS = "capacity", "probe", "load", "bounds"
"""Kinds of rows: the highest rate; a replay on the way to it; one at a share of it; bounds."""

_KEYS = {
    CAPACITY: ("system", "limit"),
    PROBE: ("system", "rate"),
    LOAD: ("system", "rate"),
    BOUNDS: (),
}
"""What names a row, by its kind, besides its cell, how steps are scheduled and what counts."""


def key_of(row: Row) -> tuple[object, ...]:
    """What names a row."""
    names = ("kind", *_CELL, *_SETUP, *_KEYS[row["kind"]])
    return tuple(row[name] for name in names)


_CELL = ("model", "budget", "workload", "seed")
_SETUP = ("scheduling", "warm_up_share")


def cell_of(row: Row) -> Cell:
    """The cell of a row."""
    return Cell(*(row[name] for name in _CELL))


class RowFile:
    """Rows of one cell, and the file to which those that are missing are added."""

    def __init__(self, cell: Cell, rows: Iterable[Row], path: Path, common: Row) -> None:
        """Take the rows that are there.

        Args:
            cell: The cell.
            rows: Its rows.
            path: Of the file.
            common: What all rows have that are added.
        """
        self._common = asdict(cell) | common
        self._path = path
        self._rows = {key_of(row): row for row in rows}

    def find(self, kind: str, **names: object) -> Row | None:
        """The row of a kind with such names, if it is there."""
        return self._rows.get(key_of({"kind": kind, **self._common, **names}))

    def add(self, kind: str, row: Row) -> Row:
        """Add a row to the file."""
        whole = {"kind": kind, **self._common, **row}
        self._rows[key_of(whole)] = whole
        append(self._path, whole)
        return whole


def append(path: Path, row: Row) -> None:
    """Add a row to a file in one write, so that several processes may add to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(row) + "\n").encode())
    finally:
        os.close(file)


def read(paths: Sequence[Path]) -> list[Row]:
    """Rows of files; of those with one name the last one.

    Raises:
        ValueError: A line is not a row; file and line are named. The last line of a file may be cut
            short, as a process that is killed leaves it.
    """
    found: dict[tuple[object, ...], Row] = {}
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                continue
            try:
                row = json.loads(line)
                found[key_of(row)] = row
            except (ValueError, KeyError, TypeError) as error:
                msg = f"{path}:{number}: must be a row of perf.serving, got {line.strip()[:60]!r}"
                raise ValueError(msg) from error
    return list(found.values())


def by_cell(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    """Rows by their cells."""
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        found.setdefault(cell_of(row), []).append(row)
    return found
