"""Small pages of page tables that have several in a large page.

A large page that is held is *pinned* while one of its small pages is used, else *reclaimable*.
"""

from collections import Counter
from collections.abc import Sequence

from jenga.bins import NO_PAGE, Bins
from jenga.errors import InvariantError
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
from jenga.victims import NOT_QUEUED, VictimQueue

NO_PAGES: list[int] = []
"""Stands for the lists of a large page that is not open; never written."""


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
        "_claimed",
        "_claims",
        "_eldest",
        "_empties",
        "_idle",
        "_large_pages",
        "_numbers",
        "_open",
        "_orders",
        "_owners",
        "_pinned",
        "_used",
        "_youngest",
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
        self.stamps = [NOT_QUEUED] * (num_larges * pages_per_large)
        self.shares: dict[int, int] = {}
        self.evicted: list[int] = []
        self.num_used = self.num_evictable = self.num_large = self.num_spare = 0
        self.num_evicted_alone = self.num_evicted_own = self.num_evicted_foreign = 0
        # Per large page: its small pages; how many are used; the empty ones; the evictable ones in
        # order, with stale entries, once asked for; a lower bound of their ranks; the rank at which
        # it last had a user.
        self._numbers = [NO_PAGES] * num_larges
        self._used = [0] * num_larges
        self._empties = [NO_PAGES] * num_larges
        self._orders = [NO_PAGES] * num_larges
        self._eldest = [0] * num_larges
        self._youngest = [0] * num_larges
        # Large pages with empty small pages: pinned and free for all, pinned and claimed,
        # reclaimable.
        self._open, self._claimed, self._idle = Bins(), Bins(), Bins()
        self._claims: dict[int, int] = {}  # owner -> large page
        self._owners: dict[int, int] = {}  # large page -> owner
        # Pinned large pages with evictable small pages, by a lower bound of the oldest's rank.
        self._pinned = VictimQueue(num_larges)

    def rank(self, page: int) -> int:
        """The rank of an evictable page."""
        return self.stamps[page]

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
            for large, start, end, in_row in runs_of(pages, k, self._numbers):
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
        used, all_empties, k = self._used, self._empties, self.pages_per_large
        unpinned: list[int] = []
        for large, num_unused in sharing.revived_of.items():
            num_empty = len(all_empties[large])
            was_pinned = used[large]
            used[large] += num_unused
            if not was_pinned:
                unpinned.append(large)
                if num_empty:
                    self._idle.remove(large, num_empty)
                    self._open.add(large, num_empty)
                if used[large] + num_empty < k:
                    self._pinned.push(large, self._eldest[large])
            elif used[large] + num_empty == k:
                self._pinned.drop(large)
        self._large_pages.reclaimable.drop_many(unpinned)
        self.num_spare += sharing.added_spare
        self.num_used += num_revived
        self.num_evictable -= num_revived

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
        if num_pages == 1 and expected_pages < self.pages_per_large and owner not in self._claims:
            # What decoding asks for all the time is only packed.
            large = self._best_fit(budget)
            if large != NO_PAGE:
                self._fill(large, 1, pages)
                return pages
        elif self._claims and owner in self._claims:
            self._fill(self._claims[owner], num_pages, pages)
        elif beside > 0 and expected_pages >= self.pages_per_large:
            large = beside // self.pages_per_large
            if self._empties[large] and large not in self._owners:
                self._fill(large, num_pages, pages)
        if len(pages) == num_pages:
            return pages
        if expected_pages - len(pages) >= self.pages_per_large:
            self._take_whole_larges(num_pages, expected_pages, owner, budget, pages)
        while (
            len(pages) < num_pages
            and expected_pages - len(pages) >= self.pages_per_large
            and budget.allows
            and self._large_pages.reclaimable.num_queued
        ):
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

    def _take_whole_larges(
        self, num_pages: int, expected_pages: int, owner: int, budget: Budget, pages: list[int]
    ) -> None:
        """Open empty large pages, each for the owner alone, while it is sure to fill them."""
        k = self.pages_per_large
        while (
            len(pages) < num_pages
            and expected_pages - len(pages) >= k
            and self._large_pages.num_empty
            and budget.allows
        ):
            self._claim(self._open_empty(budget), num_pages, owner, pages)

    def _claim(self, large: int, num_pages: int, owner: int, pages: list[int]) -> None:
        """Fill an empty large page; what is left of it is the owner's."""
        self._fill(large, num_pages - len(pages), pages)
        num_empty = len(self._empties[large])
        if num_empty:
            self._open.remove(large, num_empty)
            self._claimed.add(large, num_empty)
            self._claims[owner] = large
            self._owners[large] = owner

    def _best_fit(self, budget: Budget) -> int:
        """A pinned large page with empty small pages, opened or pinned if need be, or `NO_PAGE`."""
        large = self._open.fullest()
        if large != NO_PAGE:
            return large
        if budget.allows:
            large = self._idle.emptiest()
            if large != NO_PAGE:
                budget.spend()
                self._pin(large)
                return large
            if self._large_pages.num_empty:
                return self._open_empty(budget)
        return self._claimed.emptiest()

    def _evict(self, num_pages: int, budget: Budget, pages: list[int]) -> None:
        """Evict what is oldest: a small page of a pinned large page, or a large page."""
        small = self._pinned.peek_rank()
        large = self._large_pages.reclaimable.peek_rank() if budget.allows else NOT_QUEUED
        if small >= 0 and (large < 0 or small <= large):
            self._evict_small(pages)
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

    def _evict_small(self, pages: list[int]) -> None:
        """Take the oldest evictable small page of the first pinned large page.

        The large page's rank is a lower bound; where it is too low it is corrected instead.
        """
        large = self._pinned.peek()
        page = self._oldest(large)
        rank = self.stamps[page]
        if rank > self._pinned.rank(large):
            self._pinned.push(large, rank)
            return
        del self._orders[large][0]
        self._large_pages.last_evicted_rank = rank
        self.stamps[page] = NOT_QUEUED
        self.evicted.append(page)
        self.num_evicted_alone += 1
        self._large_pages.num_evicted += 1
        pages.append(page)
        self._used[large] += 1
        self.num_spare -= 1
        self.num_used += 1
        self.num_evictable -= 1
        if self._used[large] + len(self._empties[large]) == self.pages_per_large:
            self._pinned.drop(large)

    def _oldest(self, large: int) -> int:
        """The evictable small page of a large page that goes next; there must be one."""
        stamps, num_stamps, k = self.stamps, len(self.stamps), self.pages_per_large
        order = self._orders[large]
        if not order:
            pages = range(large * k, (large + 1) * k)
            order = sorted(stamps[page] * num_stamps + page for page in pages if stamps[page] >= 0)
            self._orders[large] = order
        num_stale = 0
        while stamps[order[num_stale] % num_stamps] != order[num_stale] // num_stamps:
            num_stale += 1
        del order[:num_stale]
        return order[0] % num_stamps

    def _open_empty(self, budget: Budget) -> int:
        """Open an empty large page; the caller fills at least one small page of it."""
        budget.spend()
        k = self.pages_per_large
        large = self._large_pages.open(self.index)
        numbers = list(range(large * k, (large + 1) * k))
        self._numbers[large] = numbers
        self._empties[large] = numbers[::-1]
        self._youngest[large] = 0
        self.num_large += 1
        self.num_spare += k
        self._open.add(large, k)
        return large

    def _pin(self, large: int) -> None:
        """Make a reclaimable large page pinned; the caller uses at least one small page of it."""
        self._large_pages.reclaimable.drop(large)
        self.num_spare += self.pages_per_large
        num_empty = len(self._empties[large])
        self._idle.remove(large, num_empty)
        self._open.add(large, num_empty)
        if num_empty < self.pages_per_large:
            self._pinned.push(large, self._eldest[large])

    def _fill(self, large: int, num_pages: int, pages: list[int]) -> None:
        """Take up to `num_pages` empty small pages of a pinned large page."""
        empties = self._empties[large]
        num_before = len(empties)
        num_taken = min(num_pages, num_before)
        if num_taken == 1:
            pages.append(empties.pop())
        else:
            pages += empties[: -num_taken - 1 : -1]
            del empties[num_before - num_taken :]
        self._used[large] += num_taken
        self.num_spare -= num_taken
        self.num_used += num_taken
        if large not in self._owners:
            self._open.move(large, num_before, num_before - num_taken)
        else:
            self._claimed.move(large, num_before, num_before - num_taken)
            if num_taken == num_before:
                del self._claims[self._owners.pop(large)]

    def release(self, pages: Sequence[int]) -> None:
        """Take one user from each page; what has none left becomes empty."""
        if self.shares:
            pages = unshare(self.shares, pages)
        self.num_used -= len(pages)
        for large, start, end, _ in runs_of(pages, self.pages_per_large, self._numbers):
            empties = self._empties[large]
            num_before = len(empties)
            # Backwards, so that a row is taken as a row.
            empties.extend(reversed(pages[start:end]))
            self._leave(large, end - start, num_before)

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
            self._large_pages.reclaimable.push(large, self._youngest[large])

    def retire(self, pages: Sequence[int], ranks: Sequence[int]) -> None:
        """Take one user from each page; what has none left becomes evictable, with that rank."""
        if self.shares and not self.shares.keys().isdisjoint(pages):
            rank_of = dict(zip(pages, ranks, strict=True))
            pages = unshare(self.shares, pages)
            ranks = [rank_of[page] for page in pages]
        self.num_used -= len(pages)
        self.num_evictable += len(pages)
        stamps, youngest = self.stamps, self._youngest
        all_ranks = rising(ranks) if isinstance(ranks, range) else ranks
        by_rows = self.pages_per_large >= LEAST_ROW
        if not by_rows:
            for page, rank in zip(pages, all_ranks, strict=True):
                stamps[page] = rank
        unused: list[int] = []
        # From the last on, since that goes first: ranks rise then.
        for large, start, end, in_row in reversed(
            runs_of(pages, self.pages_per_large, self._numbers)
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
                self._eldest[large], youngest[large] = lowest, highest
                self._orders[large] = NO_PAGES
                unused.append(large)
            elif self._retire_some(large, pages[start], end - start, lowest, highest):
                unused.append(large)
        self._large_pages.reclaimable.extend(unused, [youngest[large] for large in unused])

    def _retire_some(self, large: int, page: int, num_left: int, lowest: int, highest: int) -> bool:
        """Settle the books of a large page of which `num_left` small pages became evictable.

        Args:
            large: The large page.
            page: The small page, if it is one.
            num_left: How many.
            lowest: Of their ranks.
            highest: Of their ranks.

        Returns:
            Whether they were the last ones used.
        """
        num_used, num_empty = self._used[large], len(self._empties[large])
        if lowest < self._eldest[large] or num_used + num_empty == self.pages_per_large:
            self._eldest[large] = lowest
        self._youngest[large] = max(self._youngest[large], highest)
        order = self._orders[large]
        if order:
            entry = lowest * len(self.stamps) + page
            if num_left == 1 and entry > order[-1] and len(order) < 2 * self.pages_per_large:
                order.append(entry)
            else:
                self._orders[large] = NO_PAGES
        if num_used == num_left:
            self._unpin(large, num_left, num_empty)
            return True
        self._used[large] = num_used - num_left
        self.num_spare += num_left
        if self._pinned.stamps[large] < 0 or self._pinned.rank(large) > lowest:
            self._pinned.push(large, self._eldest[large])
        return False

    def _leave(self, large: int, num_left: int, num_empty_before: int) -> None:
        """Settle the books of a pinned large page that `num_left` small pages became empty of."""
        num_empty = len(self._empties[large])
        if self._used[large] > num_left:
            self._used[large] -= num_left
            self.num_spare += num_left
            bins = self._claimed if large in self._owners else self._open
            bins.remove(large, num_empty_before)
            bins.add(large, num_empty)
            return
        self._unpin(large, num_left, num_empty_before)
        if num_empty == self.pages_per_large:
            self._close(large)
        else:
            self._large_pages.reclaimable.push(large, self._youngest[large])

    def _unpin(self, large: int, num_left: int, num_empty_before: int) -> None:
        """Settle the books of a large page whose last `num_left` users left; not closed, idle."""
        self._used[large] = 0
        self.num_spare -= self.pages_per_large - num_left
        if large in self._owners:
            self._claimed.remove(large, num_empty_before)
            del self._claims[self._owners.pop(large)]
        elif num_empty_before:
            self._open.remove(large, num_empty_before)
        self._pinned.drop(large)
        num_empty = len(self._empties[large])
        if 0 < num_empty < self.pages_per_large:
            self._idle.add(large, num_empty)

    def _close(self, large: int) -> None:
        self._numbers[large] = self._empties[large] = self._orders[large] = NO_PAGES
        self.num_large -= 1
        self._large_pages.close(large)

    def surrender(self, large: int) -> list[int]:
        """Close a reclaimable large page; the small pages whose cached content is lost."""
        self._large_pages.reclaimable.drop(large)
        self._idle.remove(large, len(self._empties[large]))
        stamps, k = self.stamps, self.pages_per_large
        lost = [page for page in range(large * k, (large + 1) * k) if stamps[page] >= 0]
        for page in lost:
            stamps[page] = NOT_QUEUED
        self.num_evictable -= len(lost)
        self._close(large)
        return lost

    def disown(self, owner: int) -> None:
        """Give up the owner's claim, if it has one."""
        large = self._claims.pop(owner, NO_PAGE)
        if large != NO_PAGE:
            del self._owners[large]
            num_empty = len(self._empties[large])
            self._claimed.remove(large, num_empty)
            self._open.add(large, num_empty)

    def check(self) -> None:
        """Raise `InvariantError` unless counts, bins and orders are those of the pages."""
        k, index = self.pages_per_large, self.index
        held = [p for p, holder in enumerate(self._large_pages.holders) if holder == index]
        bins: dict[str, dict[int, int]] = {"open": {}, "claimed": {}, "idle": {}}
        num_used = num_evictable = num_spare = 0
        users: set[int] = set()
        for large in held:
            pages = range(large * k, (large + 1) * k)
            empties = set(self._empties[large])
            evictable = {page for page in pages if self.stamps[page] >= 0}
            used = set(pages) - empties - evictable
            users |= used
            reclaimable = self._large_pages.reclaimable.stamps[large] >= 0
            problems = {
                "pages both empty and evictable or foreign": empties & evictable
                or not empties <= set(pages)
                or len(empties) != len(self._empties[large]),
                "used pages counted wrong": len(used) != self._used[large],
                "an empty large page held": len(empties) == k,
                "reclaimable though used, or the reverse": reclaimable == bool(used),
                "evictable pages missing in the order": self._orders[large]
                and not {self.stamps[page] * len(self.stamps) + page for page in evictable}
                <= set(self._orders[large]),
                "an order that does not rise": self._orders[large]
                != sorted(set(self._orders[large])),
                "pinned victims not queued": used and evictable and self._pinned.stamps[large] < 0,
                "rank of the oldest not a lower bound": used
                and evictable
                and self._pinned.rank(large) > min(self.stamps[page] for page in evictable),
                "rank of the eldest too high": evictable
                and self._eldest[large] > min(self.stamps[page] for page in evictable),
                "rank of the youngest too low": self._youngest[large]
                < max((self.stamps[page] for page in evictable), default=0),
            }
            for problem, found in problems.items():
                if found:
                    msg = (
                        f"page table {index}, large page {large}: {problem} (used {sorted(used)}, "
                        f"evictable {sorted(evictable)}, empty {sorted(empties)})"
                    )
                    raise InvariantError(msg)
            num_used += len(used)
            num_evictable += len(evictable)
            if used:
                num_spare += k - len(used)
            if empties:
                bin_ = "idle" if not used else "claimed" if large in self._owners else "open"
                bins[bin_][large] = len(empties)
        self._open.check(bins["open"])
        self._claimed.check(bins["claimed"])
        self._idle.check(bins["idle"])
        self._pinned.check()
        check_shares(self.shares, users)
        counted = (self.num_large, self.num_used, self.num_evictable, self.num_spare)
        if counted != (len(held), num_used, num_evictable, num_spare):
            msg = (
                f"page table {index}: counted large, used, evictable, spare {counted}, found "
                f"{(len(held), num_used, num_evictable, num_spare)}"
            )
            raise InvariantError(msg)
        if {owner: large for large, owner in self._owners.items()} != self._claims or not set(
            self._owners
        ) <= set(bins["claimed"]):
            msg = f"page table {index}: claims {self._claims} against owners {self._owners}"
            raise InvariantError(msg)
        if NO_PAGES:
            msg = "the lists of a large page that is not open were written"
            raise InvariantError(msg)
