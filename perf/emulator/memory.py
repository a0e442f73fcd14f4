"""Memory of an emulated GPU: tensors of this process, and what programs share."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from perf.emulator.errors import EmulationError

Addresses = npt.NDArray[np.int64]
Lanes = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
Parties = npt.NDArray[np.integer]
Bytes = npt.NDArray[np.uint8]
Accesses = tuple[Addresses, Parties, int]
"""Offsets in a region, who accessed them, bytes of each access."""

WARP = 32
"""Threads."""

PROGRAM_BIT, BARRIER_BIT = 40, 8
"""Where in a party its program begins, and the barriers behind it; below them is its warp."""

GARBAGE = 0xFF
"""Of what every byte consists that nobody wrote: NaN, or -1."""


def bytes_of(tensor: torch.Tensor) -> tuple[int, Bytes]:
    """First address of a tensor's storage, and its bytes."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return storage.data_ptr(), flat.numpy()


def _unit(num_bytes: int) -> int:
    """Bytes that are read and written at once."""
    return min(num_bytes, 8)


def _elements(data: Bytes, num_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """Memory as elements of the unit of such accesses."""
    unit = _unit(num_bytes)
    return data[: len(data) // unit * unit].view(f"u{unit}")


def _rows(offsets: Addresses, num_bytes: int, unit: int) -> Places:
    """Indices [len(offsets), num_bytes / unit] of the units of accesses."""
    first = offsets // unit
    if num_bytes <= unit:
        return first[:, None]
    return first[:, None] + np.arange(num_bytes // unit)


def _refuse(wrong: Lanes, places: Places, what: str) -> None:
    """Raise `EmulationError` if something is wrong at a place."""
    if wrong.any():
        msg = f"race: threads {what}, at {int(places[wrong][0])}, with no barrier between"
        raise EmulationError(msg)


class GlobalMemory:
    """The storages of the tensors that a launch was given.

    Programs may not depend on one another, nor a warp on another of its program without a barrier
    between them: `check_races` refuses a launch where one stored what another loaded, or stored
    something else there. Who accessed memory is a party: a program, how many barriers it has
    passed, a warp of it; see `PROGRAM_BIT`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        regions = {start: data for start, data in map(bytes_of, tensors) if len(data)}
        self._starts = np.array(sorted(regions), dtype=np.int64)
        self._regions = [regions[start] for start in self._starts.tolist()]
        self._ends = self._starts + np.array([len(data) for data in self._regions], dtype=np.int64)
        self._loads: list[list[Accesses]] = [[] for _ in self._regions]
        self._stores: list[list[Accesses]] = [[] for _ in self._regions]

    def read(self, addresses: Addresses, num_bytes: int, parties: Parties) -> Bytes:
        """Bytes u8[len(addresses), num_bytes] for lanes of `parties`.

        Raises:
            EmulationError: Some lie outside every tensor, or an address is no multiple of
                `num_bytes`.
        """
        data = np.empty((len(addresses), num_bytes), dtype=np.uint8)
        for lanes, region, offsets in self._places(addresses, num_bytes, "load"):
            held = _elements(self._regions[region], num_bytes)
            data[lanes] = held[_rows(offsets, num_bytes, _unit(num_bytes))].view(np.uint8)
            self._loads[region].append((offsets, parties[lanes], num_bytes))
        return data

    def write(self, addresses: Addresses, data: Bytes, parties: Parties) -> None:
        """Write rows of `data`; see `read`."""
        num_bytes = data.shape[1]
        for lanes, region, offsets in self._places(addresses, num_bytes, "store"):
            held = _elements(self._regions[region], num_bytes)
            rows = _rows(offsets, num_bytes, _unit(num_bytes))
            words = np.ascontiguousarray(data[lanes]).view(held.dtype)
            changed = (held[rows] != words).any(axis=1)
            held[rows] = words
            _refuse(held[rows] != words, rows, "store different values at once")
            # Of those who store the same at once, one did.
            once, one = np.unique(offsets[changed], return_index=True)
            self._stores[region].append((once, parties[lanes][changed][one], num_bytes))

    def check_races(self) -> None:
        """Check that no program depends on another's stores, nor a warp where no barrier is.

        Raises:
            EmulationError: One does.
        """
        for data, loads, stores in zip(self._regions, self._loads, self._stores, strict=True):
            if not stores or len(data) > MAX_TRACED_BYTES:
                continue
            writers = np.full(len(data), -1, dtype=np.int64)
            for offsets, parties, num_bytes in stores:
                rows = _rows(offsets, num_bytes, 1)
                programs = parties >> PROGRAM_BIT
                before = writers[rows]
                others = (before >= 0) & (before != programs[:, None])
                _refuse(others, rows, "of two programs store")
                writers[rows] = programs[:, None]
            for offsets, parties, num_bytes in loads:
                rows = _rows(offsets, num_bytes, 1)
                before = writers[rows]
                others = (before >= 0) & (before != (parties >> PROGRAM_BIT)[:, None])
                _refuse(others, rows, "load what another program stores")
            _check_warps(loads, stores, len(data))

    def _places(
        self, addresses: Addresses, num_bytes: int, what: str
    ) -> Iterable[tuple[Lanes | slice, int, Addresses]]:
        """Lanes, region and offsets there."""
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


def _check_warps(loads: list[Accesses], stores: list[Accesses], region_bytes: int) -> None:
    """Refuse a store of one warp where another of the program accesses, with no barrier between."""
    unit = min(num_bytes for _, _, num_bytes in (*loads, *stores))
    is_stored = np.zeros(-(-region_bytes // unit), dtype=bool)
    for offsets, _, num_bytes in stores:
        is_stored[_rows(offsets, num_bytes, unit)] = True
    places, parties, stored = [], [], []
    for accesses, is_store in ((loads, False), (stores, True)):
        for offsets, party, num_bytes in accesses:
            rows = _rows(offsets, num_bytes, unit)
            taken = is_stored[rows]
            places.append(rows[taken])
            parties.append(np.broadcast_to(party[:, None], rows.shape)[taken])
            stored.append(np.full(len(places[-1]), is_store))
    place, party, by_store = map(np.concatenate, (places, parties, stored))
    if not (party & ((1 << BARRIER_BIT) - 1)).any():
        return
    order = np.lexsort((party, place))
    place, party = place[order], party[order]
    starts = np.ones(len(place), dtype=bool)
    starts[1:] = (np.diff(place) != 0) | (np.diff(party >> BARRIER_BIT) != 0)
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(place)) - 1
    # Warps ascend among those that access a place between two barriers.
    is_shared = party[first] != party[last]
    wrong = is_shared & np.logical_or.reduceat(by_store[order], first)
    _refuse(wrong, place[first] * unit, "of two warps access a place of a tensor, one to store")


MAX_TRACED_BYTES = 1 << 26
"""Larger tensors are not watched for races, for the sake of memory."""

NOBODY = np.iinfo(np.int32).max

TRACED = 2
"""Bytes whose accesses are remembered together: no store of a single byte is known."""


class SharedMemory:
    """What the warps of each program share, and who accessed it since the last barrier.

    Two threads race where one stores what the other stored or loads, with no barrier in between, of
    their warp if both are of one. A store of what is there already is no race.

    Tensor cores read through another proxy: what threads or their copies wrote there needs a fence
    in between, by all of them.
    """

    def __init__(self, num_programs: int, num_warps: int, num_bytes: int) -> None:
        # Matrices of several programs are aligned as those of one.
        self.num_bytes = num_bytes
        self._stride = -(-num_bytes // 1024) * 1024
        self._num_warps = num_warps
        self._data = np.full(num_programs * self._stride, GARBAGE, dtype=np.uint8)
        count = len(self._data) // TRACED
        self._writer = np.full(count, NOBODY, dtype=np.int32)
        self._least = np.full(count, NOBODY, dtype=np.int32)
        self._most = np.full(count, -1, dtype=np.int32)
        # Accesses are numbered: the last store and load of each place, the last store that needs a
        # fence, and the last access before a fence of each program or a barrier of each warp.
        self._stored = np.zeros(count, dtype=np.int32)
        self._loaded, self._unfenced = np.zeros_like(self._stored), np.zeros_like(self._stored)
        self._num_accesses = 0
        self._fenced = np.zeros(num_programs, dtype=np.int32)
        self._synced = np.zeros(num_programs * num_warps, dtype=np.int32)

    def fence(self, programs: Lanes | None) -> None:
        """Let tensor cores see what these programs have stored; None for all."""
        self._fenced[slice(None) if programs is None else programs] = self._num_accesses

    def check_fenced(self, addresses: Addresses, programs: Parties) -> None:
        """Check that tensor cores see what lies at addresses [matrices, elements] of programs.

        Raises:
            EmulationError: Something there was written after the last fence.
        """
        traced = (addresses + (programs * self._stride)[:, None]) // TRACED
        if (self._unfenced[traced] > self._fenced[programs][:, None]).any():
            msg = "tensor cores read what was written to shared memory since the last proxy fence"
            raise EmulationError(msg)

    def warp_barrier(self, warps: Lanes | None) -> None:
        """What these warps accessed before is apart from what they will; None for all."""
        self._synced[slice(None) if warps is None else warps] = self._num_accesses

    def barrier(self, programs: Lanes | None) -> None:
        """What these programs accessed before is apart from what comes; None for all."""
        for traces, nobody in ((self._writer, NOBODY), (self._least, NOBODY), (self._most, -1)):
            if programs is None:
                traces.fill(nobody)
            else:
                traces.reshape(len(programs), -1)[programs] = nobody

    def keep(self, programs: Lanes) -> None:
        """Forget the others."""
        for name in (
            "_data", "_writer", "_least", "_most", "_stored", "_loaded", "_unfenced", "_fenced",
            "_synced",
        ):  # fmt: skip
            held = getattr(self, name).reshape(len(programs), -1)
            setattr(self, name, held[programs].reshape(-1))

    def read(
        self, addresses: Addresses, num_bytes: int, programs: Parties, threads: Parties
    ) -> Bytes:
        """Bytes u8[len(addresses), num_bytes] for lanes that are `threads` of `programs`.

        Threads below zero are of tensor cores, which no barrier of a warp orders.

        Raises:
            EmulationError: An address is outside or no multiple of `num_bytes`, or there is a race.
        """
        offsets = self._offsets(addresses, num_bytes, programs, "load")
        traced, threads = _rows(offsets, num_bytes, TRACED), threads[:, None]
        warps = threads // WARP
        writer, least, most = self._writer[traced], self._least[traced], self._most[traced]
        _refuse((writer != NOBODY) & (writer // WARP != warps), traced, "load what others stored")
        synced = self._synced[programs[:, None] * self._num_warps + warps]
        near = (writer != NOBODY) & (writer != threads) & (self._stored[traced] > synced)
        _refuse(near, traced, "load what others of their warp stored")
        # What threads of this warp alone loaded before its last barrier is forgotten.
        is_past = (least // WARP == warps) & (most // WARP == warps)
        is_past &= self._loaded[traced] <= synced
        least, most = np.where(is_past, NOBODY, least), np.where(is_past, -1, most)
        # Of lanes at one place the last counts: threads ascend, and descend in reverse.
        self._least[traced[::-1]] = np.minimum(least, threads)[::-1]
        self._most[traced] = np.maximum(most, threads)
        self._num_accesses += 1
        self._loaded[traced] = self._num_accesses
        rows = _rows(offsets, num_bytes, _unit(num_bytes))
        return _elements(self._data, num_bytes)[rows].view(np.uint8)

    def write(
        self,
        addresses: Addresses,
        data: Bytes,
        programs: Parties,
        threads: Parties,
        *,
        needs_fence: bool = True,
    ) -> None:
        """Write rows of `data`, for tensor cores behind a fence or not; see `read`."""
        num_bytes = data.shape[1]
        offsets = self._offsets(addresses, num_bytes, programs, "store")
        held = _elements(self._data, num_bytes)
        rows = _rows(offsets, num_bytes, _unit(num_bytes))
        words = np.ascontiguousarray(data).view(held.dtype)
        changes = (held[rows] != words).any(axis=1, keepdims=True)
        traced, threads = _rows(offsets, num_bytes, TRACED), threads[:, None]
        warps = threads // WARP
        writer, least, most = self._writer[traced], self._least[traced], self._most[traced]
        is_read, is_written = least != NOBODY, writer != NOBODY
        far = is_read & ((least // WARP != warps) | (most // WARP != warps))
        _refuse(far & changes, traced, "store where others load")
        far = is_written & (writer // WARP != warps)
        _refuse(far & changes, traced, "store where others did")
        synced = self._synced[programs[:, None] * self._num_warps + warps]
        near = is_read & ((least != threads) | (most != threads)) & (self._loaded[traced] > synced)
        _refuse(near & changes, traced, "store where others of their warp load")
        near = is_written & (writer != threads) & (self._stored[traced] > synced)
        _refuse(near & changes, traced, "store where others of their warp did")
        self._writer[traced] = threads
        self._num_accesses += 1
        self._stored[traced] = self._num_accesses
        self._unfenced[traced] = self._num_accesses if needs_fence else 0
        held[rows] = words
        _refuse(held[rows] != words, rows, "store different values at once")

    def _offsets(
        self, addresses: Addresses, num_bytes: int, programs: Parties, what: str
    ) -> Addresses:
        wrong = (addresses % num_bytes != 0) | (addresses < 0)
        wrong |= addresses + num_bytes > self.num_bytes
        if wrong.any():
            msg = (
                f"{what} of {num_bytes} bytes at {int(addresses[wrong][0])} of {self.num_bytes} "
                f"bytes of shared memory"
            )
            raise EmulationError(msg)
        return addresses + programs * self._stride
