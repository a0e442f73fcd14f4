"""Ranks of cached pages without a user; the lowest rank goes first."""

KEPT_RANK = 1 << 48
"""Ranks from here on are of pages that a checkpoint needs: they go when the checkpoint does."""

LOADED_RANK = 2 * KEPT_RANK
"""Ranks from here on are of pages brought from host memory for a request that comes in next."""


class RankClock:
    """Gives ranks that rise with every call.

    Of pages that lose their user together, the first of a text has the highest rank: the others are
    of no use without it.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def loose(self, num_pages: int) -> range:
        """Ranks of pages that no checkpoint needs."""
        first = self._next
        self._next = first + num_pages
        return range(first + num_pages - 1, first - 1, -1)

    def kept(self, num_pages: int) -> range:
        """Ranks of pages that checkpoints need."""
        first = KEPT_RANK + self._next
        self._next += num_pages
        return range(first + num_pages - 1, first - 1, -1)

    def loaded(self, num_pages: int) -> range:
        """Ranks of pages that are about to be read."""
        first = LOADED_RANK + self._next
        self._next += num_pages
        return range(first + num_pages - 1, first - 1, -1)
