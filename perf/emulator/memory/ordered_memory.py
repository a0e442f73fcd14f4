"""Shared memory of programs with specialised warps, checked for races with vector clocks."""

from collections.abc import Callable

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.memory.clocks import Clocks
from perf.emulator.memory.global_memory import (
    GARBAGE,
    GROUP,
    WARP,
    Addresses,
    Bytes,
    Lanes,
    Parties,
    Places,
    elements_of,
    refuse_race,
    unit_of,
    units_of,
)
from perf.emulator.memory.shared_memory import TRACED, UNFENCED, SharedBytes
from perf.emulator.memory.tensor_maps import CHUNK_BYTES

NOBODY = -1
"""Writer or thread of a place that nothing has accessed."""

MBARRIER = -2
"""Writer of a place that holds an mbarrier, which loads and stores must not touch."""


class OrderedMemory(SharedBytes):
    """Shared memory of each program, and for each place the clocks of its last accesses.

    Two warps race if one stores at a place where the other loads or stores, and neither knew of the
    other's access. Two threads of a warp race if the warp did not synchronise in between. See
    `SharedMemory`.
    """

    def __init__(self, clocks: Clocks, num_bytes: int) -> None:
        num_programs = len(clocks.program_ids)
        super().__init__(num_programs, num_bytes)
        self._clocks, self._num_warps = clocks, clocks.num_warps
        count = len(self._data) // TRACED
        # The last store to each place: the warp, or the mbarrier of a copy; its clock; the thread.
        self._writer = np.full(count, NOBODY, dtype=np.int16)
        self._stored = np.zeros(count, dtype=np.int32)
        self._storer = np.zeros(count, dtype=np.int16)
        self._needs_fence = np.zeros(count, dtype=bool)
        # Clock of the last load by each warp; lowest and highest thread of the last warp that
        # loaded.
        self._loaded = np.zeros((count, self._num_warps), dtype=np.int32)
        self._least, self._most = (np.full(count, NOBODY, dtype=np.int16) for _ in range(2))

    def read(
        self, addresses: Addresses, num_bytes: int, programs: Parties, threads: Parties
    ) -> Bytes:
        """Return the bytes u8[len(addresses), num_bytes] that `threads` of `programs` load.

        Raises:
            EmulationError: An address is outside of shared memory or not a multiple of
                `num_bytes`, or there is a race.
        """
        offsets = self._offsets(addresses, num_bytes, programs, "load")
        traced = units_of(offsets, num_bytes, TRACED)
        programs, threads = programs[:, None], threads[:, None]
        warps = threads // WARP
        self._check_known(traced, programs, self._clocks.known[programs[:, 0], warps[:, 0]])
        synced = self._clocks.synced[programs, warps]
        is_near = (self._writer[traced] == warps) & (self._storer[traced] != threads)
        is_near &= self._stored[traced] > synced
        refuse_race(is_near, self._at(traced, programs), "load what others of their warp stored")
        least, most = self._least[traced], self._most[traced]
        is_past = (least // WARP != warps) | (self._loaded[traced, warps] <= synced)
        # If several lanes have one place, numpy keeps the last assignment. Lanes are sorted by
        # thread, so this is the highest thread, and in reverse order the lowest.
        first = np.where(is_past, threads, np.minimum(least, threads))
        last = np.where(is_past, threads, np.maximum(most, threads))
        self._least[traced[::-1]], self._most[traced] = first[::-1], last
        self._loaded[traced, warps] = self._clocks.known[programs, warps, warps]
        self._clocks.touched[(programs * self._num_warps * WARP + threads)[:, 0]] = True
        rows = units_of(offsets, num_bytes, unit_of(num_bytes))
        return elements_of(self._data, num_bytes)[rows].view(np.uint8)

    def write(
        self,
        addresses: Addresses,
        data: Bytes,
        programs: Parties,
        threads: Parties,
        *,
        needs_fence: bool = True,
    ) -> None:
        """Write rows of `data`; `read` lists the errors.

        `needs_fence` says whether tensor cores may read the data only after a proxy fence.
        """
        num_bytes = data.shape[1]
        offsets = self._offsets(addresses, num_bytes, programs, "store")
        held = elements_of(self._data, num_bytes)
        rows = units_of(offsets, num_bytes, unit_of(num_bytes))
        words = np.ascontiguousarray(data).view(held.dtype)
        changes = (held[rows] != words).any(axis=1, keepdims=True)
        traced = units_of(offsets, num_bytes, TRACED)
        programs, threads = programs[:, None], threads[:, None]
        warps = threads // WARP
        known = self._clocks.known[programs[:, 0], warps[:, 0]]
        self._check_over(traced, programs, known, warps, changes)
        synced, places = self._clocks.synced[programs, warps], self._at(traced, programs)
        is_near = (self._writer[traced] == warps) & (self._storer[traced] != threads)
        is_near &= (self._stored[traced] > synced) & changes
        refuse_race(is_near, places, "store where others of their warp did")
        least, most = self._least[traced], self._most[traced]
        is_near = (least // WARP == warps) & ((least != threads) | (most != threads))
        is_near &= (self._loaded[traced, warps] > synced) & changes
        refuse_race(is_near, places, "store where others of their warp load")
        self._writer[traced], self._storer[traced] = warps, threads
        self._needs_fence[traced] = needs_fence
        self._stored[traced] = self._clocks.known[programs, warps, warps]
        self._clocks.touched[(programs * self._num_warps * WARP + threads)[:, 0]] = True
        held[rows] = words
        wrong = (held[rows] != words).any(axis=1, keepdims=True)
        refuse_race(wrong, self._at(traced[:, :1], programs), "store different values at once")

    def for_products(
        self, addresses: Addresses, num_bytes: int, lanes: Places
    ) -> Callable[[Lanes], Bytes]:
        """Return a function that reads the operands of tensor cores; see `SharedMemory`.

        Tensor cores may read at any time between now and the wait for the product. Accesses are
        therefore checked both now and when the function is called.
        """
        programs, threads = np.divmod(lanes, self._num_warps * WARP)
        warps = threads[:, None] // GROUP * (GROUP // WARP) + np.arange(GROUP // WARP)
        # Clocks that all four warps know, also of each other. Their later accesses get new clocks.
        known = self._clocks.known[programs[:, None], warps].min(axis=1)
        fenced = self._clocks.fenced[programs[:, None], warps].min(axis=1)
        for program, group in zip(programs.tolist(), warps.tolist(), strict=True):
            for warp in group:
                self._clocks.advance(program, warp)
        traced = (addresses + (programs * self._stride)[:, None]) // TRACED
        self._check_known(traced, programs[:, None], known)
        if self._is_unfenced(traced, fenced):
            raise EmulationError(UNFENCED)

        def read(matrices: Lanes) -> Bytes:
            places, of = traced[matrices], programs[matrices][:, None]
            self._check_known(places, of, known[matrices])
            for warp in warps[matrices].T[..., None]:
                self._loaded[places, warp] = self._clocks.known[of, warp, warp]
            # All threads of a warp wait for its products together, so no single thread loads.
            self._least[places] = self._most[places] = NOBODY
            offsets = addresses[matrices].reshape(-1)
            owners = np.repeat(programs[matrices], addresses.shape[1])
            offsets = self._offsets(offsets, num_bytes, owners, "load")
            rows = units_of(offsets, num_bytes, unit_of(num_bytes))
            return elements_of(self._data, num_bytes)[rows].view(np.uint8)

        return read

    def start_copy(
        self, addresses: Addresses, program: int, known: Places, barrier: int, epoch: int
    ) -> Callable[[Bytes], None]:
        """Start a copy by the copy engine: write garbage to the target until the data land.

        Args:
            addresses: Addresses of the chunks in shared memory.
            program: Program that the memory belongs to.
            known: Clocks that the thread that asks for the copy knows, and those up to its proxy
                fences, i32[2, warps + barriers].
            barrier: Column in the clocks of the mbarrier that reports the copy.
            epoch: Phase of the mbarrier that reports it.

        Returns:
            Function that writes the data, u8[chunks, CHUNK_BYTES].

        Raises:
            EmulationError: Other warps may still access the target, or threads stored there
                without a proxy fence since.
        """
        programs = np.full(len(addresses), program)
        offsets = self._offsets(addresses, CHUNK_BYTES, programs, "copy")
        traced = units_of(offsets, CHUNK_BYTES, TRACED)
        rows = np.broadcast_to(known[0], (len(addresses), known.shape[1]))
        changes = np.ones((len(addresses), 1), dtype=bool)
        self._check_over(traced, programs[:, None], rows, None, changes)
        if self._is_unfenced(traced, np.broadcast_to(known[1], rows.shape)):
            msg = "the copy engine writes where threads did since the last proxy fence"
            raise EmulationError(msg)
        self._writer[traced], self._stored[traced] = barrier, epoch
        words = units_of(offsets, CHUNK_BYTES, 8)
        held = elements_of(self._data, CHUNK_BYTES)
        held[words] = np.full(1, GARBAGE, dtype=np.uint8).repeat(8).view(held.dtype)

        def land(data: Bytes) -> None:
            held[words] = data.view(held.dtype)

        return land

    def hold(self, address: int, num_bytes: int, program: int, warp: int) -> None:
        """Reserve the place at which a warp initialises an mbarrier: refuse loads and stores."""
        programs, known = np.array([[program]]), self._clocks.known[program, warp][None]
        traced = self._units(address, num_bytes, program)
        changes = np.ones((1, 1), dtype=bool)
        self._check_over(traced, programs, known, np.array([[warp]]), changes)
        self._writer[traced] = MBARRIER

    def give_back(self, address: int, num_bytes: int, program: int, warp: int) -> None:
        """Free the place of an mbarrier, for warps that know that it is gone."""
        traced = self._units(address, num_bytes, program)
        self._writer[traced], self._storer[traced] = warp, NOBODY
        self._needs_fence[traced] = False
        self._stored[traced] = self._clocks.known[program, warp, warp]

    def _units(self, address: int, num_bytes: int, program: int) -> Places:
        offsets = self._offsets(np.array([address]), num_bytes, np.array([program]), "mbarrier")
        return units_of(offsets, num_bytes, TRACED)

    def _is_unfenced(self, traced: Places, fenced: Places) -> bool:
        """Return whether threads stored to places [parties, units] later than `fenced` says."""
        writer = self._writer[traced]
        is_of_warp = (writer >= 0) & (writer < self._num_warps) & self._needs_fence[traced]
        seen = np.take_along_axis(fenced, np.where(is_of_warp, writer, 0), axis=1)
        return bool((is_of_warp & (self._stored[traced] > seen)).any())

    def _check_known(self, traced: Places, programs: Places, known: Places) -> None:
        """Refuse loads of places [parties, units] that others stored to later than `known` says."""
        writer, places = self._writer[traced], self._at(traced, programs)
        if (writer == MBARRIER).any():
            msg = f"load of an mbarrier, at {int(places[writer == MBARRIER][0])}"
            raise EmulationError(msg)
        is_new = self._stored[traced] > np.take_along_axis(known, np.maximum(writer, 0), axis=1)
        is_new &= writer != NOBODY
        by_copy = writer >= self._num_warps
        refuse_race(is_new & by_copy, places, "load what a copy brings that nobody waited for")
        refuse_race(is_new, places, "load what others stored")

    def _check_over(
        self,
        traced: Places,
        programs: Places,
        known: Places,
        warps: Places | None,
        changes: Lanes,
    ) -> None:
        """Refuse stores to places [parties, units] that others accessed later than `known` says."""
        writer, places = self._writer[traced], self._at(traced, programs)
        if (writer == MBARRIER).any():
            msg = f"store over an mbarrier, at {int(places[writer == MBARRIER][0])}"
            raise EmulationError(msg)
        is_new = self._stored[traced] > np.take_along_axis(known, np.maximum(writer, 0), axis=1)
        is_new &= (writer != NOBODY) & changes
        by_copy = writer >= self._num_warps
        refuse_race(is_new & by_copy, places, "store where a copy does that nobody waited for")
        refuse_race(is_new, places, "store where others did")
        loaded = self._loaded[traced]  # [parties, units, warps]
        is_new = loaded > known[:, None, : self._num_warps]
        if warps is not None:
            is_new &= np.arange(self._num_warps) != warps[:, :, None]
        refuse_race(is_new.any(axis=2) & changes, places, "store where others load")

    def _at(self, traced: Places, programs: Places) -> Places:
        """Return the address of each place, in bytes from the start of its program's memory."""
        return traced * TRACED - programs * self._stride
