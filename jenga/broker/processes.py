"""Processes, told apart by their id and the time when they started."""

import os
from dataclasses import dataclass
from pathlib import Path

_START_FIELD = 19
"""Position of the start time in `/proc/PID/stat`, counted from the field after the name."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process. Ids are used again, but not together with the same start time.

    Attributes:
        pid: Its id.
        start_ticks: Time when it started, in clock ticks since the machine started.
    """

    pid: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended. A zombie has ended."""
        try:
            return process_of(self.pid) == self
        except ProcessLookupError:
            return False


def process_of(pid: int) -> Process:
    """Return the living process with an id.

    Raises:
        ProcessLookupError: There is none.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        msg = f"no process has the id {pid}"
        raise ProcessLookupError(msg) from error
    # The name is in parentheses, and may have spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        msg = f"the process with the id {pid} has ended"
        raise ProcessLookupError(msg)
    return Process(pid, int(fields[_START_FIELD]))


def this_process() -> Process:
    """Return the process that calls."""
    return process_of(os.getpid())
