"""Shared memory of an emulated GPU, where whole programs meet at barriers and nowhere else."""

from collections.abc import Callable

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.memory import (
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
"""Bytes whose accesses are remembered together: no store of a single byte is known."""


class SharedBytes:
    """Shared memory of several programs."""

    def __init__(self, num_programs: int, num_bytes: int) -> None:
        # Matrices of several programs are aligned as those of one.
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
    """What the warps of each program share, and who accessed it since the last barrier.

    Two threads race where one stores what the other stored or loads, with no barrier in between, of
    their warp if both are of one. A store of what is there already is no race.

    Tensor cores read through another proxy: what threads or their copies wrote there needs a fence
    in between, by all of them.
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

    def for_products(
        self, addresses: Addresses, num_bytes: int, lanes: Places
    ) -> Callable[[Lanes], Bytes]:
        """What reads, for some matrices and later, what tensor cores multiply.

        Args:
            addresses: Of the elements, [matrices, elements].
            num_bytes: Of an element.
            lanes: First one of the group of warps that has each matrix.

        Raises:
            EmulationError: Something there was written after the last fence; the function raises it
                as `read` does.
        """
        programs, threads = np.divmod(lanes, self._num_warps * WARP)
        traced = (addresses + (programs * self._stride)[:, None]) // TRACED
        if (self._unfenced[traced] > self._fenced[programs][:, None]).any():
            raise EmulationError(UNFENCED)
        # No barrier of a warp orders what tensor cores read.
        readers = -WARP * (1 + threads // GROUP)

        def read(matrices: Lanes) -> Bytes:
            parties = (
                np.repeat(each[matrices], addresses.shape[1]) for each in (programs, readers)
            )
            return self.read(addresses[matrices].reshape(-1), num_bytes, *parties)

        return read

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

        Raises:
            EmulationError: An address is outside or no multiple of `num_bytes`, or there is a race.
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
        # What threads of this warp alone loaded before its last barrier is forgotten.
        is_past = (least // WARP == warps) & (most // WARP == warps)
        is_past &= self._loaded[traced] <= synced
        least, most = np.where(is_past, NOBODY, least), np.where(is_past, -1, most)
        # Of lanes at one place the last counts: threads ascend, and descend in reverse.
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
        """Write rows of `data`, for tensor cores behind a fence or not; see `read`."""
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
