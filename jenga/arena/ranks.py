"""Ranks in the eviction queue for cached pages without a user. The lowest is evicted first."""

PINNED_RANK = 1 << 48
"""Lowest rank of pages that a checkpoint needs. They are evicted with the checkpoint."""

LOADED_RANK = 2 * PINNED_RANK
"""Lowest rank of pages loaded from host memory for a request that will be admitted next."""


class RankClock:
    """Gives ranks that rise with every call.

    If pages lose their user together, the first page of the text has the highest rank, because the
    others are useless without it.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    @property
    def next_rank(self) -> int:
        """The lowest rank of pages that no checkpoint needs, as far as it was not given yet."""
        return self._next

    def loose_ranks(self, num_pages: int) -> range:
        """Return ranks for pages that no checkpoint needs."""
        first = self._next
        self._next = first + num_pages
        return range(first + num_pages - 1, first - 1, -1)

    def pinned_ranks(self, num_pages: int) -> range:
        """Return ranks for pages that checkpoints need."""
        first = PINNED_RANK + self._next
        self._next += num_pages
        return range(first + num_pages - 1, first - 1, -1)

    def loaded_ranks(self, num_pages: int) -> range:
        """Return ranks for pages that will be read soon."""
        first = LOADED_RANK + self._next
        self._next += num_pages
        return range(first + num_pages - 1, first - 1, -1)
