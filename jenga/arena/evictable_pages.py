"""Evictable small pages of the large pages that one page table holds, in eviction order.

A large page without a user is evicted as a whole. The order of small pages therefore matters only
in large pages in use. It is built on the first request for it, because most large pages are given
away without one.

A small page that no checkpoint needs is *loose*. Loose pages of large pages in use are evicted
before everything else, and those of the fullest large page first. By age alone, the pages that a
request takes would be scattered over many large pages, and each of these would stay in use because
of it.
"""

from collections.abc import Sequence
from typing import cast

from jenga.arena.best_fit import Bins
from jenga.arena.eviction_queue import NOT_QUEUED, EvictionQueue
from jenga.arena.ranks import PINNED_RANK
from jenga.errors import InvariantError
from jenga.page_ids import NULL_PAGE, LargePageId, SmallPageId

NO_ORDER: list[int] = []
"""Placeholder for an order that was not built. It is never written."""


class EvictablePages:
    """Ranks of evictable small pages. The lowest rank is evicted first.

    Attributes:
        stamps: Small page -> its rank if it is evictable, else `NOT_QUEUED`.
        eldest: Large page -> lower bound of the ranks of its evictable small pages.
        youngest: Large page -> upper bound of these ranks, which is the rank of its last use.
        in_use: Large pages in use with evictable small pages, by a lower bound of their ranks,
            except those in `loose`.
        loose: Large page in use with loose small pages -> number of its small pages without a user.
    """

    __slots__ = (
        "_fullest",
        "_orders",
        "_pages_per_large",
        "eldest",
        "in_use",
        "loose",
        "stamps",
        "youngest",
    )

    def __init__(self, num_larges: int, pages_per_large: int) -> None:
        self._pages_per_large = pages_per_large
        self.stamps = [NOT_QUEUED] * (num_larges * pages_per_large)
        self.eldest = [0] * num_larges
        self.youngest = [0] * num_larges
        self.in_use: EvictionQueue[LargePageId] = EvictionQueue(num_larges)
        self.loose: dict[LargePageId, int] = {}
        self._fullest = Bins()  # the pages of `loose`, by that number
        # For each large page, entries of its evictable small pages in order. Some may be stale.
        self._orders = [NO_ORDER] * num_larges

    def open(self, larges: Sequence[LargePageId]) -> None:
        """Add large pages without evictable small pages."""
        for large in larges:
            self.youngest[large] = 0

    def close(self, large: LargePageId) -> None:
        """Forget a large page without evictable small pages."""
        self._orders[large] = NO_ORDER

    def enqueue(self, large: LargePageId) -> None:
        """Queue a large page in use, so that its evictable small pages are evicted one by one."""
        if large not in self.loose:
            self.in_use.push(large, self.eldest[large])

    def dequeue(self, large: LargePageId) -> None:
        """Take a large page out of the queue, if it is there: no small page is evicted alone."""
        if large in self.loose:
            self._fullest.remove(large, self.loose.pop(large))
        else:
            self.in_use.drop(large)

    def recount(self, large: LargePageId, num_unused: int) -> None:
        """Record how many small pages of a large page in `loose` have no user."""
        self._fullest.move(large, self.loose[large], num_unused)
        self.loose[large] = num_unused

    def add(
        self, large: LargePageId, page: SmallPageId, rank: int, *, is_first: bool, goes_alone: bool
    ) -> None:
        """Record that one small page became evictable.

        Args:
            large: Its large page.
            page: The small page.
            rank: Its rank.
            is_first: Whether no other small page of its large page is evictable.
            goes_alone: Whether its large page stays in use.
        """
        self.stamps[page] = rank
        if is_first or rank < self.eldest[large]:
            self.eldest[large] = rank
        self.youngest[large] = max(self.youngest[large], rank)
        if self._orders[large]:
            self._go_on(large, page, rank)
        if goes_alone and (self.in_use.stamps[large] < 0 or self.in_use.rank(large) > rank):
            self.enqueue(large)

    def rerank(self, large: LargePageId, page: SmallPageId, rank: int, *, goes_alone: bool) -> None:
        """Give an evictable small page another rank.

        Args:
            large: Its large page.
            page: The small page.
            rank: Its new rank.
            goes_alone: Whether its large page is in use.
        """
        old, k = self.stamps[page], self._pages_per_large
        self.stamps[page] = rank
        self.eldest[large] = min(self.eldest[large], rank)
        if rank < old == self.youngest[large]:
            self.youngest[large] = max(self.stamps[large * k : (large + 1) * k])
        else:
            self.youngest[large] = max(self.youngest[large], rank)
        if self._orders[large]:
            self._go_on(large, page, rank)
        if goes_alone and self.in_use.rank(large) > rank:
            self.enqueue(large)

    def note_whole(self, large: LargePageId, lowest: int, highest: int) -> None:
        """Record that all small pages of a large page became evictable at once.

        Args:
            large: The large page.
            lowest: Lowest of their ranks.
            highest: Highest of their ranks.
        """
        self.eldest[large], self.youngest[large] = lowest, highest
        self._orders[large] = NO_ORDER

    def note_run(self, larges: range, lowest: Sequence[int], highest: Sequence[int]) -> None:
        """Do the work of `note_whole` for consecutive large pages, with the ranks of each."""
        first, end = larges.start, larges.stop
        self.eldest[first:end], self.youngest[first:end] = lowest, highest
        self._orders[first:end] = [NO_ORDER] * len(larges)

    def note(
        self, large: LargePageId, page: SmallPageId, num_pages: int, lowest: int, highest: int
    ) -> None:
        """Record that small pages of a large page became evictable, in addition to others.

        Args:
            large: The large page.
            page: The small page, if it is only one.
            num_pages: Number of small pages.
            lowest: Lowest of their ranks.
            highest: Highest of their ranks.
        """
        self.eldest[large] = min(self.eldest[large], lowest)
        self.youngest[large] = max(self.youngest[large], highest)
        if num_pages == 1 and self._orders[large]:
            self._go_on(large, page, lowest)
        else:
            self._orders[large] = NO_ORDER

    def _go_on(self, large: LargePageId, page: SmallPageId, rank: int) -> None:
        """Append a small page to the order of a large page, or drop the order.

        It is dropped if the rank is too low for its end, or if it has too many entries.
        """
        order = self._orders[large]
        entry = rank * len(self.stamps) + page
        if entry > order[-1] and len(order) < 2 * self._pages_per_large:
            order.append(entry)
        else:
            self._orders[large] = NO_ORDER

    def find_loose(self, used: Sequence[int]) -> LargePageId:
        """Return the fullest large page in use with loose small pages, or the null page.

        Args:
            used: Large page -> number of its small pages that have a user.
        """
        in_use, loose, k = self.in_use, self.loose, self._pages_per_large
        while 0 <= in_use.peek_rank() < PINNED_RANK:
            large = in_use.peek()
            in_use.drop(large)
            loose[large] = k - used[large]
            self._fullest.add(large, loose[large])
        while large := self._fullest.fullest():
            rank = self._valid_order(large)[0] // len(self.stamps)
            if rank < PINNED_RANK:
                break
            self._fullest.remove(large, loose.pop(large))
            in_use.push(large, rank)
        return large

    def take_loose(self, large: LargePageId) -> SmallPageId:
        """Take the first small page of the order of the large page that `find_loose` returned.

        It is not evictable any more.
        """
        page = SmallPageId(self._orders[large].pop(0) % len(self.stamps))
        self.stamps[page] = NOT_QUEUED
        return page

    def take_first(self) -> SmallPageId:
        """Take the small page of large pages in use that is next. It is not evictable any more.

        Large pages are ordered by a lower bound of their ranks. If the first bound is too low, it
        is corrected and the null page is returned.
        """
        large = self.in_use.peek()
        order = self._valid_order(large)
        rank, page = divmod(order[0], len(self.stamps))
        if rank > self.in_use.rank(large):
            self.in_use.push(large, rank)
            return NULL_PAGE
        del order[0]
        self.stamps[page] = NOT_QUEUED
        return SmallPageId(page)

    def _valid_order(self, large: LargePageId) -> list[int]:
        """Return the order of a large page's evictable small pages, without stale first entries."""
        stamps, num_stamps, k = self.stamps, len(self.stamps), self._pages_per_large
        order = self._orders[large]
        if not order:
            pages = range(large * k, (large + 1) * k)
            order = sorted(stamps[page] * num_stamps + page for page in pages if stamps[page] >= 0)
            self._orders[large] = order
        num_stale = 0
        while stamps[order[num_stale] % num_stamps] != order[num_stale] // num_stamps:
            num_stale += 1
        del order[:num_stale]
        return order

    def pages_of(self, large: LargePageId) -> list[SmallPageId]:
        """Return the evictable small pages of a large page."""
        stamps, k = self.stamps, self._pages_per_large
        pages = [page for page in range(large * k, (large + 1) * k) if stamps[page] >= 0]
        return cast("list[SmallPageId]", pages)

    def next_alone(self, most: int) -> list[SmallPageId]:
        """Return up to `most` small pages of large pages in use that are evicted next, roughly."""
        rank_of = self.stamps.__getitem__
        first: list[SmallPageId] = []
        for large in self._fullest.in_order():
            first += sorted(self.pages_of(large), key=rank_of)
            if len(first) >= most:
                return first[:most]
        pages: list[SmallPageId] = []
        for large in self.in_use.in_order():
            pages += self.pages_of(large)
            # Large pages are ordered by a lower bound. Pages of the next one may be evicted before
            # these.
            if len(pages) >= 2 * (most - len(first)):
                break
        pages.sort(key=rank_of)
        return (first + pages)[:most]

    def take_all(self, large: LargePageId) -> list[SmallPageId]:
        """Return the evictable small pages of a large page. They are not evictable any more."""
        stamps, pages = self.stamps, self.pages_of(large)
        for page in pages:
            stamps[page] = NOT_QUEUED
        return pages

    def remove(self, large: LargePageId, pages: Sequence[SmallPageId]) -> int:
        """Record that pages of a large page became empty. Return how many are left evictable."""
        stamps, k = self.stamps, self._pages_per_large
        lost_youngest = False
        for page in pages:
            lost_youngest |= stamps[page] >= self.youngest[large]
            stamps[page] = NOT_QUEUED
        self._orders[large] = NO_ORDER
        left = [stamp for stamp in stamps[large * k : (large + 1) * k] if stamp >= 0]
        if left and lost_youngest:
            self.youngest[large] = max(left)
        return len(left)

    def check_queues(self, used: Sequence[int]) -> None:
        """Raise `InvariantError` unless the queues are consistent and agree with the used pages."""
        self.in_use.check()
        self._fullest.check({large: self._pages_per_large - used[large] for large in self.loose})
        self._fullest.check(self.loose)

    def check(self, large: LargePageId, *, is_in_use: bool) -> None:
        """Raise `InvariantError` unless bounds and order of a large page agree with its pages."""
        k, order = self._pages_per_large, self._orders[large]
        pages = range(large * k, (large + 1) * k)
        ranks = {page: self.stamps[page] for page in pages if self.stamps[page] >= 0}
        lowest, highest = min(ranks.values(), default=0), max(ranks.values(), default=0)
        entries = {rank * len(self.stamps) + page for page, rank in ranks.items()}
        goes_alone = bool(ranks) and is_in_use
        is_queued, is_loose = self.in_use.stamps[large] >= 0, large in self.loose
        problems = {
            "evictable pages missing in the order": order and not entries <= set(order),
            "an order that does not rise": order != sorted(set(order)),
            "evictable pages not queued, or twice": goes_alone and is_queued == is_loose,
            "loose without evictable pages, or not in use": is_loose and not goes_alone,
            "rank of the oldest not a lower bound": is_queued
            and goes_alone
            and self.in_use.rank(large) > lowest,
            "rank of the eldest too high": ranks and self.eldest[large] > lowest,
            "rank of the youngest too low": self.youngest[large] < highest,
        }
        for problem, found in problems.items():
            if found:
                msg = f"large page {large}: {problem} (ranks {ranks}, order {order})"
                raise InvariantError(msg)
        if NO_ORDER:
            msg = "the order of a large page that was not asked for was written"
            raise InvariantError(msg)
