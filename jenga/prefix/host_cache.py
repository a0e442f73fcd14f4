"""Host memory: content that the arena evicts is kept there, in pages of the same sizes.

Host memory is cut like the arena and managed on the same two levels. Its small pages hold what
small pages of the arena held. Only pages of checkpoints are copied to it. A request that hits
content there gets copies in its own pages, and the content stays. If these pages are evicted again,
nothing is copied. Content is lost from host memory in the order in which it came or was last asked
for.

Copies are orders. The engine makes them before the kernels of a step run, one after the other.
Content may therefore be copied out of a page that is given away in the same step. Copies of content
that will probably be evicted in the next step are separate (`write_back_pages`). They run
concurrently with the kernels.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import cast, overload

from jenga.arena.allocator import Allocator
from jenga.errors import InvariantError
from jenga.page_ids import HostPageId, OwnerId, SmallPageId
from jenga.prefix.copy_orders import CopyOrders
from jenga.tables.content_index import ChangeLog, ContentIndex, RecordingIndex
from jenga.tables.found_pages import FoundPages
from jenga.tables.page_table import Table
from jenga.tables.request import CopyPath, PageCopy, PrefixHit, Request
from jenga.tables.stats import MemoryReport, check_memory, host_table_memory

_OWNER = OwnerId(1)
"""Owner of all pages while they are filled. Any positive number would do."""

_PLACE_BITS = 28
"""Low bits of a rank that hold a page's place among pages stored together. Time is above them."""

_SCAN_PAGES = 64
"""Number of pages searched at first for one that is nowhere. It doubles with each search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Content and traffic of host memory.

    Attributes:
        cached_bytes: Bytes that can be found there now.
        stored_bytes: Bytes copied there since start-up.
        loaded_bytes: Bytes copied from there since start-up.
        ahead_bytes: Part of both that was copied during a step, before it was necessary.
        lost_bytes: Bytes evicted from there since start-up.
    """

    cached_bytes: int
    stored_bytes: int
    loaded_bytes: int
    ahead_bytes: int
    lost_bytes: int


class EitherPages(Sequence[int | None]):
    """Whether keys have pages in the arena or in host memory: a page of either, or None.

    A number does not say which memory the page is in. `in_arena` and `on_host` do.

    Attributes:
        in_arena: Pages of the arena.
        on_host: Pages of host memory, for the same keys.
    """

    __slots__ = ("_num_before_gap", "in_arena", "on_host")

    def __init__(self, in_arena: FoundPages, on_host: FoundPages) -> None:
        """Create the sequence without looking anything up.

        Args:
            in_arena: Pages of the arena.
            on_host: Pages of host memory, for the same keys.
        """
        self.in_arena = in_arena
        self.on_host = on_host
        self._num_before_gap: int | None = None

    def __len__(self) -> int:
        return len(self.in_arena)

    @overload
    def __getitem__(self, index: int) -> int | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int | None]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int | None] | None:
        if isinstance(index, slice):
            found = self.in_arena[index]
            if None not in found:
                return found
            return [
                there if page is None else page
                for page, there in zip(found, self.on_host[index], strict=True)
            ]
        page = self.in_arena[index]
        return self.on_host[index] if page is None else page

    def index(self, value: int | None, start: int = 0, stop: int = maxsize) -> int:
        """Return the first place of a page, or of None. Keys are looked up as far as that place."""
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
            start = self.in_arena.index(None)
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
    """Records which content is in which page of host memory.

    Inside, its pages are small pages of its own allocator. Outside, they are `HostPageId`s.

    Attributes:
        num_lost: Number of pages evicted from there so far.
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
        copies: CopyOrders,
        *,
        num_large_pages: int,
        changes: ChangeLog | None = None,
    ) -> None:
        """Start with all pages empty.

        Args:
            tables: Page tables of the arena.
            copies: Receives the copies that must be made.
            num_large_pages: Number of large pages of host memory, including one that is never used.
            changes: Records changes of the content here. None records none.

        Raises:
            ValueError: There are fewer large pages than the unused one and one for each page table.
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
        self._caches: list[ContentIndex] = []
        for index, pages in enumerate(self._allocator.tables):
            num_pages = num_large_pages * pages.pages_per_large
            self._caches.append(
                ContentIndex(num_pages, pages.ids_of_run)
                if changes is None
                else RecordingIndex(num_pages, pages.ids_of_run, index, changes, is_on_host=True)
            )
        self._time = 0
        self._stored_bytes = self._ahead_bytes = self._loaded_bytes = self._lost_bytes = 0
        self.num_lost = 0

    @property
    def allocator(self) -> Allocator:
        """Allocator of its pages."""
        return self._allocator

    def either(self, table: Table, found: FoundPages, keys: Sequence[Hashable]) -> EitherPages:
        """Look keys up here too, after they were looked up in the arena.

        Args:
            table: The page table.
            found: Pages of the keys in the arena.
            keys: Keys as for `ContentIndex.find`.
        """
        return EitherPages(found, self._caches[table.index].find(keys))

    # Copies from the arena

    def store(self, table: Table, pages: Sequence[SmallPageId]) -> None:
        """Order copies of pages that leave the arena, unless their content is here already.

        Args:
            table: Page table of the pages. Its cache still has their keys.
            pages: Pages in the order of their text.
        """
        leaving = pages[::-1]
        if not leaving or table.cache is None:
            return
        keys, get = table.cache.keys, self._caches[table.index].get
        new = [page for page in leaving if get(keys[page]) is None]
        self._time += 1
        self._renew(table.index, [there for page in leaving if (there := get(keys[page]))])
        self._copies.order_copies(self._bring(table, new))

    def write_back_pages(self, table: Table, pages: Sequence[SmallPageId]) -> list[PageCopy]:
        """Return copies of pages that will soon leave the arena. The pages stay there until then.

        When they leave, their content is here already, and only becomes the last to be lost.
        Content that was here before does not become the last now. It is still in both memories, and
        would outlast content that is only here.

        Args:
            table: Page table of the pages. Its cache has their keys.
            pages: Pages in the order of their text.
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

    def _renew(self, index: int, pages: Sequence[SmallPageId]) -> None:
        """Make pages the last to be evicted, the first of them first."""
        own, first = self._allocator.tables[index], self._time << _PLACE_BITS
        unused = [page for page in pages if own.stamps[page] >= 0]
        own.rerank(unused, range(first, first + len(unused)))

    def _bring(self, table: Table, leaving: Sequence[SmallPageId]) -> list[PageCopy]:
        """Take pages for content that is new here, as many as there is room for."""
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
        # Consecutive pages of the arena become consecutive pages here, so that they are one copy.
        page_of = dict(zip(sorted(leaving), taken[index], strict=True))
        pages = [page_of[page] for page in leaving]
        cache.insert(pages, [table.cache.keys[page] for page in leaving])
        first = self._time << _PLACE_BITS
        own.release_cached(pages, [first + place for place in range(len(pages))])
        self._stored_bytes += len(pages) * table.spec.small_page_bytes
        host_page_of = cast("dict[SmallPageId, HostPageId]", page_of)
        return [
            PageCopy(table_index=index, source=source, target=target, path=CopyPath.TO_HOST)
            for source, target in host_page_of.items()
        ]

    def _forget_evicted(self) -> None:
        for table, own, cache in zip(
            self._tables, self._allocator.tables, self._caches, strict=True
        ):
            if own.evicted:
                cache.forget(own.evicted)
                self._count_lost(table, len(own.evicted))
                own.evicted.clear()

    def drop(self, table: Table, key: Hashable) -> None:
        """Drop the content under a key, if there is any, because better content exists."""
        cache, own = self._caches[table.index], self._allocator.tables[table.index]
        page = cache.get(key)
        if page is not None:
            cache.forget([page])
            own.discard([page])
            self._count_lost(table, 1)

    def _count_lost(self, table: Table, num_pages: int) -> None:
        self.num_lost += num_pages
        self._lost_bytes += num_pages * table.spec.small_page_bytes

    # Copies to the arena

    def page_of(self, table: Table, key: Hashable) -> HostPageId | None:
        """Return the page under a key here, or None."""
        page = self._caches[table.index].get(key)
        return None if page is None else HostPageId(page)

    def pin_pages(self, table: Table, pages: Sequence[HostPageId]) -> None:
        """Keep pages until they are loaded, even if others are stored before."""
        self._allocator.tables[table.index].share_pages(cast("Sequence[SmallPageId]", pages))

    def unpin_pages(self, table: Table, pages: Sequence[HostPageId]) -> None:
        """Undo `pin_pages`. The pages become the last to be evicted, the first page last of all."""
        self._unpin_pages(table.index, pages)

    def prefetch_pages(
        self, table: Table, sources: Sequence[HostPageId], targets: Sequence[SmallPageId]
    ) -> list[PageCopy]:
        """Return copies of held pages to arena pages that a later step will read.

        Args:
            table: Page table of the pages.
            sources: Pages here, in the order of their numbers in the text.
            targets: Pages of the arena.
        """
        self._time += 1
        num_bytes = len(sources) * table.spec.small_page_bytes
        self._loaded_bytes += num_bytes
        self._ahead_bytes += num_bytes
        self._unpin_pages(table.index, sources)
        return [
            PageCopy(table_index=table.index, source=source, target=target, path=CopyPath.FROM_HOST)
            for source, target in zip(sources, targets, strict=True)
        ]

    def _unpin_pages(self, index: int, pages: Sequence[HostPageId]) -> None:
        """Release held pages and make them the last to be evicted, the first page last of all."""
        first = self._time << _PLACE_BITS
        ranks = range(first + len(pages) - 1, first - 1, -1)
        self._allocator.tables[index].release_cached(cast("Sequence[SmallPageId]", pages), ranks)

    def pin_hit(self, hit: PrefixHit) -> None:
        """Do the work of `pin_pages` for all pages that a hit reads from here."""
        for index, pages in self._hosted(hit):
            self.pin_pages(self._tables[index], pages)

    def order_loads(self, hit: PrefixHit, request: Request) -> None:
        """Order copies of a pinned hit to the pages that its request has taken.

        Copies of states go to the request's running states, and `Checkpoints.copy_states` orders
        them.
        """
        self._time += 1
        for index, pages in self._hosted(hit):
            table = self._tables[index]
            if table.policy.is_overwritten:
                self._loaded_bytes += len(pages) * table.spec.small_page_bytes
            else:
                self._order_loads(table, request, hit.host_pages[index])
            self._unpin_pages(index, pages)

    def order_image_loads(
        self, table: Table, request: Request, sources: Mapping[int, HostPageId]
    ) -> None:
        """Order copies of pinned pages of images to the pages that a running request has taken.

        Args:
            table: Page table of the images.
            request: The request.
            sources: Number of a page in the page table of the request -> its page here.
        """
        self._time += 1
        self._order_loads(table, request, sources)
        self.unpin_pages(table, list(dict.fromkeys(sources.values())))

    def _order_loads(
        self, table: Table, request: Request, sources: Mapping[int, HostPageId]
    ) -> None:
        """Order copies to the pages that a request has. Of images that come later it has none."""
        own_pages = request.pages.small_pages[table.index]
        for number, source in sources.items():
            if number < len(own_pages) and own_pages[number] > 0:
                self._loaded_bytes += table.spec.small_page_bytes
                self._copies.order_copy(
                    PageCopy(
                        table_index=table.index,
                        source=source,
                        target=own_pages[number],
                        path=CopyPath.FROM_HOST,
                    )
                )

    @staticmethod
    def _hosted(hit: PrefixHit) -> Iterable[tuple[int, list[HostPageId]]]:
        """Yield each page table that a hit reads from here: its index, and the pages here."""
        for index, pages in enumerate(hit.host_pages):
            if pages:
                # An image that a request shows twice is here once.
                yield index, list(dict.fromkeys(pages.values()))

    # Host memory as a whole

    def forget_table(self, table: Table) -> None:
        """Forget all content of one page table. None of its pages may be pinned."""
        cache = self._caches[table.index]
        pages = [SmallPageId(page) for page, key in enumerate(cache.keys) if key is not None]
        if pages:
            cache.forget(pages)
            self._allocator.tables[table.index].discard(pages)
            self._count_lost(table, len(pages))

    def clear(self) -> None:
        """Forget all content."""
        for cache in self._caches:
            cache.clear()
        self._allocator.large_pages.close_reclaimable()
        self.num_lost += 1

    def memory(self) -> MemoryReport:
        """Return where every byte of host memory is."""
        # Small pages tile their large page, in every page table.
        table = self._tables[0]
        large_page_bytes = table.pages.pages_per_large * table.spec.small_page_bytes
        return MemoryReport(
            tables=tuple(host_table_memory(table, self._allocator) for table in self._tables),
            empty_large_bytes=self._allocator.large_pages.num_empty * large_page_bytes,
            null_bytes=large_page_bytes,
        )

    def report(self) -> HostReport:
        """Return the bytes cached here, and the bytes copied since start-up."""
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
        """Raise `InvariantError` unless every page is empty, or has a key and is evictable."""
        self._allocator.check()
        memory = self.memory()
        check_memory(memory, self._allocator.large_pages.num_pages * memory.null_bytes)
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
