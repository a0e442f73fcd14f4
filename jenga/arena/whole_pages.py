"""Small pages of page tables whose small pages are whole large pages."""

from collections.abc import Sequence

from jenga.arena.large_pages import LargePages
from jenga.arena.page_runs import stretches_of
from jenga.arena.small_pages import Budget, Sharing, add_users, check_shares, unshare, unused_of
from jenga.errors import InvariantError


class WholePages:
    """Small pages of a page table that has one per large page.

    Attributes:
        index: Index of the page table.
        pages_per_large: Always 1.
        stamps: Small page -> its entry in the eviction queue if it is evictable, else `NOT_QUEUED`.
        shares: Used small page -> number of its users beyond the first.
        evicted: Evicted small pages, until the caller handles them and clears the list.
        num_used: Number of used small pages.
        num_evictable: Number of evictable small pages.
        num_spare: Number of unused small pages in large pages in use. Always 0.
        num_evicted_alone: Number of small pages evicted one by one. Always 0, since they are
            evicted as large pages.
        num_evicted_own: Number of small pages evicted with their large page for this page table.
        num_evicted_foreign: Number of small pages evicted with their large page for another one.
        num_evicted_whole: Number of small pages emptied so far with the last checkpoint that needed
            them.
    """

    __slots__ = (
        "_large_pages",
        "evicted",
        "index",
        "num_evictable",
        "num_evicted_alone",
        "num_evicted_foreign",
        "num_evicted_own",
        "num_evicted_whole",
        "num_spare",
        "num_used",
        "pages_per_large",
        "shares",
        "stamps",
    )

    def __init__(self, index: int, large_pages: LargePages) -> None:
        self._large_pages = large_pages
        self.index = index
        self.pages_per_large = 1
        self.stamps = large_pages.reclaimable.stamps
        self.shares: dict[int, int] = {}
        self.evicted: list[int] = []
        self.num_used = self.num_evictable = self.num_spare = 0
        self.num_evicted_alone = self.num_evicted_own = self.num_evicted_foreign = 0
        self.num_evicted_whole = 0

    @property
    def num_large(self) -> int:
        """Number of large pages held."""
        return self.num_used + self.num_evictable

    def rank(self, page: int) -> int:
        """Return the rank of an evictable page."""
        return self._large_pages.reclaimable.rank(page)

    def row(self, start: int, end: int) -> list[int]:
        """Return the numbers of consecutive pages, as the same objects as handed out."""
        return self._large_pages.numbers[start:end]

    def sharing(self, pages: Sequence[int]) -> Sharing:
        """Prepare the sharing of pages. Nothing may change before they are shared."""
        revived = [
            unused_of(pages[start:end], self.stamps, in_row=in_row)
            for start, end, in_row in stretches_of(pages, self._large_pages.numbers)
        ]
        num_revived_large = sum(map(len, revived))
        return Sharing(
            pages=pages,
            revived=revived,
            revived_of={},
            num_revived_large=num_revived_large,
            added_spare=0,
        )

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to each page, which is used or evictable."""
        self.use(self.sharing(pages))

    def use(self, sharing: Sharing) -> None:
        """Add a user to pages, as prepared by `sharing`."""
        num_revived = sharing.num_revived_large
        if num_revived < len(sharing.pages):
            add_users(self.shares, sharing.pages, self.stamps)
        for pages in sharing.revived:
            self._large_pages.reclaimable.drop_many(pages)
        self.num_used += num_revived
        self.num_evictable -= num_revived

    def take(
        self, num_pages: int, _expected_pages: int, _owner: int, _budget: Budget, _beside: int
    ) -> list[int]:
        """Take small pages that were empty or evictable. Each has one user then."""
        large_pages = self._large_pages
        if num_pages == 1 and large_pages.num_empty:
            self.num_used += 1
            return [large_pages.open(self.index)]
        large_pages.make_empty(num_pages, self.index)
        self.num_used += num_pages
        return large_pages.open_many(self.index, num_pages)

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each page. Pages without a user become empty."""
        unused = unshare(self.shares, pages) if self.shares else list(pages)
        self.num_used -= len(unused)
        self._large_pages.close_many(unused)

    def retire_page(self, page: int, rank: int) -> None:
        """Do the work of `retire` for one page."""
        if page in self.shares:
            unshare(self.shares, [page])
            return
        self.num_used -= 1
        self.num_evictable += 1
        self._large_pages.reclaimable.push(page, rank)

    def rerank(self, pages: Sequence[int], ranks: Sequence[int]) -> None:
        """Change the ranks of evictable pages."""
        for page, rank in zip(reversed(pages), reversed(ranks), strict=True):
            self._large_pages.reclaimable.push(page, rank)

    def discard(self, pages: Sequence[int]) -> None:
        """Make evictable pages empty."""
        self._large_pages.reclaimable.drop_many(pages)
        self._large_pages.close_many(list(pages))
        self.num_evictable -= len(pages)

    def retire(self, pages: Sequence[int], ranks: Sequence[int]) -> None:
        """Remove one user from each page. Unused pages become evictable with their ranks."""
        if self.shares and not self.shares.keys().isdisjoint(pages):
            rank_of = dict(zip(pages, ranks, strict=True))
            pages = unshare(self.shares, pages)
            ranks = [rank_of[page] for page in pages]
        self.num_used -= len(pages)
        self.num_evictable += len(pages)
        # Start with the last page, which is evicted first, so that ranks rise.
        for start, end, in_row in reversed(stretches_of(pages, self._large_pages.numbers)):
            some = range(pages[start], pages[end - 1] + 1) if in_row else pages[start:end]
            self._large_pages.reclaimable.extend(some, ranks[start:end])

    def surrender(self, large: int) -> list[int]:
        """Close an evictable page, and return it."""
        self._large_pages.reclaimable.drop(large)
        self.num_evictable -= 1
        self._large_pages.close(large)
        return [large]

    def evictable_pages(self, large: int) -> list[int]:
        """Return the small pages whose cached content would be lost with a large page."""
        return [large] if self.stamps[large] >= 0 else []

    def next_alone(self, _most: int) -> list[int]:
        """Return nothing. These pages are evicted as large pages."""
        return []

    def disown(self, owner: int) -> None:
        """Do nothing. An owner never has a claim."""

    def check(self) -> None:
        """Raise `InvariantError` unless the counts are those of the pages."""
        held = [p for p, holder in enumerate(self._large_pages.holders) if holder == self.index]
        evictable = [page for page in held if self.stamps[page] >= 0]
        if (self.num_used, self.num_evictable) != (len(held) - len(evictable), len(evictable)):
            msg = (
                f"page table {self.index} holds {len(held)} pages, {len(evictable)} evictable; "
                f"{self.num_used} used and {self.num_evictable} evictable counted"
            )
            raise InvariantError(msg)
        check_shares(self.shares, set(held) - set(evictable))
