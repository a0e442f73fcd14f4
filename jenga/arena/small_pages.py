"""Common parts of both kinds of small pages.

A small page is *used* by one request or more, *evictable* (cached content, no user) or *empty*.
`WholePages` serves page tables whose small pages are whole large pages, and `SplitPages` serves all
others. The allocator asks both the same questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import cast

from jenga.arena.eviction_queue import NOT_QUEUED
from jenga.errors import InvariantError
from jenga.page_ids import LargePageId, SmallPageId


class Budget:
    """Number of large pages that a page table may open while others still have needs.

    Attributes:
        required: Large pages that this page table must open to meet its need.
        slack: Large pages that no page table's need requires.
    """

    __slots__ = ("required", "slack")

    def __init__(self, slack: int) -> None:
        self.required = 0
        self.slack = slack

    @property
    def allows(self) -> bool:
        """Whether one more large page may be opened."""
        return self.required > 0 or self.slack > 0

    def spend(self, num_opened: int = 1) -> None:
        """Count large pages that were opened."""
        num_required = min(self.required, num_opened)
        self.required -= num_required
        self.slack -= num_opened - num_required


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Result of preparing to add a user to cached small pages. Nothing is changed yet.

    Attributes:
        pages: The small pages, each used or evictable.
        revived: Evictable ones among them, in stretches. A stretch is a range if it is a run.
        revived_of: Large page -> number of its evictable small pages. Empty if each large page has
            only one small page.
        num_revived_large: Number of reclaimable large pages that sharing would put to use.
        added_spare: Number that sharing would add to `num_spare`.
        whole: Ranges of large pages with all small pages evictable. They are not in `revived_of`.
        repeated: Small pages that get a further user for each time they are in this list.
    """

    pages: Sequence[SmallPageId]
    revived: Sequence[Sequence[SmallPageId]]
    revived_of: Mapping[LargePageId, int]
    num_revived_large: int
    added_spare: int
    whole: Sequence[Sequence[LargePageId]] = ()
    repeated: Sequence[SmallPageId] = ()

    @property
    def num_revived(self) -> int:
        """Number of evictable small pages among them."""
        return sum(map(len, self.revived))


def unused_of(
    pages: Sequence[SmallPageId], stamps: Sequence[int], *, in_run: bool
) -> Sequence[SmallPageId]:
    """Return the evictable pages among used or evictable ones, as a range for a whole run."""
    if in_run:
        first, end = pages[0], pages[-1] + 1
        if NOT_QUEUED not in stamps[first:end]:
            return cast("Sequence[SmallPageId]", range(first, end))
    return [page for page in pages if stamps[page] >= 0]


def set_stamps(stamps: list[int], pages: Sequence[int], stamp: int) -> None:
    """Set one stamp for all pages, by one slice if they are a range."""
    if isinstance(pages, range):
        stamps[pages.start : pages.stop] = [stamp] * len(pages)
    else:
        for page in pages:
            stamps[page] = stamp


def add_users(
    extra_users: dict[SmallPageId, int], pages: Sequence[SmallPageId], stamps: Sequence[int]
) -> None:
    """Add a user to those of the pages that are used."""
    for page in pages:
        if stamps[page] < 0:
            extra_users[page] = extra_users.get(page, 0) + 1


def remove_users(
    extra_users: dict[SmallPageId, int], pages: Sequence[SmallPageId]
) -> list[SmallPageId]:
    """Remove one user from each page. Return the pages that have none left, in order."""
    unused: list[SmallPageId] = []
    for page in pages:
        others = extra_users.get(page, 0)
        if others > 1:
            extra_users[page] = others - 1
        elif others:
            del extra_users[page]
        else:
            unused.append(page)
    return unused


def check_extra_users(extra_users: dict[SmallPageId, int], used: set[SmallPageId]) -> None:
    """Raise `InvariantError` unless only used pages have more than one user."""
    if not used.issuperset(extra_users) or any(count < 1 for count in extra_users.values()):
        msg = f"extra users {extra_users} are not of the used pages {sorted(used)}"
        raise InvariantError(msg)


def rising(ranks: range) -> list[int]:
    """Return a range's ranks as a list. Adding large numbers is faster than iterating the range."""
    return list(accumulate(repeat(ranks.step, len(ranks) - 1), initial=ranks.start))


def extremes(ranks: Sequence[int]) -> tuple[int, int]:
    """Return the lowest and the highest of some ranks."""
    if isinstance(ranks, range):
        first, last = ranks[0], ranks[-1]
        return (first, last) if first < last else (last, first)
    return min(ranks), max(ranks)


def extremes_of_parts(
    ranks: list[int], num_ranks: int, *, is_even: bool
) -> tuple[list[int], list[int]]:
    """Return the lowest and the highest rank of each part of `num_ranks` ranks.

    If steps between ranks are even, these are at the ends of each part.
    """
    if not is_even:
        parts = [ranks[start : start + num_ranks] for start in range(0, len(ranks), num_ranks)]
        return list(map(min, parts)), list(map(max, parts))
    firsts, lasts = ranks[::num_ranks], ranks[num_ranks - 1 :: num_ranks]
    return (firsts, lasts) if firsts <= lasts else (lasts, firsts)
