"""Eviction orders: the rank of a page that loses its last user; the lowest rank goes first."""

from collections.abc import Sequence
from typing import Protocol

_LENGTH_BITS = 32
"""Room for prefix lengths below the time: no request reaches 2**32 tokens."""

_MOST_TOKENS = (1 << _LENGTH_BITS) - 1


class EvictionOrder(Protocol):
    """Ranks pages. One order serves all page tables, so that their pages go together."""

    def ranks(self, step: int, prefix_lengths: Sequence[int], /) -> Sequence[int]:
        """Ranks of pages last touched in a step, the least prefix length the highest.

        Args:
            step: The step in which the pages were touched last.
            prefix_lengths: Of each page, tokens up to its end or what its policy puts there.
        """
        ...


class LeastRecentlyUsed:
    """The step of the last access first, then the longest prefix.

    Source: Jenga paper, section 5.1.
    """

    __slots__ = ()

    def ranks(self, step: int, prefix_lengths: Sequence[int], /) -> Sequence[int]:
        """Later steps above earlier ones, shorter prefixes above longer ones."""
        youngest = (step << _LENGTH_BITS) + _MOST_TOKENS
        if isinstance(prefix_lengths, range):
            lengths = prefix_lengths
            return range(youngest - lengths.start, youngest - lengths.stop, -lengths.step)
        return [youngest - length for length in prefix_lengths]
