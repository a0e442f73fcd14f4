"""Shared memory of programs whose warps meet only at barriers of the whole program."""

from collections.abc import Callable

import numpy as np

from perf.emulator.errors import EmulationError
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

UNFENCED = "tensor cores read what was written to shared memory since the last proxy fence"

NOBODY = np.iinfo(np.int32).max

TRACED = 2
"""Bytes that share one record of accesses. No kernel is known to store a single byte."""


class SharedBytes:
    """Shared memory of several programs."""

    def __init__(self, num_programs: int, num_bytes: int) -> None:
        # Each program begins at a multiple of 1024 bytes, so that its matrices stay aligned.
        self.num_bytes = num_bytes
        self._stride = -(-num_bytes // 1024) * 1024
        self._data = np.full(num_programs * self._stride, GARBAGE, dtype=np.uint8)

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


class SharedMemory(SharedBytes):
    """Shared memory of each program, and for each place its accesses since the last barrier.

    Two threads race if one stores at a place where the other loads or stores, without a barrier in
    between. For two threads of one warp, a barrier of the warp is enough. A store that changes
    nothing is no race.

    Tensor cores read through another proxy. After threads, or their copies, have written, all
    threads of the program must run a proxy fence before tensor cores read there.
    """

    def __init__(
        self,
        num_programs: int,
        num_warps: int,
        num_bytes: int,
        *,
        may_stores_differ: bool = False,
    ) -> None:
        super().__init__(num_programs, num_bytes)
        self._num_warps = num_warps
        self._may_stores_differ = may_stores_differ
        count = len(self._data) // TRACED
        self._writer = np.full(count, NOBODY, dtype=np.int32)
        self._least = np.full(count, NOBODY, dtype=np.int32)
        self._most = np.full(count, -1, dtype=np.int32)
        # Accesses are numbered. `_stored`, `_loaded` and `_unfenced` have the last store, load, and
        # store that needs a fence, of each place. `_fenced` has the last access before a fence of
        # each program, and `_synced` the last access before a barrier of each warp.
        self._stored = np.zeros(count, dtype=np.int32)
        self._loaded, self._unfenced = np.zeros_like(self._stored), np.zeros_like(self._stored)
        self._num_accesses = 0
        self._fenced = np.zeros(num_programs, dtype=np.int32)
        self._synced = np.zeros(num_programs * num_warps, dtype=np.int32)

    def fence(self, programs: Lanes | None) -> None:
        """Let tensor cores see what these programs have stored; None for all."""
        self._fenced[slice(None) if programs is None else programs] = self._num_accesses

    def for_products(
        self, addresses: Addresses, num_bytes: int, lanes: Places
    ) -> Callable[[Lanes], Bytes]:
        """Return a function that reads some of these matrices for tensor cores, later.

        Args:
            addresses: Addresses of the elements, [matrices, elements].
            num_bytes: Bytes of an element.
            lanes: First lane of the group of warps that multiplies each matrix.

        Raises:
            EmulationError: An element was written after the last proxy fence. The function itself
                raises the errors of `read`.
        """
        programs, threads = np.divmod(lanes, self._num_warps * WARP)
        traced = (addresses + (programs * self._stride)[:, None]) // TRACED
        if (self._unfenced[traced] > self._fenced[programs][:, None]).any():
            raise EmulationError(UNFENCED)
        # A barrier of a warp does not order reads of tensor cores, so they get a thread number
        # that no warp has.
        readers = -WARP * (1 + threads // GROUP)

        def read(matrices: Lanes) -> Bytes:
            parties = (
                np.repeat(each[matrices], addresses.shape[1]) for each in (programs, readers)
            )
            return self.read(addresses[matrices].reshape(-1), num_bytes, *parties)

        return read

    def warp_barrier(self, warps: Lanes | None) -> None:
        """Separate earlier accesses of these warps from their later ones; None for all warps."""
        self._synced[slice(None) if warps is None else warps] = self._num_accesses

    def barrier(self, programs: Lanes | None) -> None:
        """Separate earlier accesses of these programs from later ones; None for all programs."""
        for traces, nobody in ((self._writer, NOBODY), (self._least, NOBODY), (self._most, -1)):
            if programs is None:
                traces.fill(nobody)
            else:
                traces.reshape(len(programs), -1)[programs] = nobody

    def keep(self, programs: Lanes) -> None:
        """Keep only the memory of these programs, because the others have ended."""
        for name in (
            "_data", "_writer", "_least", "_most", "_stored", "_loaded", "_unfenced", "_fenced",
            "_synced",
        ):  # fmt: skip
            held = getattr(self, name).reshape(len(programs), -1)
            setattr(self, name, held[programs].reshape(-1))

    def read(
        self, addresses: Addresses, num_bytes: int, programs: Parties, threads: Parties
    ) -> Bytes:
        """Return the bytes u8[len(addresses), num_bytes] that `threads` of `programs` load.

        Raises:
            EmulationError: An address is outside of shared memory or not a multiple of
                `num_bytes`, or there is a race.
        """
        offsets = self._offsets(addresses, num_bytes, programs, "load")
        traced, threads = units_of(offsets, num_bytes, TRACED), threads[:, None]
        warps = threads // WARP
        writer, least, most = self._writer[traced], self._least[traced], self._most[traced]
        refuse_race(
            (writer != NOBODY) & (writer // WARP != warps), traced, "load what others stored"
        )
        synced = self._synced[programs[:, None] * self._num_warps + warps]
        near = (writer != NOBODY) & (writer != threads) & (self._stored[traced] > synced)
        refuse_race(near, traced, "load what others of their warp stored")
        # Forget loads by this warp alone that came before its last barrier.
        is_past = (least // WARP == warps) & (most // WARP == warps)
        is_past &= self._loaded[traced] <= synced
        least, most = np.where(is_past, NOBODY, least), np.where(is_past, -1, most)
        # If several lanes have one place, numpy keeps the last assignment. Lanes are sorted by
        # thread, so this is the highest thread, and in reverse order the lowest.
        self._least[traced[::-1]] = np.minimum(least, threads)[::-1]
        self._most[traced] = np.maximum(most, threads)
        self._num_accesses += 1
        self._loaded[traced] = self._num_accesses
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
        traced, threads = units_of(offsets, num_bytes, TRACED), threads[:, None]
        warps = threads // WARP
        writer, least, most = self._writer[traced], self._least[traced], self._most[traced]
        is_read, is_written = least != NOBODY, writer != NOBODY
        far = is_read & ((least // WARP != warps) | (most // WARP != warps))
        refuse_race(far & changes, traced, "store where others load")
        far = is_written & (writer // WARP != warps)
        refuse_race(far & changes, traced, "store where others did")
        synced = self._synced[programs[:, None] * self._num_warps + warps]
        near = is_read & ((least != threads) | (most != threads)) & (self._loaded[traced] > synced)
        refuse_race(near & changes, traced, "store where others of their warp load")
        near = is_written & (writer != threads) & (self._stored[traced] > synced)
        refuse_race(near & changes, traced, "store where others of their warp did")
        self._writer[traced] = threads
        self._num_accesses += 1
        self._stored[traced] = self._num_accesses
        self._unfenced[traced] = self._num_accesses if needs_fence else 0
        held[rows] = words
        if not self._may_stores_differ:
            refuse_race(held[rows] != words, rows, "store different values at once")
