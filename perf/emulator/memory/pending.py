"""Asynchronous operations. They take effect when a program waits for them, and no earlier."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Programs = npt.NDArray[np.bool_]
Finish = Callable[[Programs], None]


@dataclass
class _Entry:
    """An operation under way.

    Attributes:
        finish: Function that ends the operation for some programs.
        programs: Programs for which it has not ended.
        groups: Index of the commit group that it is in, for each program.
        registers: Registers that it reads and writes until it ends.
    """

    finish: Finish
    programs: Programs
    groups: npt.NDArray[np.int64]
    registers: frozenset[int]


class Pending:
    """Asynchronous operations of several programs, or groups of warps; each commits its own."""

    def __init__(self, num_programs: int) -> None:
        self._num_groups = np.zeros(num_programs, dtype=np.int64)
        self._entries: list[_Entry] = []

    @property
    def is_busy(self) -> bool:
        """Whether an operation has not ended."""
        return bool(self._entries)

    def uses(self, registers: frozenset[int], programs: Programs) -> bool:
        """Return whether an operation of one of these programs uses one of these registers."""
        return any(
            not entry.registers.isdisjoint(registers) and (entry.programs & programs).any()
            for entry in self._entries
        )

    def start(
        self, programs: Programs | None, finish: Finish, registers: frozenset[int] = frozenset()
    ) -> None:
        """Start an operation of some programs, or of all if None, that uses these registers."""
        if programs is None:
            programs = np.ones(len(self._num_groups), dtype=bool)
        self._entries.append(_Entry(finish, programs.copy(), self._num_groups.copy(), registers))

    def commit(self, programs: Programs | None) -> None:
        """Close a group: operations that these programs started since their last group."""
        self._num_groups += 1 if programs is None else programs

    def wait(self, programs: Programs | None, num_groups: int) -> None:
        """End all groups of these programs except their last `num_groups`."""
        for entry in self._entries:
            ended = entry.programs & (entry.groups < self._num_groups - num_groups)
            if programs is not None:
                ended &= programs
            if ended.any():
                entry.finish(ended)
                entry.programs &= ~ended
        self._entries = [entry for entry in self._entries if entry.programs.any()]
