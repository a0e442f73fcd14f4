"""Small pages that are parts of large pages: their records, and all questions about them."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import cast

from jenga.arena.empty_pages import EmptyPages
from jenga.arena.evictable_pages import EvictablePages
from jenga.arena.large_pages import LargePages
from jenga.arena.page_runs import large_runs_of
from jenga.arena.small_pages import Sharing, check_extra_users
from jenga.errors import InvariantError
from jenga.page_ids import LargePageId, SmallPageId


class SplitBooks:
    """Records of a page table that has several small pages per large page.

    Attributes:
        index: Index of the page table.
        pages_per_large: Number of small pages per large page.
        stamps: Small page -> its rank in the eviction queue if it is evictable, else `NOT_QUEUED`.
        extra_users: Used small page -> number of its users beyond the first.
        evicted: Evicted small pages, until the caller handles them and clears the list.
        num_used: Number of used small pages.
        num_evictable: Number of evictable small pages.
        num_large: Number of large pages held.
        num_spare: Number of unused small pages in large pages in use.
        num_evicted_alone: Number of small pages evicted one by one so far.
        num_evicted_own: Number of small pages evicted with their large page for this page table.
        num_evicted_foreign: Number of small pages evicted with their large page for another one.
        num_evicted_with_checkpoint: Number of small pages emptied so far with the last checkpoint
            that needed them.
    """

    __slots__ = (
        "_empty",
        "_evictable",
        "_large_pages",
        "_loose",
        "_used",
        "evicted",
        "extra_users",
        "index",
        "num_evictable",
        "num_evicted_alone",
        "num_evicted_foreign",
        "num_evicted_own",
        "num_evicted_with_checkpoint",
        "num_large",
        "num_spare",
        "num_used",
        "pages_per_large",
        "stamps",
    )

    def __init__(self, index: int, pages_per_large: int, large_pages: LargePages) -> None:
        num_larges = large_pages.num_pages
        self._large_pages = large_pages
        self.index = index
        self.pages_per_large = pages_per_large
        self._empty = EmptyPages(num_larges, pages_per_large)
        self._evictable = EvictablePages(num_larges, pages_per_large)
        self._used = [0] * num_larges  # large page -> number of used small pages
        self.stamps = self._evictable.stamps
        self._loose = self._evictable.loose
        self.extra_users: dict[SmallPageId, int] = {}
        self.evicted: list[SmallPageId] = []
        self.num_used = self.num_evictable = self.num_large = self.num_spare = 0
        self.num_evicted_alone = self.num_evicted_own = self.num_evicted_foreign = 0
        self.num_evicted_with_checkpoint = 0

    def rank(self, page: SmallPageId) -> int:
        """Return the rank of an evictable page."""
        return self.stamps[page]

    def evictable_pages(self, large: LargePageId) -> list[SmallPageId]:
        """Return the small pages whose cached content would be lost with a large page."""
        return self._evictable.pages_of(large)

    def next_alone(self, most: int) -> list[SmallPageId]:
        """Return up to `most` small pages that are evicted next one by one, roughly."""
        return self._evictable.next_alone(most)

    def ids_of_run(self, start: int, end: int) -> list[SmallPageId]:
        """Return the ids of consecutive held small pages, as the same objects as handed out."""
        k = self.pages_per_large
        first = start // k
        pages = list(chain.from_iterable(self._empty.ids[first : (end - 1) // k + 1]))
        return pages[start - first * k : end - first * k]

    def prepare_sharing(self, pages: Sequence[SmallPageId]) -> Sharing:
        """Prepare the sharing of pages. Nothing may change before they are shared."""
        used, stamps, k = self._used, self.stamps, self.pages_per_large
        revived: list[Sequence[int]] = []
        revived_of: Counter[int] = Counter()
        whole: list[range] = []
        scattered: list[SmallPageId] = []
        for start, end, in_run in large_runs_of(pages, k, self._empty.ids):
            large, num_pages = pages[start] // k, end - start
            larges = range(large, large + max(1, num_pages // k))
            if not in_run or any(used[large : larges.stop]):
                scattered += pages[start:end]
                continue
            revived.append(range(pages[start], pages[start] + num_pages))
            if num_pages > k:
                whole.append(larges)
            else:
                revived_of[large] += num_pages
        unused = [page for page in scattered if stamps[page] >= 0]
        revived.append(unused)
        revived_of.update([page // k for page in unused])
        num_revived_large = sum(map(len, whole)) + sum(not used[large] for large in revived_of)
        return Sharing(
            pages=pages,
            revived=cast("list[Sequence[SmallPageId]]", revived),
            revived_of=cast("Counter[LargePageId]", revived_of),
            whole=cast("list[Sequence[LargePageId]]", whole),
            num_revived_large=num_revived_large,
            added_spare=num_revived_large * k - sum(map(len, revived)),
        )

    def check(self) -> None:
        """Raise `InvariantError` unless counts, bins and orders agree with the pages."""
        k, index = self.pages_per_large, self.index
        holders = self._large_pages.holders
        held = [large for large in self._large_pages.ids if holders[large] == index]
        num_evictable = num_spare = 0
        users: set[SmallPageId] = set()
        for large in held:
            pages = cast("Sequence[SmallPageId]", range(large * k, (large + 1) * k))
            empties = self._empty.pages[large]
            evictable = {page for page in pages if self.stamps[page] >= 0}
            used = set(pages).difference(empties, evictable)
            is_reclaimable = self._large_pages.reclaimable.stamps[large] >= 0
            problems = {
                "pages both empty and evictable or foreign": sorted([*empties, *evictable, *used])
                != list(pages),
                "small pages not in a row": self._empty.ids[large] != list(pages),
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
            self._evictable.check(large, is_in_use=bool(used))
            users |= used
            num_evictable += len(evictable)
            if used:
                num_spare += k - len(used)
        self._empty.check({large: self._used[large] > 0 for large in held})
        self._evictable.check_queues(self._used)
        check_extra_users(self.extra_users, users)
        counted = (self.num_large, self.num_used, self.num_evictable, self.num_spare)
        if counted != (len(held), len(users), num_evictable, num_spare):
            msg = (
                f"page table {index}: counted large, used, evictable, spare {counted}, found "
                f"{(len(held), len(users), num_evictable, num_spare)}"
            )
            raise InvariantError(msg)
