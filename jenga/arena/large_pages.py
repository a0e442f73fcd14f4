"""The upper level of the allocator: large pages that are empty, held or reclaimable."""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from jenga.arena.eviction_queue import NOT_QUEUED, EvictionQueue
from jenga.arena.ranks import PINNED_RANK
from jenga.errors import InvariantError
from jenga.page_ids import NULL_LARGE_PAGE, LargePageId, SmallPageId

NOT_HELD = -1
"""Holder of a large page that no page table holds."""


class Holder(Protocol):
    """A page table as the upper level sees it: large pages can be taken from it.

    Attributes:
        evicted: Evicted small pages, until the caller handles them and clears the list.
        num_evicted_own: Number of small pages evicted with their large page for this page table.
        num_evicted_foreign: Number of small pages evicted with their large page for another one.
    """

    evicted: list[SmallPageId]
    num_evicted_own: int
    num_evicted_foreign: int

    def evict_large(self, large: LargePageId) -> list[SmallPageId]:
        """Close a reclaimable large page. Return the small pages whose cached content is lost."""
        ...

    def evictable_pages(self, large: LargePageId) -> list[SmallPageId]:
        """Return the small pages whose cached content would be lost with a large page."""
        ...


class LargePages:
    """Large pages of the arena.

    Attributes:
        holders: Large page -> index of the page table that holds it, or `NOT_HELD`.
        reclaimable: Held large pages without a used small page, by the rank of the youngest small
            page.
        evictor: Evicts a checkpoint when the lowest rank is `PINNED_RANK` or more. None if no page
            has such a rank.
        num_evicted: Number of small pages evicted so far, in all page tables, without those that
            became empty with a checkpoint.
        num_emptied: Number of large pages evicted so far.
        ids: Ids of the null page and of all large pages ever opened, consecutive.
        num_certain: Number of large pages that can always be held, without the null page.
        num_empty: Number of large pages that no page table holds, without the null page.
        num_owned: Number of large pages that can be held now, without the null page.
        num_pages: Number of large pages of the arena, including the null page.
        source: Asked for further large pages before content is evicted, with the number that is
            missing. None if all large pages of the arena are there from the start.
        tables: The page tables, in the order of their indices.
    """

    __slots__ = (
        "_foreign",
        "_free",
        "evictor",
        "holders",
        "ids",
        "num_certain",
        "num_emptied",
        "num_empty",
        "num_evicted",
        "num_owned",
        "num_pages",
        "reclaimable",
        "source",
        "tables",
    )

    def __init__(self, num_pages: int, owned: Sequence[LargePageId] | None = None) -> None:
        """Start with all large pages empty.

        Args:
            num_pages: Number of large pages of the arena, including the null page.
            owned: Large pages that can be held at first. `add` and `remove` change them. None means
                all of the arena.
        """
        self.num_pages = num_pages
        self.tables: list[Holder] = []
        self.evictor: Callable[[], bool] | None = None
        self.reclaimable: EvictionQueue[LargePageId] = EvictionQueue(num_pages)
        self.holders = [NOT_HELD] * num_pages
        self._free: list[LargePageId] = []
        self.ids = [NULL_LARGE_PAGE]
        self.num_empty = self.num_owned = self.num_certain = num_pages - 1
        self.num_evicted = self.num_emptied = 0
        self.source: Callable[[int], None] | None = None
        self._foreign: set[LargePageId] = set()  # large pages that others have
        if owned is not None:
            self._open_ids(num_pages)
            self._foreign.update(self.ids[1:])
            self.num_empty = self.num_owned = 0
            self.add(owned)
            self.num_certain = len(owned)

    @property
    def num_available(self) -> int:
        """Number of large pages that are empty or can be emptied."""
        return self.num_empty + self.reclaimable.num_queued

    def _open_ids(self, end: int) -> None:
        """Create the ids up to `end`, so that each exists once and all are in a row."""
        self.ids += cast("Sequence[LargePageId]", range(len(self.ids), end))

    def open(self, holder: int) -> LargePageId:
        """Give an empty large page to a page table. There must be one."""
        self.num_empty -= 1
        if self._free:
            large = self._free.pop()
        else:
            large = LargePageId(len(self.ids))
            self.ids.append(large)
        self.holders[large] = holder
        return large

    def open_many(self, holder: int, num_pages: int) -> list[LargePageId]:
        """Give several empty large pages to a page table. There must be enough."""
        self.num_empty -= num_pages
        free = self._free
        from_free = min(num_pages, len(free))
        larges = free[len(free) - from_free :]
        larges.reverse()
        del free[len(free) - from_free :]
        if from_free < num_pages:
            start = len(self.ids)
            self._open_ids(start + num_pages - from_free)
            larges += self.ids[start:]
        holders = self.holders
        for large in larges:
            holders[large] = holder
        return larges

    def close(self, large: LargePageId) -> None:
        """Take back a large page whose small pages are all empty."""
        self.holders[large] = NOT_HELD
        self._free.append(self.ids[large])
        self.num_empty += 1

    def close_many(self, larges: list[LargePageId]) -> None:
        """Take back large pages whose small pages are all empty."""
        holders = self.holders
        for large in larges:
            holders[large] = NOT_HELD
        # Backwards, so that consecutive pages are opened in rising order.
        self._free.extend(reversed(larges))
        self.num_empty += len(larges)

    def make_empty(self, num_pages: int, taker: int) -> None:
        """Evict for a page table until `num_pages` large pages are empty.

        As many must be available. Pages that no checkpoint needs are evicted first, then
        checkpoints.
        """
        if self.source is not None and self.num_empty < num_pages:
            self.source(num_pages - self.num_empty)
        while self.num_empty < num_pages:
            self.evict_next(taker)

    def evict_next(self, taker: int = NOT_HELD) -> None:
        """Evict a checkpoint, or else the large page that comes first. There must be one.

        Args:
            taker: Page table that needs a large page, or `NOT_HELD`.
        """
        if not self.evicts_checkpoint(self.reclaimable.peek_rank()):
            self._evict_oldest(taker)

    def evicts_checkpoint(self, rank: int) -> bool:
        """Evict a checkpoint if it is next. Return whether one was evicted.

        Args:
            rank: Lowest rank among the pages that could be evicted, or `NOT_QUEUED`.
        """
        return (rank >= PINNED_RANK or rank < 0) and self.evictor is not None and self.evictor()

    def is_pinned_next(self, rank: int, num_taken: int = 0) -> bool:
        """Whether a checkpoint has to go before any page can be had.

        It is false if there is a source that may have a large page.

        Args:
            rank: Lowest rank among the pages that could be evicted, or `NOT_QUEUED`.
            num_taken: Number of empty large pages that others take before.
        """
        return self.num_empty <= num_taken and self.source is None and rank >= PINNED_RANK

    def _evict_oldest(self, taker: int) -> None:
        """Empty the reclaimable large page of the lowest rank. There must be one."""
        large = self.reclaimable.peek()
        if large == NOT_QUEUED:
            msg = "no large page is empty or reclaimable"
            raise InvariantError(msg)
        holder = self.holders[large]
        table = self.tables[holder]
        pages = table.evict_large(large)
        table.evicted += pages
        self.num_evicted += len(pages)
        self.num_emptied += 1
        if holder == taker:
            table.num_evicted_own += len(pages)
        else:
            table.num_evicted_foreign += len(pages)

    # Large pages of an arena that others use too

    def add(self, larges: Sequence[LargePageId]) -> None:
        """Add large pages that others had. They are empty, and may hold any bytes.

        Raises:
            InvariantError: One of them is here already, or not of the arena. Nothing was changed.
        """
        if len(set(larges)) < len(larges) or not self._foreign.issuperset(larges):
            msg = f"large pages {list(larges)} are added that others do not have"
            raise InvariantError(msg)
        self._foreign.difference_update(larges)
        self._free.extend(self.ids[large] for large in reversed(larges))
        self.num_empty += len(larges)
        self.num_owned += len(larges)

    def remove(self, num_pages: int) -> list[LargePageId]:
        """Remove empty large pages, for others. There must be enough."""
        first = len(self._free) - num_pages
        larges = self._free[first:]
        del self._free[first:]
        self._foreign.update(larges)
        self.num_empty -= num_pages
        self.num_owned -= num_pages
        return larges

    def close_reclaimable(self) -> None:
        """Close all reclaimable large pages.

        Nothing records their pages as evicted. The caller must know that all cached content is
        lost.
        """
        while self.reclaimable.num_queued:
            large = self.reclaimable.peek()
            self.tables[self.holders[large]].evict_large(large)

    def check(self) -> None:
        """Raise `InvariantError` unless every large page is either empty or held, once."""
        self.reclaimable.check()
        empty = [*self._free, *range(len(self.ids), self.num_pages)]
        held = [page for page, holder in enumerate(self.holders) if holder != NOT_HELD]
        if sorted([NULL_LARGE_PAGE, *empty, *held, *self._foreign]) != list(range(self.num_pages)):
            msg = f"of {self.num_pages} large pages {empty} are empty and {held} are held"
            raise InvariantError(msg)
        if self.ids != list(range(len(self.ids))):
            msg = "the ids of large pages opened are not in a row"
            raise InvariantError(msg)
        if len(empty) != self.num_empty or len(empty) + len(held) != self.num_owned:
            msg = (
                f"{len(empty)} large pages are empty and {len(held)} held, {self.num_empty} empty "
                f"of {self.num_owned} counted"
            )
            raise InvariantError(msg)
