"""What each warp of a program knows of what others have done: vector clocks.

An access is numbered by the clock of its warp. Whoever meets the warp at a barrier later, or waits
for what it arrived at, knows of it; two accesses race if neither's warp knew of the other's. What
the copy engine brings is numbered by the phases of the barrier that tells of it.

Source: Flanagan and Freund, FastTrack (PLDI 2009).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf.emulator.memory import BARRIER_BIT, PROGRAM_BIT, WARP, Histories, Lanes

Row = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class News:
    """What somebody knows and passes on.

    Attributes:
        known: Clock of each warp, and phase of each barrier.
        fenced: The same, of what came before a proxy fence, so that tensor cores see it too.
    """

    known: Row
    fenced: Row

    def __or__(self, other: "News") -> "News":
        """What both know."""
        return News(np.maximum(self.known, other.known), np.maximum(self.fenced, other.fenced))


class Clocks:
    """Of the warps of several programs.

    Args:
        program_ids: Of the programs, in the grid.
        num_warps: Of each program.
        num_barriers: Barriers in shared memory that each may have.

    Attributes:
        known: What each warp knows, i32[programs, warps, warps + barriers].
        fenced: The same, of what came before a proxy fence.
        synced: Clock of each warp when its threads met last, i32[programs, warps].
        touched: Lanes that accessed shared memory since.
        histories: What warps knew when they accessed global memory.
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
        """What one knows who knows nothing."""
        row = np.zeros(self.known.shape[2], dtype=np.int32)
        return News(row, row)

    def parties(self, programs: npt.NDArray, warps: npt.NDArray) -> npt.NDArray[np.int64]:
        """Who warps are to global memory, which they access now."""
        clocks = self.known[programs, warps, warps].astype(np.int64)
        parties = self.program_ids[programs] << PROGRAM_BIT | clocks << BARRIER_BIT | warps
        new, first = np.unique(parties, return_index=True)
        for party, lane in zip(new.tolist(), first.tolist(), strict=True):
            if party not in self.histories:
                known = self.known[programs[lane], warps[lane], : self.num_warps]
                self.histories[party] = known.copy()
        return parties

    def advance(self, program: int, warp: int) -> None:
        """Number what a warp does from here on anew."""
        self.known[program, warp, warp] += 1

    def meet(self, program: int, warp: int) -> None:
        """Let the threads of a warp know of each other."""
        touched = self._touched(program, warp)
        if touched.any():
            touched[:] = False
            self.synced[program, warp] = self.known[program, warp, warp]
            self.advance(program, warp)

    def release(self, program: int, warp: int, lanes: Lanes) -> News:
        """What some threads of a warp, bool[32], pass on of what has been."""
        known, fenced = self.known[program, warp].copy(), self.fenced[program, warp].copy()
        known[warp] = self._own(program, warp, lanes)
        fenced[warp] = min(fenced[warp], known[warp])
        self.advance(program, warp)
        return News(known, fenced)

    def acquire(self, program: int, warp: int, news: News) -> None:
        """Let a warp know what others have passed on."""
        known = self.known[program, warp]
        np.maximum(known, news.known, out=known)
        fenced = self.fenced[program, warp]
        np.maximum(fenced, news.fenced, out=fenced)
        self.advance(program, warp)

    def fence(self, program: int, warp: int, lanes: Lanes) -> None:
        """Show tensor cores what some threads of a warp know of."""
        fenced = self.known[program, warp].copy()
        fenced[warp] = self._own(program, warp, lanes)
        np.maximum(self.fenced[program, warp], fenced, out=self.fenced[program, warp])
        self.advance(program, warp)

    def _touched(self, program: int, warp: int) -> Lanes:
        return self.touched.reshape(-1, WARP)[program * self.num_warps + warp]

    def _own(self, program: int, warp: int, lanes: Lanes) -> int:
        """Up to where these threads know of what their whole warp did."""
        if (self._touched(program, warp) & ~lanes).any():
            return int(self.synced[program, warp])
        return int(self.known[program, warp, warp])
