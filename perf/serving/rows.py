"""Rows of the suite, one JSON object per line.

If two rows have the same key, the later one counts.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf.serving.cases import Cell

Row = dict[str, Any]

CAPACITY, PROBE, LOAD, BOUNDS = "capacity", "probe", "load", "bounds"
"""Kinds of rows.

- A capacity is the highest rate within a limit.
- A probe is a replay in the search for a capacity.
- A load is a replay at a share of stock's capacity.
- Bounds are numbers of a cell that hardly depend on the rate.
"""

_KEYS = {
    CAPACITY: ("system", "limit"),
    PROBE: ("system", "rate"),
    LOAD: ("system", "rate"),
    BOUNDS: (),
}
"""Kind of a row -> fields of its key.

Further fields of the key are the kind, the cell, the scheduling, and the share of the warm-up.
"""


def key_of(row: Row) -> tuple[object, ...]:
    """Return the key of a row: the values that identify it."""
    names = ("kind", *_CELL, *_SETUP, *_KEYS[row["kind"]])
    return tuple(row[name] for name in names)


_CELL = ("model", "budget", "workload", "seed")
_SETUP = ("scheduling", "warm_up_share")


def cell_of(row: Row) -> Cell:
    """Return the cell of a row."""
    return Cell(*(row[name] for name in _CELL))


class RowFile:
    """Rows of one cell, and the file to which missing rows are appended."""

    def __init__(self, cell: Cell, rows: Iterable[Row], path: Path, common: Row) -> None:
        """Start with the rows that were measured before.

        Args:
            cell: The cell.
            rows: Rows of the cell.
            path: File that new rows are appended to.
            common: Fields that all new rows have.
        """
        self._common = asdict(cell) | common
        self._path = path
        self._rows = {key_of(row): row for row in rows}

    def find(self, kind: str, **names: object) -> Row | None:
        """Return the row of a kind whose key has these values; None if there is none."""
        return self._rows.get(key_of({"kind": kind, **self._common, **names}))

    def add(self, kind: str, row: Row) -> Row:
        """Append a row to the file, and return it with the common fields."""
        whole = {"kind": kind, **self._common, **row}
        self._rows[key_of(whole)] = whole
        append(self._path, whole)
        return whole


def append(path: Path, row: Row) -> None:
    """Append a row to a file in one write, so that several processes can append to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(row) + "\n").encode())
    finally:
        os.close(file)


def read(paths: Sequence[Path]) -> list[Row]:
    """Read the rows of files. Among rows with the same key, the last one counts.

    The last line of a file may be cut off, because a process was killed. It is skipped.

    Raises:
        ValueError: A line is not a row. The message has the file and the line number.
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
    """Group rows by their cells."""
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        found.setdefault(cell_of(row), []).append(row)
    return found
