"""Small pages of page tables that have several in a large page.

A held large page is *in use* while one of its small pages is used, else *reclaimable*.
"""

from collections.abc import Sequence
from typing import cast

from jenga.arena.eviction_queue import NOT_QUEUED
from jenga.arena.page_runs import large_runs_of, parts_by_large
from jenga.arena.small_pages import (
    Budget,
    Sharing,
    add_users,
    extremes,
    extremes_of_parts,
    remove_users,
    rising,
    set_stamps,
)
from jenga.arena.split_books import SplitBooks
from jenga.errors import InvariantError
from jenga.page_ids import NULL_LARGE_PAGE, NULL_PAGE, LargePageId, OwnerId, SmallPageId


class SplitPages(SplitBooks):
    """Small pages of a page table that has several per large page.

    A request that will certainly fill a whole large page claims the one it opens. Others then take
    its empty small pages only when no other small page is empty. All other needs are packed, best
    fit.
    """

    __slots__ = ()

    # Sharing

    def share_pages(self, pages: Sequence[SmallPageId]) -> None:
        """Add a user to each page, which is used or evictable."""
        self.share_prepared(self.prepare_sharing(pages))

    def share_prepared(self, sharing: Sharing) -> None:
        """Add a user to pages, as prepared by `prepare_sharing`."""
        stamps, num_revived = self.stamps, sharing.num_revived
        if num_revived < len(sharing.pages):
            add_users(self.extra_users, sharing.pages, stamps)
        for pages in sharing.revived:
            set_stamps(stamps, pages, NOT_QUEUED)
        used, k = self._used, self.pages_per_large
        empty, evictable = self._empty, self._evictable
        for larges in sharing.whole:
            used[larges[0] : larges[-1] + 1] = [k] * len(larges)
            self._large_pages.reclaimable.drop_many(larges)
        revived_larges: list[LargePageId] = []
        for large, num_unused in sharing.revived_of.items():
            num_empty = len(empty.pages[large])
            was_in_use = used[large]
            used[large] += num_unused
            if not was_in_use:
                revived_larges.append(large)
                if num_empty:
                    empty.mark_in_use(large)
                if used[large] + num_empty < k:
                    evictable.enqueue(large)
            elif used[large] + num_empty == k:
                evictable.dequeue(large)
            elif large in self._loose:
                self._recount(large)
        self._large_pages.reclaimable.drop_many(revived_larges)
        self.num_spare += sharing.added_spare
        self.num_used += num_revived
        self.num_evictable -= num_revived

    # Taking

    def take(
        self,
        num_pages: int,
        expected_pages: int,
        owner: OwnerId,
        budget: Budget,
        beside: SmallPageId,
    ) -> list[SmallPageId]:
        """Take small pages that were empty or evictable. Each has one user then.

        Args:
            num_pages: Number of small pages.
            expected_pages: Number of small pages that the owner will certainly take, including
                these.
            owner: Owner of the pages, any positive number.
            budget: Number of large pages that may be opened. It is updated.
            beside: Small page that the owner uses, whose large page is filled before another one is
                opened, or the null page.
        """
        pages: list[SmallPageId] = []
        claims = self._empty.claims
        if num_pages == 1 and expected_pages < self.pages_per_large and owner not in claims:
            # The common need of decoding is packed, mostly into large pages that are open.
            page = self._empty.take_packed()
            if page != NULL_PAGE:
                self._count_packed(page)
                return [page]
        elif owner in claims:
            self._fill(claims[owner], num_pages, pages)
        elif beside > 0 and expected_pages >= self.pages_per_large:
            large = LargePageId(beside // self.pages_per_large)
            if self._empty.pages[large] and large not in self._empty.owners:
                self._fill(large, num_pages, pages)
        if len(pages) == num_pages:
            return pages
        if expected_pages - len(pages) >= self.pages_per_large:
            self._open_whole((num_pages - len(pages)) // self.pages_per_large, budget, pages)
        while (
            len(pages) < num_pages
            and expected_pages - len(pages) >= self.pages_per_large
            and budget.allows
            and self._large_pages.num_available
        ):
            self._large_pages.make_empty(1, self.index)
            self._claim(self._open_empty(budget), num_pages, owner, pages)
        while len(pages) < num_pages:
            num_used = self._used[self._empty.free.fullest()]  # 0 for the null page
            if not self._large_pages.num_empty and self._take_loose(num_used, pages):
                continue
            large = self._best_fit(budget)
            if large != NULL_LARGE_PAGE:
                self._fill(large, num_pages - len(pages), pages)
            else:
                self._evict(num_pages, budget, pages)
        return pages

    def _count_packed(self, page: SmallPageId) -> None:
        """Count an empty small page of a large page in use that was taken."""
        large = page // self.pages_per_large
        self._used[large] += 1
        if large in self._loose:
            self._recount(LargePageId(large))
        self.num_spare -= 1
        self.num_used += 1

    def _open_whole(self, num_larges: int, budget: Budget, pages: list[SmallPageId]) -> None:
        """Open large pages and take all their small pages, as far as the budget allows."""
        num_available = self._large_pages.num_available
        num_opened = min(num_larges, num_available, budget.required + budget.slack)
        if num_opened <= 0:
            return
        budget.spend(num_opened)
        self._large_pages.make_empty(num_opened, self.index)
        larges = self._large_pages.open_many(self.index, num_opened)
        pages += self._empty.open_taken(larges)
        self._evictable.open(larges)
        for large in larges:
            self._used[large] = self.pages_per_large
        self.num_large += num_opened
        self.num_used += num_opened * self.pages_per_large

    def _claim(
        self, large: LargePageId, num_pages: int, owner: OwnerId, pages: list[SmallPageId]
    ) -> None:
        """Fill an empty large page. Its remaining small pages are claimed by the owner."""
        self._fill(large, num_pages - len(pages), pages)
        self._empty.claim(large, owner)

    def _best_fit(self, budget: Budget) -> LargePageId:
        """Return a large page in use with empty small pages, opened or revived if necessary.

        It is the null page if there is none.
        """
        large = self._empty.free.fullest()
        if large != NULL_LARGE_PAGE:
            return large
        if budget.allows:
            large = self._empty.idle.emptiest()
            if large != NULL_LARGE_PAGE:
                budget.spend()
                self._revive(large)
                return large
            if self._large_pages.num_empty:
                return self._open_empty(budget)
        return self._empty.claimed.emptiest()

    def _evict(self, num_pages: int, budget: Budget, pages: list[SmallPageId]) -> None:
        """Evict a loose page, or else the first of a small page, a large page or a checkpoint.

        Small pages that a checkpoint leaves empty are found in the caller's next search.
        """
        if self._take_loose(-1, pages):
            return
        evictable, large_pages = self._evictable, self._large_pages
        small = evictable.in_use.peek_rank()
        oldest = large_pages.reclaimable.peek_rank() if budget.allows else NOT_QUEUED
        is_small = small >= 0 and (oldest < 0 or small <= oldest)
        if large_pages.evicts_checkpoint(small if is_small else oldest):
            return
        if is_small:
            page = evictable.take_first()
            if page != NULL_PAGE:
                self._take_evicted(page, pages)
        elif oldest < 0:
            msg = f"page table {self.index}: a small page promised cannot be had"
            raise InvariantError(msg)
        elif self._oldest_is_own() and num_pages - len(pages) < self.pages_per_large:
            # Only some of its pages are needed. The others may stay cached.
            budget.spend()
            self._revive(large_pages.reclaimable.peek())
        else:
            large_pages.make_empty(1, self.index)

    def costs_checkpoint(self, num_taken: int = 0) -> bool:
        """Whether taking another small page would evict a checkpoint.

        Args:
            num_taken: Number of empty large pages that other page tables take before.
        """
        empty, evictable = self._empty, self._evictable
        if evictable.loose or any(
            bins.fullest() != NULL_LARGE_PAGE for bins in (empty.free, empty.idle, empty.claimed)
        ):
            return False
        ranks = evictable.in_use.peek_rank(), self._large_pages.reclaimable.peek_rank()
        lowest = min((rank for rank in ranks if rank != NOT_QUEUED), default=NOT_QUEUED)
        return self._large_pages.is_pinned_next(lowest, num_taken)

    def _take_loose(self, num_used: int, pages: list[SmallPageId]) -> bool:
        """Take a loose page of a large page with more than `num_used` used small pages."""
        large = self._evictable.find_loose(self._used)
        if large == NULL_LARGE_PAGE or self._used[large] <= num_used:
            return False
        self._take_evicted(self._evictable.take_loose(large), pages)
        return True

    def _oldest_is_own(self) -> bool:
        oldest = self._large_pages.reclaimable.peek()
        return self._large_pages.holders[oldest] == self.index

    def _take_evicted(self, page: SmallPageId, pages: list[SmallPageId]) -> None:
        """Take a small page of a large page in use whose content was evicted."""
        large = cast("LargePageId", page // self.pages_per_large)
        self._large_pages.num_evicted += 1
        self.evicted.append(page)
        self.num_evicted_alone += 1
        pages.append(page)
        self._used[large] += 1
        if large in self._loose:
            self._recount(large)
        self.num_spare -= 1
        self.num_used += 1
        self.num_evictable -= 1
        if self._used[large] + len(self._empty.pages[large]) == self.pages_per_large:
            self._evictable.dequeue(large)

    def _recount(self, large: LargePageId) -> None:
        """Record how many small pages of a large page in use with loose ones have no user."""
        self._evictable.recount(large, self.pages_per_large - self._used[large])

    def _open_empty(self, budget: Budget) -> LargePageId:
        """Open an empty large page. The caller must take at least one small page of it."""
        budget.spend()
        large = self._large_pages.open(self.index)
        self._empty.open(large)
        self._evictable.open([large])
        self.num_large += 1
        self.num_spare += self.pages_per_large
        return large

    def _revive(self, large: LargePageId) -> None:
        """Put a reclaimable large page to use. The caller must use a small page of it."""
        self._large_pages.reclaimable.drop(large)
        self.num_spare += self.pages_per_large
        self._empty.mark_in_use(large)
        if len(self._empty.pages[large]) < self.pages_per_large:
            self._evictable.enqueue(large)

    def _fill(self, large: LargePageId, num_pages: int, pages: list[SmallPageId]) -> None:
        """Take up to `num_pages` empty small pages of a large page in use."""
        num_taken = self._empty.take(large, num_pages, pages)
        self._used[large] += num_taken
        if large in self._loose:
            self._recount(large)
        self.num_spare -= num_taken
        self.num_used += num_taken

    # Leaving

    def release(self, pages: Sequence[SmallPageId]) -> None:
        """Remove one user from each page. Pages without a user become empty."""
        if self.extra_users:
            pages = remove_users(self.extra_users, pages)
        self.num_used -= len(pages)
        k, empty = self.pages_per_large, self._empty
        for large, start, end, _ in parts_by_large(pages, k, empty.ids):
            num_empty = empty.put_back(large, pages[start:end])
            if not self._leave(large, end - start):
                continue
            if num_empty == k:
                self._close(large)
            else:
                self._large_pages.reclaimable.push(large, self._evictable.youngest[large])

    def release_cached_page(self, page: SmallPageId, rank: int) -> None:
        """Do the work of `release_cached` for one page."""
        if page in self.extra_users:
            remove_users(self.extra_users, [page])
            return
        self.num_used -= 1
        self.num_evictable += 1
        large = cast("LargePageId", page // self.pages_per_large)
        num_used = self._used[large]
        is_first = num_used + len(self._empty.pages[large]) == self.pages_per_large
        self._evictable.add(large, page, rank, is_first=is_first, goes_alone=num_used > 1)
        if num_used > 1:
            self._used[large] = num_used - 1
            if large in self._loose:
                self._recount(large)
            self.num_spare += 1
        else:
            self._leave(large, 1)
            self._large_pages.reclaimable.push(large, self._evictable.youngest[large])

    def rerank(self, pages: Sequence[SmallPageId], ranks: Sequence[int]) -> None:
        """Change the ranks of evictable pages."""
        k = self.pages_per_large
        larges = cast("list[LargePageId]", [page // k for page in pages])
        for large, page, rank in zip(
            reversed(larges), reversed(pages), reversed(ranks), strict=True
        ):
            is_in_use = self._used[large] > 0
            self._evictable.rerank(large, page, rank, goes_alone=is_in_use)
            if not is_in_use:
                self._large_pages.reclaimable.push(large, self._evictable.youngest[large])

    def discard(self, pages: Sequence[SmallPageId]) -> None:
        """Make evictable pages empty."""
        k, evictable, empty = self.pages_per_large, self._evictable, self._empty
        self.num_evictable -= len(pages)
        for large, start, end, _ in parts_by_large(pages, k, empty.ids):
            some = pages[start:end]
            num_left = evictable.remove(large, some)
            if self._used[large]:
                empty.put_back(large, some)
                if not num_left:
                    evictable.dequeue(large)
            elif empty.put_back_idle(large, some) == k:
                self._large_pages.reclaimable.drop(large)
                self._close(large)
            else:
                self._large_pages.reclaimable.push(large, evictable.youngest[large])

    def release_cached(self, pages: Sequence[SmallPageId], ranks: Sequence[int]) -> None:
        """Remove one user from each page. Unused pages become evictable with their ranks."""
        if self.extra_users and not self.extra_users.keys().isdisjoint(pages):
            rank_of = dict(zip(pages, ranks, strict=True))
            pages = remove_users(self.extra_users, pages)
            ranks = [rank_of[page] for page in pages]
        self.num_used -= len(pages)
        self.num_evictable += len(pages)
        k, evictable = self.pages_per_large, self._evictable
        all_ranks = rising(ranks) if isinstance(ranks, range) else list(ranks)
        unused: list[LargePageId] = []
        # Start with the last page, which is evicted first, so that ranks rise.
        for large, start, end in reversed(self._set_ranks(pages, all_ranks)):
            if end - start > k:
                larges = range(large, large + (end - start) // k)
                self._used[large : larges.stop] = [0] * len(larges)
                lows, highs = extremes_of_parts(
                    all_ranks[start:end], k, is_even=isinstance(ranks, range)
                )
                evictable.note_run(larges, lows, highs)
                unused += cast("Sequence[LargePageId]", larges[::-1])
                continue
            lowest, highest = extremes(ranks[start:end])
            if end - start == k:
                # The large page has no other small pages, so only its ranks are recorded.
                self._used[large] = 0
                evictable.note_whole(large, lowest, highest)
                unused.append(large)
            elif self._release_some(large, pages[start], end - start, lowest, highest):
                unused.append(large)
        youngest = evictable.youngest
        self._large_pages.reclaimable.extend(unused, [youngest[large] for large in unused])

    def _set_ranks(
        self, pages: Sequence[SmallPageId], ranks: list[int]
    ) -> list[tuple[LargePageId, int, int]]:
        """Store the ranks of pages that become evictable.

        Returns:
            The pages by large page, as (large page, start, end). An entry with more pages than a
            large page has stands for consecutive whole large pages.
        """
        stamps, k, ids = self.stamps, self.pages_per_large, self._empty.ids
        parts: list[tuple[int, int, int]] = []
        for start, end, in_run in large_runs_of(pages, k, ids):
            some = pages[start:end]
            if in_run:
                stamps[some[0] : some[0] + end - start] = ranks[start:end]
                parts.append((some[0] // k, start, end))
            else:
                for page, rank in zip(some, ranks[start:end], strict=True):
                    stamps[page] = rank
                parts += [
                    (large, start + i, start + j) for large, i, j, _ in parts_by_large(some, k, ids)
                ]
        return cast("list[tuple[LargePageId, int, int]]", parts)

    def _release_some(
        self, large: LargePageId, page: SmallPageId, num_left: int, lowest: int, highest: int
    ) -> bool:
        """Update the records of a large page when some of its small pages became evictable.

        Args:
            large: The large page.
            page: The small page, if it is only one.
            num_left: Number of small pages that became evictable.
            lowest: Lowest of their ranks.
            highest: Highest of their ranks.

        Returns:
            Whether they were the last used ones.
        """
        evictable = self._evictable
        if self._used[large] + len(self._empty.pages[large]) == self.pages_per_large:
            # No other small page of it is evictable.
            evictable.eldest[large] = lowest
        evictable.note(large, page, num_left, lowest, highest)
        if self._leave(large, num_left):
            return True
        if evictable.in_use.stamps[large] < 0 or evictable.in_use.rank(large) > lowest:
            evictable.enqueue(large)
        return False

    def _leave(self, large: LargePageId, num_left: int) -> bool:
        """Record that small pages of a large page in use lost their user. Return whether all did.

        The large page is then neither closed nor reclaimable yet.
        """
        num_used = self._used[large] - num_left
        self._used[large] = num_used
        if num_used:
            if large in self._loose:
                self._recount(large)
            self.num_spare += num_left
            return False
        self.num_spare -= self.pages_per_large - num_left
        self._empty.mark_idle(large)
        self._evictable.dequeue(large)
        return True

    def _close(self, large: LargePageId) -> None:
        self._empty.close(large)
        self._evictable.close(large)
        self.num_large -= 1
        self._large_pages.close(large)

    def evict_large(self, large: LargePageId) -> list[SmallPageId]:
        """Close a reclaimable large page. Return the small pages whose cached content is lost."""
        self._large_pages.reclaimable.drop(large)
        self._empty.idle.remove(large, len(self._empty.pages[large]))
        lost = self._evictable.take_all(large)
        self.num_evictable -= len(lost)
        self._close(large)
        return lost

    def release_claim(self, owner: OwnerId) -> None:
        """Give up the owner's claim, if it has one."""
        self._empty.release_claim(owner)
