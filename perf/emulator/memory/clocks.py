"""Vector clocks: which accesses of other warps each warp of a program knows of.

An access is numbered by the clock of its warp. Another warp knows of it after it has met that warp
at a later barrier, or waited for an mbarrier at which that warp arrived. Two accesses race if
neither warp knew of the other's access. Data of the copy engine are numbered by the phase of the
mbarrier that reports them.

Source: Flanagan and Freund, FastTrack (PLDI 2009).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf.emulator.memory.global_memory import BARRIER_BIT, PROGRAM_BIT, WARP, Histories, Lanes

Row = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class News:
    """Clocks that a warp passes on at a barrier.

    Attributes:
        known: Latest clock of each warp, and latest phase of each mbarrier, that is known.
        fenced: The same, but only up to a proxy fence: tensor cores see these accesses too.
    """

    known: Row
    fenced: Row

    def __or__(self, other: "News") -> "News":
        """Return everything that at least one of the two knows."""
        return News(np.maximum(self.known, other.known), np.maximum(self.fenced, other.fenced))


class Clocks:
    """Vector clocks of the warps of several programs.

    Args:
        program_ids: Index of each program in the grid.
        num_warps: Warps of each program.
        num_barriers: Largest number of mbarriers of each program.

    Attributes:
        known: Clocks that each warp knows, i32[programs, warps, warps + barriers].
        fenced: The same, but only up to a proxy fence.
        synced: Clock of each warp when its threads last synchronised, i32[programs, warps].
        touched: Lanes that have accessed shared memory since then.
        histories: Clocks that warps knew when they accessed global memory, by party.
    """

    def __init__(
        self, program_ids: npt.NDArray[np.int64], num_warps: int, num_barriers: int
    ) -> None:
        self.program_ids, self.num_warps = program_ids, num_warps
        num_programs = len(program_ids)
        self.known = np.zeros((num_programs, num_warps, num_warps + num_barriers), dtype=np.int32)
        self.fenced = np.zeros_like(self.known)
        self.synced = np.zeros((num_programs, num_warps), dtype=np.int32)
        self.touched = np.zeros(num_programs * num_warps * WARP, dtype=bool)
        self.histories: Histories = {}
        warps = np.arange(num_warps)
        self.known[:, warps, warps] = 1

    @property
    def nothing(self) -> News:
        """Clocks of a party that knows of no access."""
        row = np.zeros(self.known.shape[2], dtype=np.int32)
        return News(row, row)

    def parties(self, programs: npt.NDArray, warps: npt.NDArray) -> npt.NDArray[np.int64]:
        """Return the parties of warps that access global memory now, and record their clocks."""
        clocks = self.known[programs, warps, warps].astype(np.int64)
        parties = self.program_ids[programs] << PROGRAM_BIT | clocks << BARRIER_BIT | warps
        new, first = np.unique(parties, return_index=True)
        for party, lane in zip(new.tolist(), first.tolist(), strict=True):
            if party not in self.histories:
                known = self.known[programs[lane], warps[lane], : self.num_warps]
                self.histories[party] = known.copy()
        return parties

    def advance(self, program: int, warp: int) -> None:
        """Advance the clock of a warp, so that its later accesses have a new number."""
        self.known[program, warp, warp] += 1

    def meet(self, program: int, warp: int) -> None:
        """Synchronise the threads of a warp, so that each knows of the others' accesses."""
        touched = self._touched(program, warp)
        if touched.any():
            touched[:] = False
            self.synced[program, warp] = self.known[program, warp, warp]
            self.advance(program, warp)

    def release(self, program: int, warp: int, lanes: Lanes) -> News:
        """Return the clocks that some threads of a warp, bool[32], pass on; advance the warp."""
        known, fenced = self.known[program, warp].copy(), self.fenced[program, warp].copy()
        known[warp] = self._own(program, warp, lanes)
        fenced[warp] = min(fenced[warp], known[warp])
        self.advance(program, warp)
        return News(known, fenced)

    def acquire(self, program: int, warp: int, news: News) -> None:
        """Add clocks that others have passed on to those that a warp knows."""
        known = self.known[program, warp]
        np.maximum(known, news.known, out=known)
        fenced = self.fenced[program, warp]
        np.maximum(fenced, news.fenced, out=fenced)
        self.advance(program, warp)

    def fence(self, program: int, warp: int, lanes: Lanes) -> None:
        """Record a proxy fence: tensor cores see the accesses that these threads know of."""
        fenced = self.known[program, warp].copy()
        fenced[warp] = self._own(program, warp, lanes)
        np.maximum(self.fenced[program, warp], fenced, out=self.fenced[program, warp])
        self.advance(program, warp)

    def _touched(self, program: int, warp: int) -> Lanes:
        return self.touched.reshape(-1, WARP)[program * self.num_warps + warp]

    def _own(self, program: int, warp: int, lanes: Lanes) -> int:
        """Return the clock up to which these threads know of all accesses of their own warp."""
        if (self._touched(program, warp) & ~lanes).any():
            return int(self.synced[program, warp])
        return int(self.known[program, warp, warp])
