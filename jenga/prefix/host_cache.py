"""What the arena evicts, kept in host memory in pages of the same sizes until it is asked for.

Host memory is cut as the arena is, and lives by the same two levels: a small page of it holds what
one of the arena held. Only what checkpoints had is brought there. What a request hits
there is copied to pages of its own, and stays: if these are evicted again, nothing is copied. What
goes from there is lost, in the order in which it came or was last asked for.

Copies are orders: whoever executes a step makes them before its kernels run, one after the other.
So content may be ordered out of a page that is given away in the same step. Those of what is likely
to leave in the next step are apart, and are made beside the kernels.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import overload

from jenga.arena.allocator import Allocator
from jenga.errors import InvariantError
from jenga.tables.content_index import CacheChange, PrefixCache, RecordingCache
from jenga.tables.found_pages import FoundPages
from jenga.tables.page_table import Table
from jenga.tables.request import (
    MISSING,
    CopyPath,
    PageCopy,
    PrefixHit,
    Request,
    host_page,
    is_on_host,
)

_OWNER = 1
"""Whose all pages are while they are filled; any positive number."""

_PLACE_BITS = 28
"""Room for a page's place among those that came together, below the time."""

_SCAN_PAGES = 64
"""Pages looked at together at first, where one is sought that is nowhere; then twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What host memory held and brought.

    Attributes:
        cached_bytes: What can be found there now.
        stored_bytes: Copied there since start-up.
        loaded_bytes: Copied from there since start-up.
        ahead_bytes: Of both, what was copied beside a step before it had to be.
        lost_bytes: Evicted from there since start-up.
    """

    cached_bytes: int
    stored_bytes: int
    loaded_bytes: int
    ahead_bytes: int
    lost_bytes: int


class EitherPages(Sequence[int | None]):
    """Pages of keys in the arena or else, by what `is_on_host` knows them by, in host memory."""

    __slots__ = ("_found", "_hosted", "_num_before_gap")

    def __init__(self, found: FoundPages, hosted: FoundPages) -> None:
        """Nothing looked up.

        Args:
            found: Pages of the arena.
            hosted: Pages of host memory, of the same keys.
        """
        self._found = found
        self._hosted = hosted
        self._num_before_gap: int | None = None

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, index: int) -> int | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[int | None]: ...
    def __getitem__(self, index: int | slice) -> int | list[int | None] | None:
        if isinstance(index, slice):
            found = self._found[index]
            if None not in found:
                return found
            # As `host_page` says, which would be a call for each of thousands.
            return [
                page if page is not None or there is None else MISSING - there
                for page, there in zip(found, self._hosted[index], strict=True)
            ]
        page = self._found[index]
        if page is None and (there := self._hosted[index]) is not None:
            return host_page(there)
        return page

    def index(self, value: int | None, start: int = 0, stop: int = maxsize) -> int:
        """The first place of a page, or of None; keys are looked up as far as that."""
        if value is not None:
            return super().index(value, start, stop)
        if start:
            return start + self[start:stop].index(None)
        if self._num_before_gap is None:
            self._num_before_gap = self._look_up_to_gap()
        if self._num_before_gap >= min(stop, len(self)):
            msg = "no key is without a page"
            raise ValueError(msg)
        return self._num_before_gap

    def _look_up_to_gap(self) -> int:
        try:
            start = self._found.index(None)
        except ValueError:
            return len(self)
        num_scanned = _SCAN_PAGES
        while start < len(self):
            pages = self[start : start + num_scanned]
            if None in pages:
                return start + pages.index(None)
            start += len(pages)
            num_scanned *= 2
        return start


class HostCache:
    """Books of host memory: which content lies in which of its pages.

    Attributes:
        num_lost: Pages evicted from there so far.
    """

    __slots__ = (
        "_ahead_bytes",
        "_allocator",
        "_caches",
        "_copies",
        "_loaded_bytes",
        "_lost_bytes",
        "_stored_bytes",
        "_tables",
        "_time",
        "num_lost",
    )

    def __init__(
        self,
        tables: Sequence[Table],
        copies: list[PageCopy],
        *,
        num_large_pages: int,
        changes: list[CacheChange] | None = None,
    ) -> None:
        """All pages empty.

        Args:
            tables: Page tables of the arena.
            copies: To which those are added that are to be made.
            num_large_pages: Large pages of host memory, one that is never used included.
            changes: To which changes of what can be found here are added, if given.

        Raises:
            ValueError: Those are less than that one and one for each page table.
        """
        if num_large_pages < 1 + len(tables):
            msg = (
                f"num_host_large_pages must be 0, or at least {1 + len(tables)}: one that is never "
                f"used and one for each of {len(tables)} page tables, got {num_large_pages}"
            )
            raise ValueError(msg)
        self._tables = tables
        self._copies = copies
        self._allocator = Allocator([t.pages.pages_per_large for t in tables], num_large_pages)
        self._caches: list[PrefixCache] = []
        for index, pages in enumerate(self._allocator.tables):
            num_pages = num_large_pages * pages.pages_per_large
            self._caches.append(
                PrefixCache(num_pages, pages.row)
                if changes is None
                else RecordingCache(num_pages, pages.row, index, changes, is_on_host=True)
            )
        self._time = 0
        self._stored_bytes = self._ahead_bytes = self._loaded_bytes = self._lost_bytes = 0
        self.num_lost = 0

    @property
    def allocator(self) -> Allocator:
        """Books of its pages."""
        return self._allocator

    def either(self, table: Table, found: FoundPages, keys: Sequence[Hashable]) -> EitherPages:
        """Look keys up here too.

        Args:
            table: The page table.
            found: Their pages in the arena.
            keys: As for `PrefixCache.find`.
        """
        return EitherPages(found, self._caches[table.index].find(keys))

    # Out of the arena

    def store(self, table: Table, pages: Sequence[int]) -> None:
        """Order copies of pages that leave the arena, as far as they are new here.

        Args:
            table: Their page table, in whose cache they still have their keys.
            pages: In the order of their text.
        """
        leaving = pages[::-1]
        if not leaving or table.cache is None:
            return
        keys, get = table.cache.keys, self._caches[table.index].get
        new = [page for page in leaving if get(keys[page]) is None]
        self._time += 1
        self._renew(table.index, [there for page in leaving if (there := get(keys[page]))])
        self._copies += self._bring(table, new)

    def store_ahead(self, table: Table, pages: Sequence[int]) -> list[PageCopy]:
        """Copies of pages that are about to leave the arena, as `store` says, and stay until then.

        When they leave they are here, and only become the last to be lost. What was here before
        does not yet: it is in both memories still, and would outlast what is here alone.
        """
        leaving = pages[::-1]
        if not leaving or table.cache is None:
            return []
        keys, get = table.cache.keys, self._caches[table.index].get
        new = [page for page in leaving if get(keys[page]) is None]
        if not new:
            return []
        self._time += 1
        copies = self._bring(table, new)
        self._ahead_bytes += len(copies) * table.spec.small_page_bytes
        return copies

    def _renew(self, index: int, pages: Sequence[int]) -> None:
        """Let pages be the last to go, the first of them first."""
        own, first = self._allocator.tables[index], self._time << _PLACE_BITS
        unused = [page for page in pages if own.stamps[page] >= 0]
        own.rerank(unused, range(first, first + len(unused)))

    def _bring(self, table: Table, leaving: Sequence[int]) -> list[PageCopy]:
        """Take pages for content that is new here, as much of it as there is room for at all."""
        index = table.index
        own, cache = self._allocator.tables[index], self._caches[index]
        num_large = self._allocator.large_pages.num_available
        room = own.num_spare + num_large * own.pages_per_large
        leaving = leaving[max(0, len(leaving) - room) :]
        if not leaving or table.cache is None:
            return []
        needs = [0] * len(self._tables)
        needs[index] = len(leaving)
        taken = self._allocator.take(needs, needs, owner=_OWNER)
        if taken is None:
            msg = f"{needs} pages of host memory can be had and cannot"
            raise InvariantError(msg)
        self._forget_evicted()
        # What lies in a row in the arena is to lie in a row here, so that it is one copy.
        page_of = dict(zip(sorted(leaving), taken[index], strict=True))
        pages = [page_of[page] for page in leaving]
        cache.enter(pages, [table.cache.keys[page] for page in leaving])
        first = self._time << _PLACE_BITS
        own.retire(pages, [first + place for place in range(len(pages))])
        self._stored_bytes += len(pages) * table.spec.small_page_bytes
        return [
            PageCopy(table_index=index, source=source, target=target, path=CopyPath.TO_HOST)
            for source, target in page_of.items()
        ]

    def _forget_evicted(self) -> None:
        for table, own, cache in zip(
            self._tables, self._allocator.tables, self._caches, strict=True
        ):
            if own.evicted:
                cache.forget(own.evicted)
                self._note_lost(table, len(own.evicted))
                own.evicted.clear()

    def drop(self, table: Table, key: Hashable) -> None:
        """Let what lies here under a key, if anything does, be lost: there is a better one."""
        cache, own = self._caches[table.index], self._allocator.tables[table.index]
        page = cache.get(key)
        if page is not None:
            cache.forget([page])
            own.discard([page])
            self._note_lost(table, 1)

    def _note_lost(self, table: Table, num_pages: int) -> None:
        self.num_lost += num_pages
        self._lost_bytes += num_pages * table.spec.small_page_bytes

    # Back into it

    def page_of(self, table: Table, key: Hashable) -> int | None:
        """The page that lies here under a key, if one does."""
        return self._caches[table.index].get(key)

    def hold(self, table: Table, pages: Sequence[int]) -> None:
        """Let pages stay until they are loaded, whatever is stored before."""
        self._allocator.tables[table.index].share(pages)

    def load_ahead(
        self, table: Table, sources: Sequence[int], targets: Sequence[int]
    ) -> list[PageCopy]:
        """Copies of pages held, to pages of the arena that will be read in a later step.

        Args:
            table: Their page table.
            sources: Pages here, in the order of their numbers.
            targets: Pages of the arena.
        """
        self._time += 1
        num_bytes = len(sources) * table.spec.small_page_bytes
        self._loaded_bytes += num_bytes
        self._ahead_bytes += num_bytes
        self._let_go(table.index, sources)
        return [
            PageCopy(table_index=table.index, source=source, target=target, path=CopyPath.FROM_HOST)
            for source, target in zip(sources, targets, strict=True)
        ]

    def _let_go(self, index: int, pages: Sequence[int]) -> None:
        """Let pages that were held be the last to go, of those the first ones."""
        first = self._time << _PLACE_BITS
        ranks = range(first + len(pages) - 1, first - 1, -1)
        self._allocator.tables[index].retire(pages, ranks)

    def pin(self, hit: PrefixHit) -> None:
        """As `hold`, of all that a hit reads from here."""
        for index, pages in self._hosted(hit):
            self.hold(self._tables[index], pages)

    def load(self, hit: PrefixHit, request: Request) -> None:
        """Order the copies of a pinned hit to the pages that its request has taken for them.

        Of states, which go to the request's running ones, whoever knows those orders the copies.
        """
        self._time += 1
        for index, pages in self._hosted(hit):
            table = self._tables[index]
            self._loaded_bytes += len(pages) * table.spec.small_page_bytes
            if not table.policy.is_overwritten:
                own_pages = request.pages[index]
                for number, mark in enumerate(hit.pages[index][: len(own_pages)]):
                    if is_on_host(mark) and own_pages[number] > 0:
                        self._copies.append(
                            PageCopy(
                                table_index=index,
                                source=host_page(mark),
                                target=own_pages[number],
                                path=CopyPath.FROM_HOST,
                            )
                        )
            self._let_go(index, pages)

    @staticmethod
    def _hosted(hit: PrefixHit) -> Iterable[tuple[int, list[int]]]:
        """Of each page table that a hit reads from here: its index and the pages of it here."""
        for index, marks in enumerate(hit.pages):
            if hit.has_missing[index]:
                # An image that a request shows twice is there once.
                pages = dict.fromkeys(host_page(mark) for mark in marks if is_on_host(mark))
                if pages:
                    yield index, list(pages)

    # All of it

    def clear(self) -> None:
        """Forget all content."""
        for cache in self._caches:
            cache.clear()
        self._allocator.large_pages.surrender_all()
        self.num_lost += 1

    def report(self) -> HostReport:
        """What lies here, and what was copied since start-up."""
        return HostReport(
            cached_bytes=sum(
                own.num_evictable * table.spec.small_page_bytes
                for table, own in zip(self._tables, self._allocator.tables, strict=True)
            ),
            stored_bytes=self._stored_bytes,
            loaded_bytes=self._loaded_bytes,
            ahead_bytes=self._ahead_bytes,
            lost_bytes=self._lost_bytes,
        )

    def check(self) -> None:
        """Raise `InvariantError` unless every page is empty, or found under a key and evictable."""
        self._allocator.check()
        for table, own, cache in zip(
            self._tables, self._allocator.tables, self._caches, strict=True
        ):
            cache.check()
            cached = [page for page, key in enumerate(cache.keys) if key is not None]
            if own.num_used or own.evicted or any(own.stamps[page] < 0 for page in cached):
                msg = f"host memory of {table.spec.name!r}: {own.num_used} pages are used"
                raise InvariantError(msg)
            if len(cached) != own.num_evictable:
                msg = (
                    f"host memory of {table.spec.name!r}: {len(cached)} pages have keys, "
                    f"{own.num_evictable} are evictable"
                )
                raise InvariantError(msg)
