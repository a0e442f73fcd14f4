"""Small pages of page tables whose small pages are whole large pages."""

from collections.abc import Sequence
from typing import cast

from jenga.arena.eviction_queue import EvictionQueue
from jenga.arena.large_pages import LargePages
from jenga.arena.page_runs import stretches_of
from jenga.arena.small_pages import (
    Budget,
    Sharing,
    add_users,
    check_extra_users,
    remove_users,
    unused_of,
)
from jenga.errors import InvariantError
from jenga.page_ids import LargePageId, OwnerId, SmallPageId


class WholePages:
    """Small pages of a page table that has one per large page, each under the id of its large page.

    Attributes:
        index: Index of the page table.
        pages_per_large: Always 1.
        stamps: Small page -> its entry in the eviction queue if it is evictable, else `NOT_QUEUED`.
        extra_users: Used small page -> number of its users beyond the first.
        evicted: Evicted small pages, until the caller handles them and clears the list.
        num_used: Number of used small pages.
        num_evictable: Number of evictable small pages.
        num_spare: Number of unused small pages in large pages in use. Always 0.
        num_evicted_alone: Number of small pages evicted one by one. Always 0, since they are
            evicted as large pages.
        num_evicted_own: Number of small pages evicted with their large page for this page table.
        num_evicted_foreign: Number of small pages evicted with their large page for another one.
        num_evicted_with_checkpoint: Number of small pages emptied so far with the last checkpoint
            that needed them.
    """

    __slots__ = (
        "_ids",
        "_large_pages",
        "_queue",
        "evicted",
        "extra_users",
        "index",
        "num_evictable",
        "num_evicted_alone",
        "num_evicted_foreign",
        "num_evicted_own",
        "num_evicted_with_checkpoint",
        "num_spare",
        "num_used",
        "pages_per_large",
        "stamps",
    )

    def __init__(self, index: int, large_pages: LargePages) -> None:
        self._large_pages = large_pages
        # A small page has the id of its large page, so the ids and the queue are those of both.
        self._ids = cast("list[SmallPageId]", large_pages.ids)
        self._queue = cast("EvictionQueue[SmallPageId]", large_pages.reclaimable)
        self.index = index
        self.pages_per_large = 1
        self.stamps = self._queue.stamps
        self.extra_users: dict[SmallPageId, int] = {}
        self.evicted: list[SmallPageId] = []
        self.num_used = self.num_evictable = self.num_spare = 0
        self.num_evicted_alone = self.num_evicted_own = self.num_evicted_foreign = 0
        self.num_evicted_with_checkpoint = 0

    @property
    def num_large(self) -> int:
        """Number of large pages held."""
        return self.num_used + self.num_evictable

    def costs_checkpoint(self, num_taken: int = 0) -> bool:
        """Whether taking another small page would evict a checkpoint.

        Args:
            num_taken: Number of empty large pages that other page tables take before.
        """
        return self._large_pages.is_pinned_next(self._queue.peek_rank(), num_taken)

    def rank(self, page: SmallPageId) -> int:
        """Return the rank of an evictable page."""
        return self._queue.rank(page)

    def ids_of_run(self, start: int, end: int) -> list[SmallPageId]:
        """Return the ids of consecutive pages, as the same objects as handed out."""
        return self._ids[start:end]

    def prepare_sharing(self, pages: Sequence[SmallPageId]) -> Sharing:
        """Prepare the sharing of pages. Nothing may change before they are shared."""
        revived = [
            unused_of(pages[start:end], self.stamps, in_run=in_run)
            for start, end, in_run in stretches_of(pages, self._ids)
        ]
        num_revived_large = sum(map(len, revived))
        return Sharing(
            pages=pages,
            revived=revived,
            revived_of={},
            num_revived_large=num_revived_large,
            added_spare=0,
        )

    def share_pages(self, pages: Sequence[SmallPageId]) -> None:
        """Add a user to each page, which is used or evictable."""
        self.share_prepared(self.prepare_sharing(pages))

    def share_prepared(self, sharing: Sharing) -> None:
        """Add a user to pages, as prepared by `prepare_sharing`."""
        num_revived = sharing.num_revived_large
        if num_revived < len(sharing.pages):
            add_users(self.extra_users, sharing.pages, self.stamps)
        for pages in sharing.revived:
            self._queue.drop_many(pages)
        self.num_used += num_revived
        self.num_evictable -= num_revived

    def take(
        self,
        num_pages: int,
        _expected_pages: int,
        _owner: OwnerId,
        _budget: Budget,
        _beside: SmallPageId,
    ) -> list[SmallPageId]:
        """Take small pages that were empty or evictable. Each has one user then."""
        large_pages = self._large_pages
        if num_pages == 1 and large_pages.num_empty:
            self.num_used += 1
            return cast("list[SmallPageId]", [large_pages.open(self.index)])
        large_pages.make_empty(num_pages, self.index)
        self.num_used += num_pages
        return cast("list[SmallPageId]", large_pages.open_many(self.index, num_pages))

    def release(self, pages: Sequence[SmallPageId]) -> None:
        """Remove one user from each page. Pages without a user become empty."""
        unused = remove_users(self.extra_users, pages) if self.extra_users else list(pages)
        self.num_used -= len(unused)
        self._large_pages.close_many(cast("list[LargePageId]", unused))

    def release_cached_page(self, page: SmallPageId, rank: int) -> None:
        """Do the work of `release_cached` for one page."""
        if page in self.extra_users:
            remove_users(self.extra_users, [page])
            return
        self.num_used -= 1
        self.num_evictable += 1
        self._queue.push(page, rank)

    def rerank(self, pages: Sequence[SmallPageId], ranks: Sequence[int]) -> None:
        """Change the ranks of evictable pages."""
        for page, rank in zip(reversed(pages), reversed(ranks), strict=True):
            self._queue.push(page, rank)

    def discard(self, pages: Sequence[SmallPageId]) -> None:
        """Make evictable pages empty."""
        self._queue.drop_many(pages)
        self._large_pages.close_many(cast("list[LargePageId]", list(pages)))
        self.num_evictable -= len(pages)

    def release_cached(self, pages: Sequence[SmallPageId], ranks: Sequence[int]) -> None:
        """Remove one user from each page. Unused pages become evictable with their ranks."""
        if self.extra_users and not self.extra_users.keys().isdisjoint(pages):
            rank_of = dict(zip(pages, ranks, strict=True))
            pages = remove_users(self.extra_users, pages)
            ranks = [rank_of[page] for page in pages]
        self.num_used -= len(pages)
        self.num_evictable += len(pages)
        # Start with the last page, which is evicted first, so that ranks rise.
        for start, end, in_run in reversed(stretches_of(pages, self._ids)):
            some = (
                cast("Sequence[SmallPageId]", range(pages[start], pages[end - 1] + 1))
                if in_run
                else pages[start:end]
            )
            self._queue.extend(some, ranks[start:end])

    def evict_large(self, large: LargePageId) -> list[SmallPageId]:
        """Close an evictable page, and return it."""
        self._large_pages.reclaimable.drop(large)
        self.num_evictable -= 1
        self._large_pages.close(large)
        return [SmallPageId(large)]

    def evictable_pages(self, large: LargePageId) -> list[SmallPageId]:
        """Return the small pages whose cached content would be lost with a large page."""
        return [SmallPageId(large)] if self.stamps[large] >= 0 else []

    def next_alone(self, _most: int) -> list[SmallPageId]:
        """Return nothing. These pages are evicted as large pages."""
        return []

    def release_claim(self, owner: OwnerId) -> None:
        """Do nothing. An owner never has a claim."""

    def check(self) -> None:
        """Raise `InvariantError` unless the counts are those of the pages."""
        holders = self._large_pages.holders
        held = [page for page in self._ids if holders[page] == self.index]
        evictable = [page for page in held if self.stamps[page] >= 0]
        if (self.num_used, self.num_evictable) != (len(held) - len(evictable), len(evictable)):
            msg = (
                f"page table {self.index} holds {len(held)} pages, {len(evictable)} evictable; "
                f"{self.num_used} used and {self.num_evictable} evictable counted"
            )
            raise InvariantError(msg)
        check_extra_users(self.extra_users, set(held) - set(evictable))
