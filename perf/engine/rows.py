"""Rows of a plan, kept as they come: what is there need not be measured again."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_FAILURES = 2
"""Times that an entry may fail before no call tries it again."""

Row = dict[str, Any]


class RowFile:
    """Rows of one commit at one scale, among those of others in the same file.

    Args:
        path: JSON lines; made if it is not there.
        commit: What is measured.
        scale: Of the models.
    """

    def __init__(self, path: Path, *, commit: str, scale: str) -> None:
        self.path = path
        self._commit, self._scale = commit, scale
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self, kind: str = "run") -> list[Row]:
        """Get the rows of a kind: run, failure, cut, comparison, trials or compiled."""
        return [
            row
            for row in read(self.path)
            if (row["kind"], row["commit"], row["scale"]) == (kind, self._commit, self._scale)
        ]

    def add(self, row: Row) -> None:
        """Write a row, on disk before anything else happens."""
        row = {"scale": self._scale, "commit": self._commit} | row
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a row was cut off there
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")

    def runs(self, key: tuple[str, str, int]) -> set[tuple[str, int]]:
        """Get the workloads and numbers of the runs that an entry has."""
        return {(row["workload"], row["run"]) for row in self._of(self.rows(), key)}

    def is_given_up(self, key: tuple[str, str, int]) -> bool:
        """Whether an entry has failed too often."""
        return len(self._of(self.rows("failure"), key)) >= MAX_FAILURES

    def measured(
        self, case: str, side: str, field: str, workload: str | None = None
    ) -> float | None:
        """Get the last value of a field in rows of a side; None where there is none."""
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
    """Get all rows of a file; a last line that was cut off is left out."""
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
    """Get a run's row as a line for people."""
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
