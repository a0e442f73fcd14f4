"""What runs on while programs do: it counts once somebody waits for it, and no earlier."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Programs = npt.NDArray[np.bool_]
Finish = Callable[[Programs], None]


@dataclass
class _Entry:
    """Something under way.

    Attributes:
        finish: What happens at the end, for some programs.
        programs: Those for which it has not ended.
        groups: Which group of a program's it is in.
        registers: What it reads and writes until then.
    """

    finish: Finish
    programs: Programs
    groups: npt.NDArray[np.int64]
    registers: frozenset[int]


class Pending:
    """Asynchronous operations of several programs; each closes its own groups."""

    def __init__(self, num_programs: int) -> None:
        self._num_groups = np.zeros(num_programs, dtype=np.int64)
        self._entries: list[_Entry] = []

    @property
    def is_busy(self) -> bool:
        """Whether something has not ended."""
        return bool(self._entries)

    def uses(self, registers: frozenset[int], programs: Programs) -> bool:
        """Whether an operation of some of these programs reads or writes such registers."""
        return any(
            not entry.registers.isdisjoint(registers) and (entry.programs & programs).any()
            for entry in self._entries
        )

    def start(
        self, programs: Programs | None, finish: Finish, registers: frozenset[int] = frozenset()
    ) -> None:
        """Start an operation of some programs on registers; None for all."""
        if programs is None:
            programs = np.ones(len(self._num_groups), dtype=bool)
        self._entries.append(_Entry(finish, programs.copy(), self._num_groups.copy(), registers))

    def commit(self, programs: Programs | None) -> None:
        """Make a group of what these programs started since their last one."""
        self._num_groups += 1 if programs is None else programs

    def wait(self, programs: Programs | None, num_groups: int) -> None:
        """End all groups of these programs but their last `num_groups`."""
        for entry in self._entries:
            ended = entry.programs & (entry.groups < self._num_groups - num_groups)
            if programs is not None:
                ended &= programs
            if ended.any():
                entry.finish(ended)
                entry.programs &= ~ended
        self._entries = [entry for entry in self._entries if entry.programs.any()]
