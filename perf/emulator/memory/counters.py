"""Count memory traffic of launches: sectors of global memory, turns at banks of shared memory."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Whole = npt.NDArray[np.int64]

SECTOR_BYTES = 32
"""Bytes that a GPU moves at once between its caches."""

NUM_BANKS = 32
"""Number of banks of shared memory, 4 bytes wide. Each serves one word per turn."""

WORD_BYTES = 4
TURN_BYTES = NUM_BANKS * WORD_BYTES
WARP = 32


@dataclass
class Traffic:
    """Traffic to or from global memory.

    Attributes:
        requests: Number of instructions, counted for each warp.
        sectors: Number of sectors that the requests touched. A sector counts once per request.
        asked_bytes: Bytes that threads asked for. A byte counts once per request.
        seen: Index of each sector that a request touched, with repetitions.
    """

    requests: int = 0
    sectors: int = 0
    asked_bytes: int = 0
    seen: list[Whole] = field(default_factory=list)

    @property
    def moved_bytes(self) -> int:
        """Bytes of all sectors that the requests touched."""
        return self.sectors * SECTOR_BYTES

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all distinct sectors: the least that has to come from outside of the caches."""
        return len(np.unique(np.concatenate(self.seen))) * SECTOR_BYTES if self.seen else 0

    def note(self, addresses: Whole, num_bytes: int, warps: Whole) -> None:
        """Count an instruction of some lanes; `warps` has the warp of each lane."""
        places = np.unique(_keys(warps, addresses // num_bytes))
        sectors = np.unique(_keys(warps, addresses // SECTOR_BYTES))
        self.requests += len(np.unique(warps))
        self.sectors += len(sectors)
        self.asked_bytes += len(places) * num_bytes
        self.seen.append(sectors & _LOW)


@dataclass
class Turns:
    """Accesses to shared memory.

    Attributes:
        taken: Number of turns that the banks took. If threads of a warp ask one bank for several
            words, the words take several turns (a bank conflict).
        needed: Least number of turns in which so many bytes can be moved.
    """

    taken: int = 0
    needed: int = 0

    def note(self, addresses: Whole, num_bytes: int, lanes: Whole) -> None:
        """Count an instruction; `lanes` are numbered across all warps."""
        num_words = max(1, num_bytes // WORD_BYTES)
        # Wide accesses are served for half a warp, or a quarter, at a time.
        part = lanes // (WARP // num_words)
        words = addresses[:, None] // WORD_BYTES + np.arange(num_words)
        asked = np.unique(_keys(np.broadcast_to(part[:, None], words.shape), words))
        banks, counts = np.unique(
            (asked >> _BITS) * NUM_BANKS + asked % NUM_BANKS, return_counts=True
        )
        parts, first = np.unique(banks // NUM_BANKS, return_index=True)
        self.taken += int(np.maximum.reduceat(counts, first).sum())
        warps = parts * (WARP // num_words) // WARP
        per_warp = np.add.reduceat(counts, first)
        _, first_of_warp = np.unique(warps, return_index=True)
        totals = np.add.reduceat(per_warp, first_of_warp) * WORD_BYTES
        self.needed += int((-(-totals // TURN_BYTES)).sum())


_BITS = 48
_LOW = (1 << _BITS) - 1


def _keys(owners: Whole, places: Whole) -> Whole:
    """Return each pair as one number, so that distinct pairs can be counted."""
    return (owners.astype(np.int64) << _BITS) | places


@dataclass
class Counters:
    """Counters of the launches of a kernel.

    Attributes:
        launches: Number of launches.
        instructions: Number of PTX instructions, over all warps.
        loads: Loads from global memory, including asynchronous copies.
        stores: Stores to global memory.
        shared: Loads and stores of shared memory by threads, without reads of matrix products.
    """

    launches: int = 0
    instructions: int = 0
    loads: Traffic = field(default_factory=Traffic)
    stores: Traffic = field(default_factory=Traffic)
    shared: Turns = field(default_factory=Turns)
