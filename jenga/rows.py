"""Pages in a row: numbers that rise by one, as those of what was taken together do.

What is asked or noted of each page of a list takes a turn of Python's loop; of a row it takes a
slice. Rows are found by comparing with lists of numbers in a row, which is quickest where both hold
the same objects: so whoever hands pages out takes them from such a list.
"""

from collections.abc import Sequence
from itertools import compress, count, groupby
from operator import ne

FIRST_COMPARED = 16
"""Elements compared at once to begin with; four times as many while all are equal."""

LEAST_ROW = 8
"""Pages of a row worth a slice: shorter ones count as scattered."""


def num_equal(these: Sequence[object], others: Sequence[object]) -> int:
    """With how many equal elements two lists of one length begin."""
    if these == others:
        return len(these)
    return next(compress(count(), map(ne, these, others)), len(these))


def row_end(pages: Sequence[int], start: int, numbers: Sequence[int], place: int) -> int:
    """One past the last page of the row that begins at `start`.

    Args:
        pages: Of which some are in a row.
        start: Where.
        numbers: Numbers in a row.
        place: Where the first page's number is in these.
    """
    end, num_pages = start, len(pages)
    num_compared = FIRST_COMPARED
    while end < num_pages:
        row = numbers[place : place + num_compared]
        num_equals = num_equal(pages[end : end + len(row)], row)
        end += num_equals
        if num_equals < num_compared:
            break
        place += num_compared
        num_compared *= 4
    return end


def stretches_of(pages: Sequence[int], numbers: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Divide pages into rows and what is scattered between, as (start, end, whether a row).

    Args:
        pages: To divide.
        numbers: All numbers up to the greatest of them, each at its own place.
    """
    stretches: list[tuple[int, int, bool]] = []
    scattered = end = 0
    num_pages = len(pages)
    while end < num_pages:
        start = end
        end += 1
        if end < num_pages and pages[end] == pages[start] + 1:
            end = row_end(pages, start, numbers, pages[start])
            if end - start >= LEAST_ROW:
                if scattered < start:
                    stretches.append((scattered, start, False))
                stretches.append((start, end, True))
                scattered = end
    if scattered < num_pages:
        stretches.append((scattered, num_pages, False))
    return stretches


def runs_of(
    pages: Sequence[int], pages_per_large: int, numbers: Sequence[Sequence[int]]
) -> list[tuple[int, int, int, bool]]:
    """Stretches of pages in one large page, as (large page, start, end, whether a row).

    Args:
        pages: To divide.
        pages_per_large: Small pages of a large page.
        numbers: Large page -> its small pages in a row.
    """
    runs: list[tuple[int, int, int, bool]] = []
    end, num_pages = 0, len(pages)
    if num_pages == 1:
        return [(pages[0] // pages_per_large, 0, 1, False)]
    if pages_per_large < LEAST_ROW:
        for large, run in groupby([page // pages_per_large for page in pages]):
            start, end = end, end + len(list(run))
            runs.append((large, start, end, False))
        return runs
    while end < num_pages:
        start = end
        large, place = divmod(pages[start], pages_per_large)
        row = numbers[large]
        end = start + pages_per_large - place
        in_row = pages[start:end] == (row[place:] if place else row)
        if not in_row:
            end = last = row_end(pages, start, row, place)
            while end < num_pages and pages[end] // pages_per_large == large:
                end += 1
            in_row = end == last > start + 1
        runs.append((large, start, end, in_row))
    return runs
