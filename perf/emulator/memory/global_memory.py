"""Global memory of an emulated GPU: the tensors of this process."""

from collections.abc import Iterable
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from perf.emulator.errors import EmulationError

Addresses = npt.NDArray[np.int64]
Lanes = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
Parties = npt.NDArray[np.integer]
Bytes = npt.NDArray[np.uint8]
Histories = dict[int, npt.NDArray[np.int32]]
"""Party of `GlobalMemory` -> the clock of each warp of its program that the party knew."""

Accesses = tuple[Addresses, Parties, int]
"""Offsets in a region (the storage of a tensor), the party of each, and bytes of an access."""

WARP = 32
"""Threads of a warp."""

GROUP = 4 * WARP
"""Threads that run a `wgmma` together."""

PROGRAM_BIT, BARRIER_BIT = 40, 8
"""Lowest bit of the program in a party, and of the barriers that it has passed.

The warp is in the bits below. For specialised warps, the clock of the warp replaces the barriers.
"""

GARBAGE = 0xFF
"""Value of every byte that no instruction has written. Elements are then NaN, or -1."""


def bytes_of(tensor: torch.Tensor) -> tuple[int, Bytes]:
    """Return the first address of a tensor's storage, and its bytes."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return storage.data_ptr(), flat.numpy()


def unit_of(num_bytes: int) -> int:
    """Return the bytes that numpy reads or writes at once for an access: at most 8."""
    return min(num_bytes, 8)


def elements_of(data: Bytes, num_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """Return memory as elements of `unit_of(num_bytes)` bytes."""
    unit = unit_of(num_bytes)
    return data[: len(data) // unit * unit].view(f"u{unit}")


def units_of(offsets: Addresses, num_bytes: int, unit: int) -> Places:
    """Return the indices [len(offsets), num_bytes / unit] of the units that accesses touch."""
    first = offsets // unit
    if num_bytes <= unit:
        return first[:, None]
    return first[:, None] + np.arange(num_bytes // unit)


def refuse_race(wrong: Lanes, places: Places, what: str) -> None:
    """Raise an `EmulationError` if an access is wrong, with the first such place."""
    if wrong.any():
        msg = f"race: threads {what}, at {int(places[wrong][0])}, with no barrier between"
        raise EmulationError(msg)


class GlobalMemory:
    """The storages of the tensors that are a launch's arguments.

    Programs must not depend on one another. A warp must not depend on another warp of its program
    without a barrier between them. `check_races` refuses a launch in which one stores at a place
    where another loads or stores.

    Each access is recorded with its party: a program, the number of barriers it has passed, and a
    warp; see `PROGRAM_BIT`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        regions = {start: data for start, data in map(bytes_of, tensors) if len(data)}
        self._starts = np.array(sorted(regions), dtype=np.int64)
        self._regions = [regions[start] for start in self._starts.tolist()]
        self._ends = self._starts + np.array([len(data) for data in self._regions], dtype=np.int64)
        self._loads: list[list[Accesses]] = [[] for _ in self._regions]
        self._stores: list[list[Accesses]] = [[] for _ in self._regions]

    def read(self, addresses: Addresses, num_bytes: int, parties: Parties) -> Bytes:
        """Return the bytes u8[len(addresses), num_bytes] that lanes of `parties` load.

        Raises:
            EmulationError: Some bytes are outside of every tensor, or an address is not a
                multiple of `num_bytes`.
        """
        data = np.empty((len(addresses), num_bytes), dtype=np.uint8)
        for lanes, region, offsets in self._places(addresses, num_bytes, "load"):
            held = elements_of(self._regions[region], num_bytes)
            data[lanes] = held[units_of(offsets, num_bytes, unit_of(num_bytes))].view(np.uint8)
            self._loads[region].append((offsets, parties[lanes], num_bytes))
        return data

    def write(self, addresses: Addresses, data: Bytes, parties: Parties) -> None:
        """Write rows of `data`, u8[len(addresses), num_bytes]; `read` lists the errors.

        Stores of different values at one place at once are an error too. A store that changes
        nothing is not recorded.
        """
        num_bytes = data.shape[1]
        for lanes, region, offsets in self._places(addresses, num_bytes, "store"):
            held = elements_of(self._regions[region], num_bytes)
            rows = units_of(offsets, num_bytes, unit_of(num_bytes))
            words = np.ascontiguousarray(data[lanes]).view(held.dtype)
            changed = (held[rows] != words).any(axis=1)
            held[rows] = words
            refuse_race(held[rows] != words, rows, "store different values at once")
            # If several lanes store the same value at one place, record one of them.
            once, one = np.unique(offsets[changed], return_index=True)
            self._stores[region].append((once, parties[lanes][changed][one], num_bytes))

    def check_races(self, histories: Histories | None = None) -> None:
        """Check for races between programs, and between warps without a barrier between them.

        Args:
            histories: Clocks that each party knew, for kernels with specialised warps. A party
                then has the clock of its warp instead of a number of barriers. None for other
                kernels.

        Raises:
            EmulationError: There is a race.
        """
        for data, loads, stores in zip(self._regions, self._loads, self._stores, strict=True):
            if not stores or len(data) > MAX_TRACED_BYTES:
                continue
            writers = np.full(len(data), -1, dtype=np.int64)
            for offsets, parties, num_bytes in stores:
                rows = units_of(offsets, num_bytes, 1)
                programs = parties >> PROGRAM_BIT
                before = writers[rows]
                others = (before >= 0) & (before != programs[:, None])
                refuse_race(others, rows, "of two programs store")
                writers[rows] = programs[:, None]
            for offsets, parties, num_bytes in loads:
                rows = units_of(offsets, num_bytes, 1)
                before = writers[rows]
                others = (before >= 0) & (before != (parties >> PROGRAM_BIT)[:, None])
                refuse_race(others, rows, "load what another program stores")
            _check_warps(loads, stores, len(data), histories)

    def stored_bytes(self) -> Addresses:
        """Addresses of all bytes that have been changed."""
        found = [
            (start + units_of(offsets, num_bytes, 1)).ravel()
            for start, stores in zip(self._starts.tolist(), self._stores, strict=True)
            for offsets, _, num_bytes in stores
        ]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _places(
        self, addresses: Addresses, num_bytes: int, what: str
    ) -> Iterable[tuple[Lanes | slice, int, Addresses]]:
        """Yield each region that is accessed: the lanes, the region, and their offsets in it."""
        if not len(addresses):
            return
        if (addresses % num_bytes).any():
            wrong = int(addresses[addresses % num_bytes != 0][0])
            msg = f"{what} of {num_bytes} bytes at {wrong:#x}, which is no multiple of them"
            raise EmulationError(msg)
        found = np.searchsorted(self._starts, addresses, side="right") - 1
        wrong = (found < 0) | (addresses + num_bytes > self._ends[found])
        if wrong.any():
            msg = f"{what} of {num_bytes} bytes at {int(addresses[wrong][0]):#x}, in no tensor"
            raise EmulationError(msg)
        first = int(found[0])
        if (found == first).all():
            yield slice(None), first, addresses - self._starts[first]
            return
        for region in np.unique(found).tolist():
            lanes = found == region
            yield lanes, region, addresses[lanes] - self._starts[region]


def _check_warps(
    loads: list[Accesses],
    stores: list[Accesses],
    region_bytes: int,
    histories: Histories | None,
) -> None:
    """Refuse accesses of two warps of a program to one place, one a store, without a barrier."""
    unit = min(num_bytes for _, _, num_bytes in (*loads, *stores))
    is_stored = np.zeros(-(-region_bytes // unit), dtype=bool)
    for offsets, _, num_bytes in stores:
        is_stored[units_of(offsets, num_bytes, unit)] = True
    places, parties, stored = [], [], []
    for accesses, is_store in ((loads, False), (stores, True)):
        for offsets, party, num_bytes in accesses:
            rows = units_of(offsets, num_bytes, unit)
            taken = is_stored[rows]
            places.append(rows[taken])
            parties.append(np.broadcast_to(party[:, None], rows.shape)[taken])
            stored.append(np.full(len(places[-1]), is_store))
    place, party, by_store = map(np.concatenate, (places, parties, stored))
    if not (party & ((1 << BARRIER_BIT) - 1)).any():
        return
    if histories is not None:
        _check_clocks(place * unit, party, by_store, histories)
        return
    order = np.lexsort((party, place))
    place, party = place[order], party[order]
    starts = np.ones(len(place), dtype=bool)
    starts[1:] = (np.diff(place) != 0) | (np.diff(party >> BARRIER_BIT) != 0)
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(place)) - 1
    # The accesses to a place between two barriers are sorted by warp, so the first and last tell
    # whether there are two warps.
    is_shared = party[first] != party[last]
    wrong = is_shared & np.logical_or.reduceat(by_store[order], first)
    refuse_race(wrong, place[first] * unit, BETWEEN_WARPS)


MAX_TRACED_BYTES = 1 << 26
"""Bytes of the largest tensor that is checked for races. Larger ones would take too much memory."""


def _check_clocks(place: Places, party: Parties, by_store: Lanes, histories: Histories) -> None:
    """Refuse accesses of two warps to one place, one a store, if neither knew of the other."""
    order = np.lexsort((party, place))
    place, party, by_store = place[order], party[order], by_store[order]
    starts = np.ones(len(place), dtype=bool)
    starts[1:] = (np.diff(place) != 0) | (np.diff(party >> PROGRAM_BIT) != 0)
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(place))
    is_shared = party[first] != party[last - 1]
    is_shared &= np.logical_or.reduceat(by_store, first)
    # Many places have the same set of parties, so each set is checked once.
    groups = {}
    for start, end in zip(first[is_shared].tolist(), last[is_shared].tolist(), strict=True):
        stored = by_store[start:end]
        parties = frozenset(zip(party[start:end].tolist(), stored.tolist(), strict=True))
        groups[parties] = place[start]
    for parties, where in groups.items():
        for one, other in product((each for each, is_store in parties if is_store), parties):
            wrong = not (_knows(one, other[0], histories) or _knows(other[0], one, histories))
            refuse_race(np.array([wrong]), np.array([where]), BETWEEN_WARPS)


def _knows(one: int, other: int, histories: Histories) -> bool:
    """Return whether a party knew of the access of another party of its program."""
    warp = other & ((1 << BARRIER_BIT) - 1)
    clock = (other & ((1 << PROGRAM_BIT) - 1)) >> BARRIER_BIT
    return bool(histories[one][warp] >= clock)


BETWEEN_WARPS = "of two warps access a place of a tensor, one to store"
