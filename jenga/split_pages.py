"""Small pages of page tables that have several in a large page.

A large page that is held is *pinned* while one of its small pages is used, else *reclaimable*.
"""

from collections import Counter
from collections.abc import Sequence

from jenga.bins import NO_PAGE
from jenga.errors import InvariantError
from jenga.evictables import Evictables
from jenga.large_pages import LargePages
from jenga.rows import LEAST_ROW, runs_of
from jenga.small_pages import (
    Budget,
    Sharing,
    add_users,
    check_shares,
    extremes,
    rising,
    set_stamps,
    unshare,
    unused_of,
)
from jenga.vacancies import Vacancies
from jenga.victims import NOT_QUEUED


class SplitPages:
    """Small pages of a page table that has several per large page.

    A request that is certain to fill a whole large page claims the one it opens: others take its
    empty small pages only when nothing else is empty. All other needs are packed, best fit.

    Attributes:
        index: The page table's index.
        pages_per_large: Small pages per large page.
        stamps: Of an evictable small page its rank, else `NOT_QUEUED`.
        shares: Used small page -> its users beyond the first.
        evicted: Small pages evicted, until the caller takes note and clears the list.
        num_used: Small pages used.
        num_evictable: Small pages evictable.
        num_large: Large pages held.
        num_spare: Unused small pages in pinned large pages.
        num_evicted_alone: Small pages evicted one by one so far.
        num_evicted_own: Small pages evicted with their large page for this page table.
        num_evicted_foreign: Small pages evicted with their large page for another one.
    """

    __slots__ = (
        "_evictables",
        "_large_pages",
        "_used",
        "_vacancies",
        "evicted",
        "index",
        "num_evictable",
        "num_evicted_alone",
        "num_evicted_foreign",
        "num_evicted_own",
        "num_large",
        "num_spare",
        "num_used",
        "pages_per_large",
        "shares",
        "stamps",
    )

    def __init__(self, index: int, pages_per_large: int, large_pages: LargePages) -> None:
        num_larges = large_pages.num_pages
        self._large_pages = large_pages
        self.index = index
        self.pages_per_large = pages_per_large
        self._vacancies = Vacancies(num_larges, pages_per_large)
        self._evictables = Evictables(num_larges, pages_per_large)
        self._used = [0] * num_larges  # large page -> used small pages
        self.stamps = self._evictables.stamps
        self.shares: dict[int, int] = {}
        self.evicted: list[int] = []
        self.num_used = self.num_evictable = self.num_large = self.num_spare = 0
        self.num_evicted_alone = self.num_evicted_own = self.num_evicted_foreign = 0

    def rank(self, page: int) -> int:
        """The rank of an evictable page."""
        return self.stamps[page]

    # Sharing

    def sharing(self, pages: Sequence[int]) -> Sharing:
        """What it takes to share pages; nothing may change before they are."""
        used, stamps, k = self._used, self.stamps, self.pages_per_large
        revived: list[Sequence[int]] = []
        revived_of: Counter[int] = Counter()
        if k < LEAST_ROW:
            unused = unused_of(pages, stamps, in_row=False)
            revived.append(unused)
            revived_of.update([page // k for page in unused])
        else:
            for large, start, end, in_row in runs_of(pages, k, self._vacancies.numbers):
                unused = unused_of(pages[start:end], stamps, in_row=in_row)
                if unused:
                    revived.append(unused)
                    revived_of[large] += len(unused)
        num_pinned = sum(not used[large] for large in revived_of)
        return Sharing(
            pages=pages,
            revived=revived,
            revived_of=revived_of,
            num_pinned=num_pinned,
            added_spare=num_pinned * k - sum(map(len, revived)),
        )

    def share(self, pages: Sequence[int]) -> None:
        """Give each page, used or evictable, one user more."""
        self.use(self.sharing(pages))

    def use(self, sharing: Sharing) -> None:
        """Share pages."""
        stamps, num_revived = self.stamps, sharing.num_revived
        if num_revived < len(sharing.pages):
            add_users(self.shares, sharing.pages, stamps)
        for pages in sharing.revived:
            set_stamps(stamps, pages, NOT_QUEUED)
        used, k = self._used, self.pages_per_large
        vacancies, evictables = self._vacancies, self._evictables
        unpinned: list[int] = []
        for large, num_unused in sharing.revived_of.items():
            num_empty = len(vacancies.empties[large])
            was_pinned = used[large]
            used[large] += num_unused
            if not was_pinned:
                unpinned.append(large)
                if num_empty:
                    vacancies.pin(large)
                if used[large] + num_empty < k:
                    evictables.pin(large)
            elif used[large] + num_empty == k:
                evictables.pinned.drop(large)
        self._large_pages.reclaimable.drop_many(unpinned)
        self.num_spare += sharing.added_spare
        self.num_used += num_revived
        self.num_evictable -= num_revived

    # Taking

    def take(
        self, num_pages: int, expected_pages: int, owner: int, budget: Budget, beside: int
    ) -> list[int]:
        """Small pages that were empty or evictable, each with one user.

        Args:
            num_pages: How many.
            expected_pages: Small pages the owner will take for certain, these included.
            owner: For whom; any positive number.
            budget: Large pages that may be opened; written.
            beside: A small page that the owner uses, whose large page is filled before another one
                is opened, or the null page.
        """
        pages: list[int] = []
        claims = self._vacancies.claims
        if num_pages == 1 and expected_pages < self.pages_per_large and owner not in claims:
            # What decoding asks for all the time is packed, mostly into what is open.
            page = self._vacancies.take_packed()
            if page != NO_PAGE:
                self._used[page // self.pages_per_large] += 1
                self.num_spare -= 1
                self.num_used += 1
                return [page]
        elif owner in claims:
            self._fill(claims[owner], num_pages, pages)
        elif beside > 0 and expected_pages >= self.pages_per_large:
            large = beside // self.pages_per_large
            if self._vacancies.empties[large] and large not in self._vacancies.owners:
                self._fill(large, num_pages, pages)
        if len(pages) == num_pages:
            return pages
        while (
            len(pages) < num_pages
            and expected_pages - len(pages) >= self.pages_per_large
            and budget.allows
            and self._large_pages.num_available
        ):
            if not self._large_pages.num_empty:
                self._large_pages.evict_oldest(self.index)
            self._claim(self._open_empty(budget), num_pages, owner, pages)
        while len(pages) < num_pages:
            large = self._best_fit(budget)
            if large == NO_PAGE:
                break
            self._fill(large, num_pages - len(pages), pages)
        while len(pages) < num_pages:
            self._evict(num_pages, budget, pages)
        return pages

    def _claim(self, large: int, num_pages: int, owner: int, pages: list[int]) -> None:
        """Fill an empty large page; what is left of it is the owner's."""
        self._fill(large, num_pages - len(pages), pages)
        self._vacancies.claim(large, owner)

    def _best_fit(self, budget: Budget) -> int:
        """A pinned large page with empty small pages, opened or pinned if need be, or `NO_PAGE`."""
        large = self._vacancies.free.fullest()
        if large != NO_PAGE:
            return large
        if budget.allows:
            large = self._vacancies.idle.emptiest()
            if large != NO_PAGE:
                budget.spend()
                self._pin(large)
                return large
            if self._large_pages.num_empty:
                return self._open_empty(budget)
        return self._vacancies.claimed.emptiest()

    def _evict(self, num_pages: int, budget: Budget, pages: list[int]) -> None:
        """Evict what is oldest: a small page of a pinned large page, or a large page."""
        small = self._evictables.pinned.peek_rank()
        large = self._large_pages.reclaimable.peek_rank() if budget.allows else NOT_QUEUED
        if small >= 0 and (large < 0 or small <= large):
            self._evict_small(pages, small)
        elif large < 0:
            msg = f"page table {self.index}: a small page promised cannot be had"
            raise InvariantError(msg)
        elif self._oldest_is_own() and num_pages - len(pages) < self.pages_per_large:
            # Only some of its pages are needed: the others may stay cached.
            budget.spend()
            self._pin(self._large_pages.reclaimable.peek())
        else:
            self._large_pages.evict_oldest(self.index)
            self._fill(self._open_empty(budget), num_pages - len(pages), pages)

    def _oldest_is_own(self) -> bool:
        oldest = self._large_pages.reclaimable.peek()
        return self._large_pages.holders[oldest] == self.index

    def _evict_small(self, pages: list[int], rank: int) -> None:
        """Take the evictable small page of a pinned large page that goes next.

        Args:
            pages: To which it is added.
            rank: A lower bound of its rank; where that is too low it is corrected instead.
        """
        page = self._evictables.take_first()
        if page == NO_PAGE:
            return
        large = page // self.pages_per_large
        self._large_pages.last_evicted_rank = rank
        self._large_pages.num_evicted += 1
        self.evicted.append(page)
        self.num_evicted_alone += 1
        pages.append(page)
        self._used[large] += 1
        self.num_spare -= 1
        self.num_used += 1
        self.num_evictable -= 1
        if self._used[large] + len(self._vacancies.empties[large]) == self.pages_per_large:
            self._evictables.pinned.drop(large)

    def _open_empty(self, budget: Budget) -> int:
        """Open an empty large page; the caller fills at least one small page of it."""
        budget.spend()
        large = self._large_pages.open(self.index)
        self._vacancies.open(large)
        self._evictables.open(large)
        self.num_large += 1
        self.num_spare += self.pages_per_large
        return large

    def _pin(self, large: int) -> None:
        """Make a reclaimable large page pinned; the caller uses at least one small page of it."""
        self._large_pages.reclaimable.drop(large)
        self.num_spare += self.pages_per_large
        self._vacancies.pin(large)
        if len(self._vacancies.empties[large]) < self.pages_per_large:
            self._evictables.pin(large)

    def _fill(self, large: int, num_pages: int, pages: list[int]) -> None:
        """Take up to `num_pages` empty small pages of a pinned large page."""
        num_taken = self._vacancies.take(large, num_pages, pages)
        self._used[large] += num_taken
        self.num_spare -= num_taken
        self.num_used += num_taken

    # Leaving

    def release(self, pages: Sequence[int]) -> None:
        """Take one user from each page; what has none left becomes empty."""
        if self.shares:
            pages = unshare(self.shares, pages)
        self.num_used -= len(pages)
        k, vacancies = self.pages_per_large, self._vacancies
        for large, start, end, _ in runs_of(pages, k, vacancies.numbers):
            num_empty = vacancies.put_back(large, pages[start:end])
            if not self._leave(large, end - start):
                continue
            if num_empty == k:
                self._close(large)
            else:
                self._large_pages.reclaimable.push(large, self._evictables.youngest[large])

    def retire_page(self, page: int, rank: int) -> None:
        """As `retire` for one page."""
        if page in self.shares:
            unshare(self.shares, [page])
            return
        self.num_used -= 1
        self.num_evictable += 1
        self.stamps[page] = rank
        large = page // self.pages_per_large
        if self._retire_some(large, page, 1, rank, rank):
            self._large_pages.reclaimable.push(large, self._evictables.youngest[large])

    def retire(self, pages: Sequence[int], ranks: Sequence[int]) -> None:
        """Take one user from each page; what has none left becomes evictable, with that rank."""
        if self.shares and not self.shares.keys().isdisjoint(pages):
            rank_of = dict(zip(pages, ranks, strict=True))
            pages = unshare(self.shares, pages)
            ranks = [rank_of[page] for page in pages]
        self.num_used -= len(pages)
        self.num_evictable += len(pages)
        stamps, youngest = self.stamps, self._evictables.youngest
        all_ranks = rising(ranks) if isinstance(ranks, range) else ranks
        by_rows = self.pages_per_large >= LEAST_ROW
        if not by_rows:
            for page, rank in zip(pages, all_ranks, strict=True):
                stamps[page] = rank
        unused: list[int] = []
        # From the last on, since that goes first: ranks rise then.
        for large, start, end, in_row in reversed(
            runs_of(pages, self.pages_per_large, self._vacancies.numbers)
        ):
            if in_row:
                first = pages[start]
                stamps[first : first + end - start] = all_ranks[start:end]
            elif by_rows:
                for page, rank in zip(pages[start:end], all_ranks[start:end], strict=True):
                    stamps[page] = rank
            lowest, highest = extremes(ranks[start:end])
            if end - start == self.pages_per_large:
                # Nothing else is in it, so only its ranks are to be noted.
                self._used[large] = 0
                self._evictables.note_whole(large, lowest, highest)
                unused.append(large)
            elif self._retire_some(large, pages[start], end - start, lowest, highest):
                unused.append(large)
        self._large_pages.reclaimable.extend(unused, [youngest[large] for large in unused])

    def _retire_some(self, large: int, page: int, num_left: int, lowest: int, highest: int) -> bool:
        """Settle the books of a large page of which some small pages became evictable.

        Args:
            large: The large page.
            page: The small page, if it is one.
            num_left: How many.
            lowest: Of their ranks.
            highest: Of their ranks.

        Returns:
            Whether they were the last ones used.
        """
        evictables = self._evictables
        if self._used[large] + len(self._vacancies.empties[large]) == self.pages_per_large:
            # No other is evictable.
            evictables.eldest[large] = lowest
        evictables.note(large, page, num_left, lowest, highest)
        if self._leave(large, num_left):
            return True
        if evictables.pinned.stamps[large] < 0 or evictables.pinned.rank(large) > lowest:
            evictables.pin(large)
        return False

    def _leave(self, large: int, num_left: int) -> bool:
        """Note that small pages of a pinned large page are used no longer; whether it is unpinned.

        Then it is neither closed nor reclaimable yet.
        """
        num_used = self._used[large] - num_left
        self._used[large] = num_used
        if num_used:
            self.num_spare += num_left
            return False
        self.num_spare -= self.pages_per_large - num_left
        self._vacancies.unpin(large)
        self._evictables.pinned.drop(large)
        return True

    def _close(self, large: int) -> None:
        self._vacancies.close(large)
        self._evictables.close(large)
        self.num_large -= 1
        self._large_pages.close(large)

    def surrender(self, large: int) -> list[int]:
        """Close a reclaimable large page; the small pages whose cached content is lost."""
        self._large_pages.reclaimable.drop(large)
        self._vacancies.idle.remove(large, len(self._vacancies.empties[large]))
        lost = self._evictables.take_all(large)
        self.num_evictable -= len(lost)
        self._close(large)
        return lost

    def disown(self, owner: int) -> None:
        """Give up the owner's claim, if it has one."""
        self._vacancies.disown(owner)

    def check(self) -> None:
        """Raise `InvariantError` unless counts, bins and orders are those of the pages."""
        k, index = self.pages_per_large, self.index
        held = [p for p, holder in enumerate(self._large_pages.holders) if holder == index]
        num_evictable = num_spare = 0
        users: set[int] = set()
        for large in held:
            pages = range(large * k, (large + 1) * k)
            empties = self._vacancies.empties[large]
            evictable = {page for page in pages if self.stamps[page] >= 0}
            used = set(pages).difference(empties, evictable)
            is_reclaimable = self._large_pages.reclaimable.stamps[large] >= 0
            problems = {
                "pages both empty and evictable or foreign": sorted([*empties, *evictable, *used])
                != list(pages),
                "small pages not in a row": self._vacancies.numbers[large] != list(pages),
                "used pages counted wrong": len(used) != self._used[large],
                "an empty large page held": len(empties) == k,
                "reclaimable though used, or the reverse": is_reclaimable == bool(used),
            }
            for problem, found in problems.items():
                if found:
                    msg = (
                        f"page table {index}, large page {large}: {problem} (used {sorted(used)}, "
                        f"evictable {sorted(evictable)}, empty {sorted(empties)})"
                    )
                    raise InvariantError(msg)
            self._evictables.check(large, is_pinned=bool(used))
            users |= used
            num_evictable += len(evictable)
            if used:
                num_spare += k - len(used)
        self._vacancies.check({large: self._used[large] > 0 for large in held})
        self._evictables.pinned.check()
        check_shares(self.shares, users)
        counted = (self.num_large, self.num_used, self.num_evictable, self.num_spare)
        if counted != (len(held), len(users), num_evictable, num_spare):
            msg = (
                f"page table {index}: counted large, used, evictable, spare {counted}, found "
                f"{(len(held), len(users), num_evictable, num_spare)}"
            )
            raise InvariantError(msg)
