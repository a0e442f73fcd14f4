"""Rows of a plan.

Each row is written when it is measured, so that it need not be measured again.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_FAILURES = 2
"""Number of failures after which an entry is not tried again."""

Row = dict[str, Any]


class RowFile:
    """Rows of one commit at one scale. The file may hold rows of other commits and scales too.

    Args:
        path: File of JSON lines. It is created with the first row.
        commit: Commit that is measured.
        scale: Scale of the models.
    """

    def __init__(self, path: Path, *, commit: str, scale: str) -> None:
        self.path = path
        self._commit, self._scale = commit, scale
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self, kind: str = "run") -> list[Row]:
        """Return the rows of a kind: run, failure, cut, comparison, trials or compiled."""
        return [
            row
            for row in read(self.path)
            if (row["kind"], row["commit"], row["scale"]) == (kind, self._commit, self._scale)
        ]

    def add(self, row: Row) -> None:
        """Append a row to the file at once. A cut-off last line is ended first."""
        row = {"scale": self._scale, "commit": self._commit} | row
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # the last row was cut off
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")

    def runs(self, key: tuple[str, str, int]) -> set[tuple[str, int]]:
        """Return the pairs of workload and run number that have rows for an entry."""
        return {(row["workload"], row["run"]) for row in self._of(self.rows(), key)}

    def is_given_up(self, key: tuple[str, str, int]) -> bool:
        """Whether an entry has failed `MAX_FAILURES` times."""
        return len(self._of(self.rows("failure"), key)) >= MAX_FAILURES

    def measured(
        self, case: str, side: str, field: str, workload: str | None = None
    ) -> float | None:
        """Return the last value of a field in the runs of a side; None if there are no runs."""
        values = [
            row[field]
            for row in self.rows()
            if (row["case"], row["side"]) == (case, side) and workload in (None, row["workload"])
        ]
        return values[-1] if values else None

    @staticmethod
    def _of(rows: Sequence[Row], key: tuple[str, str, int]) -> list[Row]:
        return [row for row in rows if (row["case"], row["side"], row["turn"]) == key]


def read(path: Path) -> list[Row]:
    """Read all rows of a file. Lines that are not JSON, such as a cut-off last one, are skipped."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def line_of(row: Row) -> str:
    """Format a run's row as a line for people."""
    counts = row["compilations"]
    disturbed = ""
    if row["is_disturbed"]:
        disturbed = (
            f"; DISTURBED: {counts['num_compiled']} compiled, {counts['num_tuned']} tuned, "
            f"{counts['num_graphs'] + counts['num_captured']} graphs"
        )
    return (
        f"{row['case']}, {row['workload']}, {row['side']} {row['turn']}.{row['run']}: "
        f"{row['seconds']:.2f} s, {row['output_tokens_per_s']:.0f} tokens/s, "
        f"ttft {row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.2f} s, "
        f"tpot {row['tpot_p50_ms']:.1f} / {row['tpot_p99_ms']:.1f} ms, "
        f"found {row['found_share']:.0%}, running {row['mean_running']:.1f}, "
        f"{row['num_preemptions']} preempted, {row['output_hash'][:8]}{disturbed}"
    )
