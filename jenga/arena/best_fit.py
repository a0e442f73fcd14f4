"""Best fit in constant time: large pages in bins, by their number of empty small pages."""

from collections.abc import Iterator

from jenga.errors import InvariantError
from jenga.page_ids import NULL_LARGE_PAGE, LargePageId


class Bins:
    """Large pages by their number of empty small pages, which is at least one.

    A search returns the null page if there is no large page. The null page is never in a bin.
    """

    __slots__ = ("_bins", "_mask")

    def __init__(self) -> None:
        self._bins: dict[int, dict[LargePageId, None]] = {}
        self._mask = 0

    def add(self, large: LargePageId, num_empty: int) -> None:
        """Add a large page. A page without empty small pages is left out."""
        if num_empty:
            self._bins.setdefault(num_empty, {})[large] = None
            self._mask |= 1 << num_empty

    def remove(self, large: LargePageId, num_empty: int) -> None:
        """Remove a large page that was added with that number."""
        if num_empty:
            pages = self._bins[num_empty]
            del pages[large]
            if not pages:
                self._mask ^= 1 << num_empty

    def move(self, large: LargePageId, num_before: int, num_empty: int) -> None:
        """Change the number of empty small pages of a large page. 0 removes the page."""
        bins = self._bins
        pages = bins[num_before]
        del pages[large]
        if not pages:
            self._mask ^= 1 << num_before
        if num_empty:
            pages = bins.get(num_empty)
            if pages is None:
                pages = bins[num_empty] = {}
            pages[large] = None
            self._mask |= 1 << num_empty

    def take_fullest(self) -> LargePageId:
        """Return the page of `fullest`, and count one empty small page less in it."""
        mask = self._mask
        if not mask:
            return NULL_LARGE_PAGE
        lowest = mask & -mask
        num_empty = lowest.bit_length() - 1
        pages = self._bins[num_empty]
        large, _ = pages.popitem()
        if not pages:
            self._mask = mask = mask ^ lowest
        if num_empty > 1:
            self._bins.setdefault(num_empty - 1, {})[large] = None
            self._mask = mask | lowest >> 1
        return large

    def fullest(self) -> LargePageId:
        """Return a large page with the fewest empty small pages, or the null page."""
        mask = self._mask
        return (
            next(reversed(self._bins[(mask & -mask).bit_length() - 1])) if mask else NULL_LARGE_PAGE
        )

    def emptiest(self) -> LargePageId:
        """Return a large page with the most empty small pages, or the null page."""
        mask = self._mask
        return next(reversed(self._bins[mask.bit_length() - 1])) if mask else NULL_LARGE_PAGE

    def in_order(self) -> Iterator[LargePageId]:
        """Yield all large pages in the order in which `fullest` would return them."""
        for num_empty in sorted(self._bins):
            yield from reversed(self._bins[num_empty])

    def contents(self) -> dict[LargePageId, int]:
        """Return each large page with its number of empty small pages."""
        return {large: count for count, pages in self._bins.items() for large in pages}

    def check(self, expected: dict[LargePageId, int]) -> None:
        """Raise `InvariantError` unless the bins hold exactly these pages."""
        mask = sum(1 << count for count, pages in self._bins.items() if pages)
        if self.contents() != expected or mask != self._mask:
            msg = f"bins hold {self.contents()}, expected {expected}"
            raise InvariantError(msg)
