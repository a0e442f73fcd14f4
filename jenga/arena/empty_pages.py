"""Empty small pages of the large pages that one page table holds, and the claims on them."""

from collections.abc import Mapping, Sequence
from typing import cast

from jenga.arena.best_fit import Bins
from jenga.errors import InvariantError
from jenga.page_ids import NULL_LARGE_PAGE, NULL_PAGE, LargePageId, OwnerId, SmallPageId

NO_PAGES: list[SmallPageId] = []
"""Placeholder for the lists of a large page that is not held. It is never written."""


class EmptyPages:
    """Empty small pages, by large page.

    A large page in use is free or claimed. If an owner claims it, others take its empty small pages
    only when no other small page is empty. A reclaimable large page is idle. Its small pages are
    taken when it is in use again.

    Attributes:
        pages: Large page -> its empty small pages. The last one is taken next.
        free: Large pages in use with empty small pages that no owner claims.
        claimed: Large pages in use with empty small pages that an owner claims.
        idle: Reclaimable large pages with empty small pages.
        ids: Large page -> the ids of its small pages.
        claims: Owner -> the large page that it claims.
        owners: Large page -> the owner that claims it.
    """

    __slots__ = (
        "_pages_per_large",
        "claimed",
        "claims",
        "free",
        "idle",
        "ids",
        "owners",
        "pages",
    )

    def __init__(self, num_larges: int, pages_per_large: int) -> None:
        self._pages_per_large = pages_per_large
        self.ids = [NO_PAGES] * num_larges
        self.pages = [NO_PAGES] * num_larges
        self.free, self.claimed, self.idle = Bins(), Bins(), Bins()
        self.claims: dict[OwnerId, LargePageId] = {}
        self.owners: dict[LargePageId, OwnerId] = {}

    def open(self, large: LargePageId) -> None:
        """Add a large page in use, all of it empty."""
        k = self._pages_per_large
        ids = cast("list[SmallPageId]", list(range(large * k, (large + 1) * k)))
        self.ids[large] = ids
        self.pages[large] = ids[::-1]
        self.free.add(large, k)

    def open_taken(self, larges: Sequence[LargePageId]) -> list[SmallPageId]:
        """Add large pages in use whose small pages are all taken. Return these, in order."""
        k, pages = self._pages_per_large, list[int]()
        all_ids = cast("list[list[int]]", self.ids)
        for large in larges:
            ids = list(range(large * k, (large + 1) * k))
            all_ids[large] = ids
            self.pages[large] = []
            pages += ids
        return cast("list[SmallPageId]", pages)

    def close(self, large: LargePageId) -> None:
        """Forget a large page that is in no bin."""
        self.ids[large] = self.pages[large] = NO_PAGES

    def take(self, large: LargePageId, most: int, pages: list[SmallPageId]) -> int:
        """Move empty small pages of a large page in use to `pages`. Return how many were moved."""
        empties = self.pages[large]
        num_before = len(empties)
        num_taken = min(most, num_before)
        if num_taken == 1:
            pages.append(empties.pop())
        else:
            pages += empties[: -num_taken - 1 : -1]
            del empties[num_before - num_taken :]
        if large not in self.owners:
            self.free.move(large, num_before, num_before - num_taken)
        else:
            self.claimed.move(large, num_before, num_before - num_taken)
            if num_taken == num_before:
                del self.claims[self.owners.pop(large)]
        return num_taken

    def take_packed(self) -> SmallPageId:
        """Take one small page of the fullest free large page, or the null page if there is none."""
        large = self.free.take_fullest()
        return self.pages[large].pop() if large != NULL_LARGE_PAGE else NULL_PAGE

    def put_back(self, large: LargePageId, pages: Sequence[SmallPageId]) -> int:
        """Add emptied small pages of a large page in use. Return how many are empty then."""
        empties = self.pages[large]
        bins = self.claimed if large in self.owners else self.free
        bins.remove(large, len(empties))
        # Backwards, so that consecutive pages are taken in rising order.
        empties.extend(reversed(pages))
        bins.add(large, len(empties))
        return len(empties)

    def put_back_idle(self, large: LargePageId, pages: Sequence[SmallPageId]) -> int:
        """Do the work of `put_back` for an idle large page.

        A large page that is all empty is left in no bin.
        """
        empties = self.pages[large]
        self.idle.remove(large, len(empties))
        empties.extend(reversed(pages))
        if len(empties) < self._pages_per_large:
            self.idle.add(large, len(empties))
        return len(empties)

    def claim(self, large: LargePageId, owner: OwnerId) -> None:
        """Reserve the empty small pages of a large page in use, if there are any, for an owner."""
        num_empty = len(self.pages[large])
        if num_empty:
            self.free.remove(large, num_empty)
            self.claimed.add(large, num_empty)
            self.claims[owner] = large
            self.owners[large] = owner

    def release_claim(self, owner: OwnerId) -> None:
        """Give up an owner's claim, if it has one."""
        large = self.claims.pop(owner, NULL_LARGE_PAGE)
        if large != NULL_LARGE_PAGE:
            del self.owners[large]
            num_empty = len(self.pages[large])
            self.claimed.remove(large, num_empty)
            self.free.add(large, num_empty)

    def mark_in_use(self, large: LargePageId) -> None:
        """Record that an idle large page is in use."""
        num_empty = len(self.pages[large])
        self.idle.remove(large, num_empty)
        self.free.add(large, num_empty)

    def mark_idle(self, large: LargePageId) -> None:
        """Record that a large page in use becomes idle. If all of it is empty, it is in no bin."""
        num_empty = len(self.pages[large])
        if large in self.owners:
            self.claimed.remove(large, num_empty)
            del self.claims[self.owners.pop(large)]
        else:
            self.free.remove(large, num_empty)
        if num_empty < self._pages_per_large:
            self.idle.add(large, num_empty)

    def check(self, held: Mapping[LargePageId, bool]) -> None:
        """Raise `InvariantError` unless bins and claims agree with the large pages.

        Args:
            held: Held large page -> whether it is in use.
        """
        bins: dict[str, dict[LargePageId, int]] = {"free": {}, "claimed": {}, "idle": {}}
        for large, is_in_use in held.items():
            if self.pages[large]:
                name = "idle" if not is_in_use else "claimed" if large in self.owners else "free"
                bins[name][large] = len(self.pages[large])
        self.free.check(bins["free"])
        self.claimed.check(bins["claimed"])
        self.idle.check(bins["idle"])
        owners = {owner: large for large, owner in self.owners.items()}
        if owners != self.claims or not bins["claimed"].keys() >= self.owners.keys():
            msg = f"claims {self.claims} against owners {self.owners}"
            raise InvariantError(msg)
        if NO_PAGES:
            msg = "the lists of a large page that is not held were written"
            raise InvariantError(msg)
