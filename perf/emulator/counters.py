"""Count what launches ask of memory: sectors of global memory, turns at banks of shared memory."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Whole = npt.NDArray[np.int64]

SECTOR_BYTES = 32
"""What a GPU moves at once between its caches."""

NUM_BANKS = 32
"""Of shared memory, 4 bytes wide: each serves one word in a turn."""

WORD_BYTES = 4
TURN_BYTES = NUM_BANKS * WORD_BYTES
WARP = 32


@dataclass
class Traffic:
    """What went to or from global memory.

    Attributes:
        requests: Instructions of warps.
        sectors: That these asked for, one asked for by two instructions counted twice.
        asked_bytes: That threads wanted; of one request a byte counts once.
        seen: Sectors, for each time that one was asked for.
    """

    requests: int = 0
    sectors: int = 0
    asked_bytes: int = 0
    seen: list[Whole] = field(default_factory=list)

    @property
    def moved_bytes(self) -> int:
        """Bytes of all sectors that were asked for."""
        return self.sectors * SECTOR_BYTES

    @property
    def distinct_bytes(self) -> int:
        """Bytes of the sectors, each counted once: what comes from outside of the caches."""
        return len(np.unique(np.concatenate(self.seen))) * SECTOR_BYTES if self.seen else 0

    def note(self, addresses: Whole, num_bytes: int, warps: Whole) -> None:
        """Count an instruction of some lanes, each in one of `warps`."""
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
        taken: Turns that the banks needed: where threads of a warp ask one bank for several words,
            they wait for each other.
        needed: The fewest in which as many bytes can be moved.
    """

    taken: int = 0
    needed: int = 0

    def note(self, addresses: Whole, num_bytes: int, lanes: Whole) -> None:
        """Count an instruction; `lanes` are counted through all warps."""
        num_words = max(1, num_bytes // WORD_BYTES)
        # Wide accesses are served by halves or quarters of a warp.
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
    """Pairs as one number each, so that different ones can be counted."""
    return (owners.astype(np.int64) << _BITS) | places


@dataclass
class Counters:
    """What the launches of a kernel asked for.

    Attributes:
        launches: How many.
        instructions: Of PTX, by all warps.
        loads: From global memory, asynchronous copies included.
        stores: To global memory.
        shared: Loads and stores of shared memory by threads; not what matrix products read there.
    """

    launches: int = 0
    instructions: int = 0
    loads: Traffic = field(default_factory=Traffic)
    stores: Traffic = field(default_factory=Traffic)
    shared: Turns = field(default_factory=Turns)
