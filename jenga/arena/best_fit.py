"""Best fit in constant time: large pages in bins, by their number of empty small pages."""

from collections.abc import Iterator

from jenga.errors import InvariantError

NO_PAGE = 0
"""Result of a search when no bin holds a page. The null page is never in a bin."""


class Bins:
    """Large pages by their number of empty small pages, which is at least one."""

    __slots__ = ("_bins", "_mask")

    def __init__(self) -> None:
        self._bins: dict[int, dict[int, None]] = {}
        self._mask = 0

    def add(self, large: int, num_empty: int) -> None:
        """Add a large page. A page without empty small pages is left out."""
        if num_empty:
            self._bins.setdefault(num_empty, {})[large] = None
            self._mask |= 1 << num_empty

    def remove(self, large: int, num_empty: int) -> None:
        """Remove a large page that was added with that number."""
        if num_empty:
            pages = self._bins[num_empty]
            del pages[large]
            if not pages:
                self._mask ^= 1 << num_empty

    def move(self, large: int, num_before: int, num_empty: int) -> None:
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

    def take_fullest(self) -> int:
        """Return the page of `fullest`, and count one empty small page less in it."""
        mask = self._mask
        if not mask:
            return NO_PAGE
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

    def fullest(self) -> int:
        """Return a large page with the fewest empty small pages, or `NO_PAGE`."""
        mask = self._mask
        return next(reversed(self._bins[(mask & -mask).bit_length() - 1])) if mask else NO_PAGE

    def emptiest(self) -> int:
        """Return a large page with the most empty small pages, or `NO_PAGE`."""
        mask = self._mask
        return next(reversed(self._bins[mask.bit_length() - 1])) if mask else NO_PAGE

    def in_order(self) -> Iterator[int]:
        """Yield all large pages in the order in which `fullest` would return them."""
        for num_empty in sorted(self._bins):
            yield from reversed(self._bins[num_empty])

    def contents(self) -> dict[int, int]:
        """Return each large page with its number of empty small pages."""
        return {large: count for count, pages in self._bins.items() for large in pages}

    def check(self, expected: dict[int, int]) -> None:
        """Raise `InvariantError` unless the bins hold exactly these pages."""
        mask = sum(1 << count for count, pages in self._bins.items() if pages)
        if self.contents() != expected or mask != self._mask:
            msg = f"bins hold {self.contents()}, expected {expected}"
            raise InvariantError(msg)
