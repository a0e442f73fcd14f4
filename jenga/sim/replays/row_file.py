"""A file with the rows of replays: read its rows, add replays, continue interrupted ones."""

import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TextIO

from jenga.sim.files.lines import lines_of
from jenga.sim.files.whole_files import written_whole
from jenga.sim.replays.replay import Replay, Step
from jenga.sim.replays.session import Outcome, Running
from jenga.sim.replays.snapshot import Snapshot, read_snapshot, write_snapshot
from jenga.sim.results.rows import (
    Row,
    RunRow,
    SummaryRow,
    is_parquet,
    read_rows,
    row_line,
    rows_of_lines,
    write_parquet,
)

SNAPSHOT_EVERY_S = 60.0
"""Seconds between two snapshots of a running replay. A snapshot takes a second at most."""

_READ_BYTES = 1 << 16
_ROW_BEGINS = '{"kind": "'


def _print_warning(text: str) -> None:
    print(f"jenga: warning: {text}", file=sys.stderr)


class RowFile:
    """A file of rows to which replays are added.

    An interrupted replay leaves rows without a summary, and a snapshot beside the file. It
    continues from the snapshot, and rows that came after the snapshot are cut off. A replay without
    a snapshot of this user and this code runs again from its beginning.

    Parquet files cannot grow, so their rows go to a file of lines beside them until `close`.
    """

    def __init__(
        self,
        path: Path,
        *,
        snapshot_every_s: float = SNAPSHOT_EVERY_S,
        warn: Callable[[str], None] = _print_warning,
    ) -> None:
        """Read the existing rows, and change nothing.

        Args:
            path: File of lines of JSON, or of Parquet if the name ends in `.parquet`.
            snapshot_every_s: Seconds between two snapshots of a running replay.
            warn: Called with a sentence when a snapshot cannot be read or written.

        Raises:
            ValueError: The file has other content, or is not a regular file that can be read again.
            ModuleNotFoundError: The file is Parquet, and pyarrow is not installed.
        """
        self.path = path
        self._lines = path.with_name(f"{path.name}.jsonl") if is_parquet(path) else path
        for each in (path, self._lines):
            # The user did not choose the second name, so a link there may be another user's.
            is_foreign = each is not path and each.is_symlink()
            if is_foreign or (each.exists() and not each.is_file()):
                msg = f"{each} must be a file of rows or not exist yet: it is read before it grows"
                raise ValueError(msg)
        self._snapshot = path.with_name(f"{path.name}.snapshot")
        self._snapshot_every_s = snapshot_every_s
        self._warn = warn
        self._done: dict[str, Outcome] = {}
        runs: dict[str, RunRow] = {}
        self._last_run = ""
        if is_parquet(path):
            import_module("pyarrow")
        for each in dict.fromkeys((path, self._lines)):
            for row in _rows_of(each) if each.exists() else ():
                self._last_run = row.run
                if isinstance(row, RunRow):
                    runs[row.run] = row
                elif isinstance(row, SummaryRow) and row.run in runs:
                    self._done[row.run] = Outcome(runs[row.run], row)
        self._broken = runs.keys() - self._done.keys()

    def outcome_of(self, run: str) -> Outcome | None:
        """Return the outcome of a replay, or None if it has not ended."""
        return self._done.get(run)

    def snapshot_of(self, run: str) -> Snapshot | None:
        """Return the snapshot that a replay can continue from, or None. Warn of an unusable one."""
        # If rows of other runs follow its own, cutting the file would lose them.
        if run not in self._broken or run != self._last_run:
            return None
        try:
            snapshot = read_snapshot(self._snapshot, run)
        except (OSError, ValueError) as error:
            self._warn(f"{error}; the replay starts over")
            return None
        is_whole = snapshot is not None and snapshot.rows_bytes <= self._lines.stat().st_size
        return snapshot if is_whole else None

    def written(
        self, running: Running, on_step: Callable[[Replay, Step], None] | None = None
    ) -> Iterator[Row]:
        """Run a replay and write its rows as they come; see `Running.rows`.

        A refused replay leaves no rows.

        Raises:
            ValueError: Another process writes to the file, or `Running.rows` raises it.
        """
        run = running.row.run
        self._lines.parent.mkdir(parents=True, exist_ok=True)
        if running.snapshot is None and run in self._broken:
            with self._alone():
                self._forget(run)
        with self._alone() as file:
            _drop_half_a_line(self._lines)
            if running.snapshot is not None:
                file.truncate(running.snapshot.rows_bytes)
            begin_bytes = os.fstat(file.fileno()).st_size
            keep = self._keeper(running, file, on_step)
            try:
                for row in running.rows(on_step=keep):
                    # A continued replay already has its first row in the file.
                    if running.snapshot is None or not isinstance(row, RunRow):
                        file.write(row_line(row))
                    if isinstance(row, SummaryRow):
                        self._done[run] = Outcome(running.row, row)
                    yield row
            except ValueError:
                # A refused replay leaves no rows.
                file.truncate(begin_bytes)
                raise
            self._broken.discard(run)
            self._last_run = run
            self._snapshot.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Generator[TextIO]:
        """Open the file of lines to add rows, and keep other processes from adding meanwhile.

        Raises:
            ValueError: Another process adds rows.
        """
        with self._lines.open("a", encoding="utf-8") as file:
            if not _is_locked_for_us(file):
                msg = f"{self.path}: another replay is writing to it; give each its own --out"
                raise ValueError(msg)
            yield file

    def _keeper(
        self, running: Running, file: TextIO, on_step: Callable[[Replay, Step], None] | None
    ) -> Callable[[Replay, Step], None]:
        """Return a function to call in each step, which writes a snapshot at intervals."""
        next_s = time.monotonic() + self._snapshot_every_s

        def keep(replay: Replay, step: Step) -> None:
            nonlocal next_s
            if on_step is not None:
                on_step(replay, step)
            if time.monotonic() < next_s:
                return
            file.flush()
            os.fsync(file.fileno())
            snapshot = Snapshot(
                row=running.row,
                replay=replay,
                recorder=running.recorder,
                rows_bytes=self._lines.stat().st_size,
            )
            try:
                write_snapshot(self._snapshot, snapshot)
            except (OSError, ValueError) as error:
                self._warn(f"the replay goes on without snapshots: {error}")
                next_s = math.inf
                return
            next_s = time.monotonic() + self._snapshot_every_s

        return keep

    def _forget(self, run: str) -> None:
        """Write the file again without the rows of an interrupted replay."""
        with written_whole(self._lines) as file:
            kept = (row for row in _rows_of(self._lines) if row.run != run)
            file.writelines(row_line(row).encode() for row in kept)

    def close(self) -> None:
        """Write the collected rows to the Parquet file. Rows of other files are already there."""
        if not is_parquet(self.path) or not self._lines.exists():
            return
        with self._alone():
            files = [each for each in (self.path, self._lines) if each.exists()]
            write_parquet(self.path, (row for each in files for row in _rows_of(each)))
            self._lines.unlink()


def _rows_of(path: Path) -> Iterator[Row]:
    """Read the rows of a file, except half a line at its end that an interrupted replay left."""
    if is_parquet(path):
        return read_rows(path)
    return rows_of_lines(path, (line for line in lines_of(path) if not _is_half_a_row(line)))


def _is_half_a_row(line: str) -> bool:
    return not line.endswith("\n") and line[: len(_ROW_BEGINS)] == _ROW_BEGINS[: len(line)]


def _is_locked_for_us(file: TextIO) -> bool:
    """Lock an open file until it is closed. Return False if another process holds the lock."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _drop_half_a_line(path: Path) -> None:
    """Cut off a last line without an end, which an interrupted replay left."""
    with path.open("rb+") as file:
        size = end = file.seek(0, 2)
        while end:
            start = max(0, end - _READ_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start + found + 1
            if found >= 0:
                break
            end = start
        if end < size:
            file.truncate(end)
