"""Small pages of page tables whose small pages are whole large pages."""

from collections.abc import Sequence

from jenga.arena.large_pages import LargePages
from jenga.arena.page_runs import stretches_of
from jenga.arena.small_pages import Budget, Sharing, add_users, check_shares, unshare, unused_of
from jenga.errors import InvariantError


class WholePages:
    """Small pages of a page table that has one per large page.

    Attributes:
        index: The page table's index.
        pages_per_large: 1.
        stamps: Of an evictable small page its place in the order, else `NOT_QUEUED`.
        shares: Used small page -> its users beyond the first.
        evicted: Small pages evicted, until the caller takes note and clears the list.
        num_used: Small pages used.
        num_evictable: Small pages evictable.
        num_spare: Unused small pages in pinned large pages: there are none.
        num_evicted_alone: Small pages evicted one by one: none, they go as large pages.
        num_evicted_own: Small pages evicted with their large page for this page table.
        num_evicted_foreign: Small pages evicted with their large page for another one.
        num_evicted_whole: Small pages evicted with the last checkpoint that needed them so far.
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
        """Large pages held."""
        return self.num_used + self.num_evictable

    def rank(self, page: int) -> int:
        """The rank of an evictable page."""
        return self._large_pages.reclaimable.rank(page)

    def row(self, start: int, end: int) -> list[int]:
        """The numbers of pages in a row, the same objects as handed out."""
        return self._large_pages.numbers[start:end]

    def sharing(self, pages: Sequence[int]) -> Sharing:
        """What it takes to share pages; nothing may change before they are."""
        revived = [
            unused_of(pages[start:end], self.stamps, in_row=in_row)
            for start, end, in_row in stretches_of(pages, self._large_pages.numbers)
        ]
        num_pinned = sum(map(len, revived))
        return Sharing(
            pages=pages, revived=revived, revived_of={}, num_pinned=num_pinned, added_spare=0
        )

    def share(self, pages: Sequence[int]) -> None:
        """Give each page, used or evictable, one user more."""
        self.use(self.sharing(pages))

    def use(self, sharing: Sharing) -> None:
        """Share pages."""
        num_revived = sharing.num_pinned
        if num_revived < len(sharing.pages):
            add_users(self.shares, sharing.pages, self.stamps)
        for pages in sharing.revived:
            self._large_pages.reclaimable.drop_many(pages)
        self.num_used += num_revived
        self.num_evictable -= num_revived

    def take(
        self, num_pages: int, _expected_pages: int, _owner: int, _budget: Budget, _beside: int
    ) -> list[int]:
        """Small pages that were empty or evictable, each with one user."""
        large_pages = self._large_pages
        if num_pages == 1 and large_pages.num_empty:
            self.num_used += 1
            return [large_pages.open(self.index)]
        large_pages.make_empty(num_pages, self.index)
        self.num_used += num_pages
        return large_pages.open_many(self.index, num_pages)

    def release(self, pages: Sequence[int]) -> None:
        """Take one user from each page; what has none left becomes empty."""
        unused = unshare(self.shares, pages) if self.shares else list(pages)
        self.num_used -= len(unused)
        self._large_pages.close_many(unused)

    def retire_page(self, page: int, rank: int) -> None:
        """As `retire` for one page."""
        if page in self.shares:
            unshare(self.shares, [page])
            return
        self.num_used -= 1
        self.num_evictable += 1
        self._large_pages.reclaimable.push(page, rank)

    def rerank(self, pages: Sequence[int], ranks: Sequence[int]) -> None:
        """Give evictable pages other ranks."""
        for page, rank in zip(reversed(pages), reversed(ranks), strict=True):
            self._large_pages.reclaimable.push(page, rank)

    def discard(self, pages: Sequence[int]) -> None:
        """Let evictable pages be empty."""
        self._large_pages.reclaimable.drop_many(pages)
        self._large_pages.close_many(list(pages))
        self.num_evictable -= len(pages)

    def retire(self, pages: Sequence[int], ranks: Sequence[int]) -> None:
        """Take one user from each page; what has none left becomes evictable, with that rank."""
        if self.shares and not self.shares.keys().isdisjoint(pages):
            rank_of = dict(zip(pages, ranks, strict=True))
            pages = unshare(self.shares, pages)
            ranks = [rank_of[page] for page in pages]
        self.num_used -= len(pages)
        self.num_evictable += len(pages)
        # From the last on, since that goes first: ranks rise then.
        for start, end, in_row in reversed(stretches_of(pages, self._large_pages.numbers)):
            some = range(pages[start], pages[end - 1] + 1) if in_row else pages[start:end]
            self._large_pages.reclaimable.extend(some, ranks[start:end])

    def surrender(self, large: int) -> list[int]:
        """Close an evictable page; the page."""
        self._large_pages.reclaimable.drop(large)
        self.num_evictable -= 1
        self._large_pages.close(large)
        return [large]

    def evictable_pages(self, large: int) -> list[int]:
        """The small pages whose cached content would be lost with a large page."""
        return [large] if self.stamps[large] >= 0 else []

    def next_alone(self, _most: int) -> list[int]:
        """None: they go as large pages."""
        return []

    def disown(self, owner: int) -> None:
        """Give up the owner's claim; there is never one."""

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
