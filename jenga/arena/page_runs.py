"""Runs: consecutive page ids, as pages that were taken together usually have.

Asking or storing something for each page of a list takes an iteration of Python's loop. For a run
it takes one slice. Runs are found by comparison with lists of consecutive ids, which is fastest
if both hold the same int objects. The allocator therefore hands out pages from such lists.
"""

from collections.abc import Sequence
from itertools import compress, count, groupby
from operator import ne
from typing import cast

from jenga.page_ids import LargePageId, SmallPageId

FIRST_COMPARED = 16
"""Number of elements compared at once at first. It doubles while all are equal."""

LEAST_RUN = 8
"""Number of pages of the shortest run that is worth a slice. Shorter ones count as scattered."""

LONG_RUN = 32
"""Shortest run that is searched if large pages have fewer than `LEAST_RUN` small pages."""


def num_equal(these: Sequence[object], others: Sequence[object]) -> int:
    """Return the number of equal elements with which two lists begin."""
    if these == others:
        return len(these)
    return next(compress(count(), map(ne, these, others)), min(len(these), len(others)))


def run_end(
    pages: Sequence[object],
    start: int,
    numbers: Sequence[object],
    place: int,
    end: int | None = None,
) -> int:
    """Return one past the last page of the run that begins at `start`.

    Args:
        pages: Pages, some of which are consecutive.
        start: Index of the first page of the run.
        numbers: Consecutive numbers.
        place: Index of the first page's number in `numbers`.
        end: Upper limit of the answer. By default, all pages.
    """
    most = len(pages) if end is None else end
    num_compared = FIRST_COMPARED
    while start < most:
        some = pages[start : min(most, start + num_compared)]
        num_equals = num_equal(some, numbers[place : place + len(some)])
        start += num_equals
        if num_equals < len(some):
            break
        place += num_equals
        num_compared *= 2
    return start


def stretches_of(pages: Sequence[int], ids: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Divide pages into runs and scattered pages, as (start, end, whether a run).

    Args:
        pages: Pages to divide.
        ids: All ids up to the greatest page, each at its own index.
    """
    stretches: list[tuple[int, int, bool]] = []
    scattered = end = 0
    num_pages = len(pages)
    while end < num_pages:
        start = end
        end += 1
        if end < num_pages and pages[end] == pages[start] + 1:
            end = run_end(pages, start, ids, pages[start])
            if end - start >= LEAST_RUN:
                if scattered < start:
                    stretches.append((scattered, start, False))
                stretches.append((start, end, True))
                scattered = end
    if scattered < num_pages:
        stretches.append((scattered, num_pages, False))
    return stretches


def parts_by_large(
    pages: Sequence[SmallPageId], pages_per_large: int, ids: Sequence[Sequence[SmallPageId]]
) -> list[tuple[LargePageId, int, int, bool]]:
    """Divide pages by large page, as (large page, start, end, whether a run).

    Args:
        pages: Pages to divide.
        pages_per_large: Number of small pages of a large page.
        ids: Large page -> the ids of its small pages.
    """
    parts: list[tuple[int, int, int, bool]] = []
    end, num_pages = 0, len(pages)
    if num_pages == 1:
        return [(cast("LargePageId", pages[0] // pages_per_large), 0, 1, False)]
    if pages_per_large < LEAST_RUN:
        for large, part in groupby([page // pages_per_large for page in pages]):
            start, end = end, end + len(list(part))
            parts.append((large, start, end, False))
        return cast("list[tuple[LargePageId, int, int, bool]]", parts)
    while end < num_pages:
        start = end
        large, place = divmod(pages[start], pages_per_large)
        run = ids[large]
        end = start + pages_per_large - place
        in_run = pages[start:end] == (run[place:] if place else run)
        if not in_run:
            end = last = run_end(pages, start, run, place)
            while end < num_pages and pages[end] // pages_per_large == large:
                end += 1
            in_run = end == last > start + 1
        parts.append((large, start, end, in_run))
    return cast("list[tuple[LargePageId, int, int, bool]]", parts)


def large_runs_of(
    pages: Sequence[SmallPageId], pages_per_large: int, ids: Sequence[Sequence[SmallPageId]]
) -> list[tuple[int, int, bool]]:
    """Divide pages into runs, within one large page or of whole large pages, and others.

    If large pages have few small pages, examining each would take too long. Then only long runs of
    whole large pages are found, and the pages between them may be in several large pages.

    Args:
        pages: Pages to divide.
        pages_per_large: Number of small pages of a large page.
        ids: Large page -> the ids of its small pages.

    Returns:
        (start, end, whether a run) in order.
    """
    if pages_per_large < LEAST_RUN:
        return _long_runs_of(pages, pages_per_large)
    stretches: list[tuple[int, int, bool]] = []
    next_large = run_start = 0  # next large page, and start, of the present run of whole ones
    for large, start, end, in_run in parts_by_large(pages, pages_per_large, ids):
        is_whole = in_run and end - start == pages_per_large
        if is_whole and large == next_large:
            stretches[-1] = (run_start, end, True)
        else:
            stretches.append((start, end, in_run))
            run_start = start
        next_large = large + 1 if is_whole else 0
    return stretches


def _long_runs_of(pages: Sequence[int], pages_per_large: int) -> list[tuple[int, int, bool]]:
    """Do the work of `large_runs_of` if large pages have few small pages."""
    stretches: list[tuple[int, int, bool]] = []
    scattered = start = 0
    num_pages = len(pages)
    while start < num_pages:
        last = start + LONG_RUN - 1
        if last >= num_pages or pages[last] != pages[start] + LONG_RUN - 1:
            start += LONG_RUN
            continue
        end = start + run_length(pages, start)
        first = start + -pages[start] % pages_per_large
        end -= (end - first) % pages_per_large
        if end - first >= 2 * pages_per_large:
            if scattered < first:
                stretches.append((scattered, first, False))
            stretches.append((first, end, True))
            scattered = end
        start = max(end, start + 1)
    if scattered < num_pages:
        stretches.append((scattered, num_pages, False))
    return stretches


def run_length(pages: Sequence[int], start: int) -> int:
    """Return the number of pages of the run that begins at an index."""
    first, length, num_compared = pages[start], 0, LONG_RUN
    while start + length < len(pages):
        some = pages[start + length : start + length + num_compared]
        num_equals = num_equal(some, list(range(first + length, first + length + len(some))))
        length += num_equals
        if num_equals < len(some):
            break
        num_compared *= 2
    return length
