"""The books of a shared arena: which engine has which large page, in one mapped file.

Each field has one writer. The broker writes owners of large pages and agreements with engines. An
engine writes how many of its large pages are empty or evictable. The file outlives the broker, and
a broker that starts again reads it.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jenga.broker.processes import Process
from jenga.checks import check_count
from jenga.errors import InvariantError
from jenga.page_ids import LargePageId

NOBODY = 0
"""Owner of a large page that the broker can lend. An engine's number as an owner is its row + 1."""

NUM_ROWS = 64
"""Most engines that can share an arena."""

MAX_PROCESSES = 16
"""Most processes of one engine that map the arena."""

MAX_PAGES = 1 << 24
"""Most large pages of an arena. It limits the file of books to 32 MiB."""

_MAGIC = b"JENGABK1"
_HEADER = struct.Struct("<8sQQQ")  # magic, bytes of a large page, large pages, free large pages
_NUM_FREE_OFFSET = 24
_ROWS_OFFSET = 4096
_ROW_BYTES = 512
_AGREED = struct.Struct("<QQQQ64s")  # is joined, limit, guarantee, number of processes, name
_PROCESSES_OFFSET = 128
_PROCESS = struct.Struct("<QQ")
_SUPPLY_OFFSET = 448
_SUPPLY = struct.Struct("<QQd")
_OWNERS_OFFSET = _ROWS_OFFSET + NUM_ROWS * _ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement between the broker and an engine.

    Attributes:
        name: Name of the engine, for people.
        guarantee_pages: Number of large pages that the engine always has.
        limit_pages: Largest number of large pages that it may have.
        processes: Its processes. The first one speaks with the broker. The large pages are free
            once all of them have ended.
    """

    name: str
    guarantee_pages: int
    limit_pages: int
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Large pages that an engine could return, as it said last.

    Attributes:
        num_empty: Number of large pages that stay without content.
        num_evictable: Number of large pages with cached content and no used small page.
        oldest_s: Monotonic time at which the checkpoint that is evicted next was last used.
            Infinite if there is none.
    """

    num_empty: int = 0
    num_evictable: int = 0
    oldest_s: float = math.inf


class Books:
    """The mapped file.

    Attributes:
        large_page_bytes: Size of a large page in bytes.
        num_pages: Number of large pages, including the null page.
    """

    def __init__(self, path: Path) -> None:
        """Map an existing file of books.

        Raises:
            FileNotFoundError: There is no file.
            ValueError: The file is not one of books, or is cut off.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            num_bytes = os.fstat(descriptor).st_size
            head = os.pread(descriptor, _HEADER.size, 0)
            if len(head) < _HEADER.size or not head.startswith(_MAGIC):
                msg = f"{path} is not a file of a broker's books of this version"
                raise ValueError(msg)
            _, self.large_page_bytes, self.num_pages, _ = _HEADER.unpack(head)
            if num_bytes != _OWNERS_OFFSET + 2 * self.num_pages:
                msg = (
                    f"{path} must have {_OWNERS_OFFSET + 2 * self.num_pages} bytes for "
                    f"{self.num_pages} large pages, but has {num_bytes}"
                )
                raise ValueError(msg)
            self._map = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        view = memoryview(self._map)
        self._owners = view[_OWNERS_OFFSET:].cast("H")
        self._num_free = view[_NUM_FREE_OFFSET : _NUM_FREE_OFFSET + 8].cast("Q")

    @classmethod
    def create(cls, path: Path, *, large_page_bytes: int, num_pages: int) -> "Books":
        """Make the file for an arena without engines, and map it.

        Args:
            path: The file, which must not exist.
            large_page_bytes: Size of a large page in bytes.
            num_pages: Number of large pages, including the null page.

        Raises:
            FileExistsError: The file exists.
            ValueError: A number is out of its range.
        """
        check_count("large_page_bytes", large_page_bytes, least=1)
        check_count("num_pages", num_pages, least=2)
        if num_pages > MAX_PAGES:
            msg = f"num_pages must be at most {MAX_PAGES}, got {num_pages}; use larger large pages"
            raise ValueError(msg)
        unfinished = path.with_name(f"{path.name}.unfinished")
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _OWNERS_OFFSET + 2 * num_pages)
            header = _HEADER.pack(_MAGIC, large_page_bytes, num_pages, num_pages - 1)
            os.pwrite(descriptor, header, 0)
        finally:
            os.close(descriptor)
        os.link(unfinished, path)
        unfinished.unlink()
        return cls(path)

    # Large pages

    @property
    def num_free(self) -> int:
        """Number of large pages that the broker can lend at once. Only the broker knows exactly."""
        return self._num_free[0]

    @num_free.setter
    def num_free(self, num_pages: int) -> None:
        self._num_free[0] = num_pages

    def owner(self, page: LargePageId) -> int:
        """Return the row of the engine that has a large page, plus one, or `NOBODY`."""
        return self._owners[page]

    def set_owner(self, page: LargePageId, owner: int) -> None:
        """Record the owner of a large page. Only the broker may do so."""
        self._owners[page] = owner

    def pages_of(self, owner: int) -> list[LargePageId]:
        """Return the large pages of an owner, rising, without the null page."""
        owners = self._owners.tolist()
        return [LargePageId(page) for page in range(1, self.num_pages) if owners[page] == owner]

    # Engines

    def agreement(self, row: int) -> Agreement | None:
        """Return the agreement in a row, or None if no engine has it."""
        start = _row_start(row)
        is_joined, limit, guarantee, num_processes, name = _AGREED.unpack_from(self._map, start)
        if not is_joined:
            return None
        places = range(min(num_processes, MAX_PROCESSES))
        return Agreement(
            name=name.rstrip(b"\0").decode(errors="replace"),
            guarantee_pages=guarantee,
            limit_pages=limit,
            processes=tuple(
                Process(*_PROCESS.unpack_from(self._map, _process_start(row, place)))
                for place in places
            ),
        )

    def agreements(self) -> Iterator[tuple[int, Agreement]]:
        """Yield the rows of engines, with their agreements."""
        for row in range(NUM_ROWS):
            agreement = self.agreement(row)
            if agreement is not None:
                yield row, agreement

    def write_agreement(self, row: int, agreement: Agreement) -> None:
        """Give a row to an engine, or change its agreement. Only the broker may do so."""
        for place, process in enumerate(agreement.processes):
            start = _process_start(row, place)
            _PROCESS.pack_into(self._map, start, process.pid, process.start_ticks)
        name = agreement.name.encode()[:63]
        numbers = agreement.limit_pages, agreement.guarantee_pages, len(agreement.processes)
        _AGREED.pack_into(self._map, _row_start(row), 1, *numbers, name)

    def clear_agreement(self, row: int) -> None:
        """Free a row. Only the broker may do so."""
        self.write_supply(row, Supply())
        _AGREED.pack_into(self._map, _row_start(row), 0, 0, 0, 0, b"")

    def supply(self, row: int) -> Supply:
        """Return what the engine of a row could return."""
        start = _row_start(row) + _SUPPLY_OFFSET
        num_empty, num_evictable, oldest_s = _SUPPLY.unpack_from(self._map, start)
        return Supply(num_empty=num_empty, num_evictable=num_evictable, oldest_s=oldest_s)

    def write_supply(self, row: int, supply: Supply) -> None:
        """Record what an engine could return. Only that engine may do so."""
        start = _row_start(row) + _SUPPLY_OFFSET
        numbers = supply.num_empty, supply.num_evictable, supply.oldest_s
        _SUPPLY.pack_into(self._map, start, *numbers)

    def check(self) -> None:
        """Raise `InvariantError` unless each large page is free or belongs to an engine.

        No engine may have more than its limit. Guarantees must sum to what exists. Call it in the
        broker's process, between two messages.
        """
        counts: dict[int, int] = {}
        for owner in self._owners.tolist()[1:]:
            counts[owner] = counts.get(owner, 0) + 1
        num_free, guaranteed = counts.pop(NOBODY, 0), 0
        if self._owners[0] != NOBODY or num_free != self.num_free:
            msg = f"{num_free} large pages are free, {self.num_free} are counted"
            raise InvariantError(msg)
        for row, agreement in self.agreements():
            guaranteed += agreement.guarantee_pages
            num_held = counts.pop(row + 1, 0)
            if num_held > agreement.limit_pages:
                msg = f"engine {agreement.name!r} has {num_held} large pages: {agreement}"
                raise InvariantError(msg)
        if counts or guaranteed > self.num_pages - 1:
            msg = f"large pages of no engine: {counts}; {guaranteed} guaranteed in all"
            raise InvariantError(msg)

    @contextmanager
    def closing(self) -> Iterator["Books"]:
        """Unmap the file at the end of a `with` block."""
        try:
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """Unmap the file. The object cannot be used any more."""
        self._owners.release()
        self._num_free.release()
        self._map.close()


def _row_start(row: int) -> int:
    return _ROWS_OFFSET + row * _ROW_BYTES


def _process_start(row: int, place: int) -> int:
    return _row_start(row) + _PROCESSES_OFFSET + place * _PROCESS.size
