"""Two-level allocation: small pages of every page table out of large pages of one arena.

A large page is *empty*, or held by one page table, which cuts it into its small pages. A held large
page is *in use* while one of its small pages is used, else *reclaimable*. A reclaimable large page
has only evictable and empty small pages. It can be emptied and given to any page table.

Small pages that are needed beyond the unused ones in large pages in use take further large pages. A
need can be met exactly if these are no more than the empty and the reclaimable large pages.
`Allocator.room` answers that without a change.

Source: Jenga paper, sections 4.3 and 5.4. Its five steps are kept, and their cost is limited:

- A large page is opened for one request only if the request is sure to fill it.
- Otherwise empty small pages are packed, best fit, before anything is opened or evicted.
- The oldest page that no checkpoint needs is evicted, be it small or large. After these pages the
  prefix cache chooses a checkpoint (`jenga.prefix.eviction_pool`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.arena.large_pages import LargePages
from jenga.arena.small_pages import Budget, Sharing
from jenga.arena.split_pages import SplitPages
from jenga.arena.whole_pages import WholePages
from jenga.checks import check_count
from jenga.page_ids import NULL_PAGE, LargePageId, OwnerId, SmallPageId


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Result of asking whether a need can be met.

    Attributes:
        spare_pages: Number of small pages available in large pages in use, for each page table.
        needed_large_pages: Number of large pages needed in addition.
        available_large_pages: Number of large pages that are empty or reclaimable, less the
            reserve.
    """

    spare_pages: tuple[int, ...]
    needed_large_pages: int
    available_large_pages: int

    @property
    def suffices(self) -> bool:
        """Whether the need can be met."""
        return self.needed_large_pages <= self.available_large_pages


class Allocator:
    """Records which page is used, evictable or empty.

    Attributes:
        large_pages: Large pages of the arena.
        tables: Small pages of each page table.
    """

    __slots__ = ("large_pages", "tables")

    def __init__(
        self,
        small_pages_per_large_page: Sequence[int],
        num_large_pages: int,
        owned: Sequence[LargePageId] | None = None,
    ) -> None:
        """Start with all pages empty.

        Args:
            small_pages_per_large_page: Number of small pages in a large page, for each page table.
            num_large_pages: Number of large pages of the arena, including the null page.
            owned: Large pages that can be held at first. None means all of the arena.

        Raises:
            ValueError: A number of pages is not a positive integer.
        """
        check_count("num_large_pages", num_large_pages, least=1)
        for pages_per_large in small_pages_per_large_page:
            check_count("every count of small_pages_per_large_page", pages_per_large, least=1)
        self.large_pages = LargePages(num_large_pages, owned)
        self.tables = tuple(
            WholePages(index, self.large_pages)
            if pages_per_large == 1
            else SplitPages(index, pages_per_large, self.large_pages)
            for index, pages_per_large in enumerate(small_pages_per_large_page)
        )
        self.large_pages.tables.extend(self.tables)

    def room(
        self,
        needs: Sequence[int],
        *,
        hits: Sequence[Sharing | None] | None = None,
        reserve_large_pages: int = 0,
    ) -> Room:
        """Return whether small pages can be taken, with eviction if necessary.

        Args:
            needs: Number of small pages of each page table.
            hits: For each page table, the cached small pages that will be shared first, if any.
            reserve_large_pages: Number of large pages that must be left empty or reclaimable.

        Raises:
            ValueError: There is not one need for each page table, or a number is negative.
        """
        if reserve_large_pages < 0:
            raise _needs_error(needs, reserve_large_pages)
        available = self.large_pages.num_available - reserve_large_pages
        needed = 0
        all_spare: list[int] = []
        for table, need in zip(self.tables, needs, strict=True):
            if need < 0:
                raise _needs_error(needs, reserve_large_pages)
            spare = table.num_spare
            sharing = None if hits is None else hits[table.index]
            if sharing is not None:
                available -= sharing.num_revived_large
                spare += sharing.added_spare
            if need > spare:
                needed -= (spare - need) // table.pages_per_large
            all_spare.append(spare)
        return Room(
            spare_pages=tuple(all_spare),
            needed_large_pages=needed,
            available_large_pages=available,
        )

    def take(
        self,
        needs: Sequence[int],
        expected: Sequence[int],
        *,
        owner: OwnerId,
        reserve_large_pages: int = 0,
        held: Sequence[Sequence[SmallPageId]] | None = None,
        is_packed: bool = False,
    ) -> list[list[SmallPageId]] | None:
        """Take small pages in every page table, or none if not all are available.

        Args:
            needs: Number of small pages of each page table.
            expected: Number of small pages that the owner will certainly take, including these.
            owner: Owner of the pages, any positive number.
            reserve_large_pages: Number of large pages to leave empty or reclaimable.
            held: Small pages of each page table that the owner uses, in order, if it uses any.
            is_packed: Whether to open no large page that the needs do not require.

        Returns:
            Page ids for each page table. None if `room` would say that the need cannot be met.

        Raises:
            ValueError: There is not one need for each page table, a number is negative, or the
                owner is not a positive integer.
        """
        tables = self.tables
        if not len(needs) == len(expected) == len(tables) or reserve_large_pages < 0:
            raise _needs_error(needs, reserve_large_pages)
        if owner <= 0:
            msg = f"owner must be a positive integer, got {owner}"
            raise ValueError(msg)
        slack = self.large_pages.num_available - reserve_large_pages
        required = [0] * len(needs)
        for index, need in enumerate(needs):
            if need < 0:
                raise _needs_error(needs, reserve_large_pages)
            if need > tables[index].num_spare:
                missing = need - tables[index].num_spare
                required[index] = -(-missing // tables[index].pages_per_large)
                slack -= required[index]
        if slack < 0:
            return None
        budget = Budget(0 if is_packed else slack)
        taken: list[list[SmallPageId]] = []
        for index, need in enumerate(needs):
            if need:
                budget.required = required[index]
                beside = held[index][-1] if held is not None and held[index] else NULL_PAGE
                taken.append(tables[index].take(need, expected[index], owner, budget, beside))
            else:
                taken.append([])
        return taken

    def release_claim(self, owner: OwnerId) -> None:
        """Release the large pages that an owner has claimed, so that others may take from them."""
        for table in self.tables:
            table.release_claim(owner)

    def check(self) -> None:
        """Raise `InvariantError` unless the records of both levels agree."""
        self.large_pages.check()
        for table in self.tables:
            table.check()


def _needs_error(needs: Sequence[int], reserve_large_pages: int) -> ValueError:
    return ValueError(
        f"needs, and expected, must have one number of at least 0 for each page table, and "
        f"reserve_large_pages be at least 0, got {needs} and {reserve_large_pages}"
    )
