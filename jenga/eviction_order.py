"""Eviction orders: the rank of a page that loses its last user; the lowest rank goes first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from jenga.geometry import Geometry
from jenga.spec import ChunkedLocal, SlidingWindow, State

_LENGTH_BITS = 28
"""Room for prefix lengths below the time: no request reaches 268 million tokens."""

_MOST_TOKENS = (1 << _LENGTH_BITS) - 1

_STEP_BITS = 36
"""Room for the time below what goes before it: two years of steps of a millisecond."""


class Prospect(IntEnum):
    """What is known of pages that lose a user about who may ask for them again.

    Attributes:
        PASSED: Read only by who goes on from a place where nobody has gone on yet.
        NEAR: Likewise, but the place is not far from the end of a prompt.
        ENDED: Read by who goes on from the end of a prompt or of a request.
        BRANCHED: Read by who goes on from where requests have gone different ways.
        HELD: One of the last two, while the request runs: the other pages that one would need to
            go on from there are in use.
    """

    PASSED = 0
    NEAR = 1
    ENDED = 2
    BRANCHED = 3
    HELD = 4


_LEVELS = {
    Prospect.PASSED: 0,
    Prospect.NEAR: 1,
    Prospect.ENDED: 2,
    Prospect.BRANCHED: 2,
    Prospect.HELD: 3,
}
"""What goes before the time. Branches and ends compete: a session goes on from its end."""


_AWAITED_LEVEL, _AWAITED_HELD_LEVEL = 4, 5
"""Above all others. What is held takes little beside the pages in use that it completes."""


ENDED_RANK = _LEVELS[Prospect.ENDED] << _STEP_BITS + _LENGTH_BITS
"""Ranks from here on are of what somebody is likely to go on from, if an order tells that."""

WANTED_RANK = _LEVELS[Prospect.HELD] << _STEP_BITS + _LENGTH_BITS
"""Ranks from here on are of what running requests hold for others, and what waiting ones read."""


@dataclass(slots=True)
class Leaving:
    """Pages of one page table that lose a user together.

    Attributes:
        step: The step in which they count as touched last.
        prospect: Who may ask for them again.
        prefix_lengths: Of each page, tokens up to its end or what its policy puts there.
    """

    step: int
    prospect: Prospect
    prefix_lengths: Sequence[int]


class EvictionOrder(Protocol):
    """Ranks pages. One order serves all page tables, so that their pages go together.

    Attributes:
        looks_ahead: Whether what waiting requests will read goes last, the first reader's at the
            very last; see `jenga.waiting`.
    """

    looks_ahead: bool

    def ranks(self, leaving: Leaving, /) -> Sequence[int]:
        """Ranks of pages, the least prefix length the highest; a range if the lengths are one."""
        ...

    def rank(self, step: int, prospect: Prospect, prefix_length: int, /) -> int:
        """The rank of one page that loses a user by itself."""
        ...

    def expects_readers(self, rank: int, /) -> bool:
        """Whether somebody is likely to go on from a page that was evicted at a rank."""
        ...

    def begin(self, geometry: Geometry, /) -> None:
        """Learn how the arena is cut, before any page is ranked."""
        ...

    def evicted(self, rank: int, step: int, /) -> None:
        """Take note, in a step, of the rank of what was evicted last."""
        ...


class LeastRecentlyUsed:
    """The step of the last access first, then the longest prefix.

    Source: Jenga paper, section 5.1.
    """

    __slots__ = ()

    looks_ahead = False

    def ranks(self, leaving: Leaving, /) -> Sequence[int]:
        """Later steps above earlier ones, shorter prefixes above longer ones."""
        return _place(leaving.step, leaving.prefix_lengths)

    def rank(self, step: int, prospect: Prospect, prefix_length: int, /) -> int:
        """As `ranks`."""
        return self.ranks(Leaving(step, prospect, [prefix_length]))[0]

    def expects_readers(self, _rank: int, /) -> bool:
        """Of any page: nothing else is known of it."""
        return True

    def begin(self, _geometry: Geometry, /) -> None:
        """Nothing depends on it."""

    def evicted(self, _rank: int, _step: int, /) -> None:
        """Nothing depends on it."""


class LeastWanted(LeastRecentlyUsed):
    """What nobody is likely to go on from first; among equals the least recently used.

    A prefix is hit only where every page table can go on from, and of a window that is a small
    part of the pages a prompt has passed through. The others go before any prefix that is whole.
    """

    __slots__ = ()

    def ranks(self, leaving: Leaving, /) -> Sequence[int]:
        """By prospect, but for branches and ends, then as the least recently used."""
        level = _LEVELS[leaving.prospect]
        return _place((level << _STEP_BITS) + leaving.step, leaving.prefix_lengths)

    def rank(self, step: int, prospect: Prospect, prefix_length: int, /) -> int:
        """As `ranks`."""
        time = (_LEVELS[prospect] << _STEP_BITS) + step
        return (time << _LENGTH_BITS) + _MOST_TOKENS - prefix_length

    def expects_readers(self, rank: int, /) -> bool:
        """Not of pages that were passed where nobody has gone on yet."""
        return rank >> _LENGTH_BITS + _STEP_BITS > _LEVELS[Prospect.PASSED]


class QueueAware(LeastWanted):
    """Like `LeastWanted`, but what waiting requests will read goes after everything else.

    Who waits is served before whoever is still to come, so among the pages that the queue reads
    those of its last readers go first, and none of them before a page that nobody waits for.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
    """

    __slots__ = ()

    looks_ahead = True


class _Lasting(LeastWanted):
    """What measures how long pages stay, to let some stay longer.

    Source: the scale of time is GreedyDual's.
    """

    __slots__ = ("_lifetime_steps", "_lifetimes")

    def __init__(self, lifetimes: float) -> None:
        self._lifetimes = lifetimes
        self._lifetime_steps = 0

    def evicted(self, rank: int, step: int, /) -> None:
        """Measure how long pages stay."""
        level, touched = divmod(rank >> _LENGTH_BITS, 1 << _STEP_BITS)
        if level == _LEVELS[Prospect.ENDED]:
            self._lifetime_steps = max(0, step - touched)

    def rank(self, step: int, prospect: Prospect, prefix_length: int, /) -> int:
        """As `ranks`."""
        return self.ranks(Leaving(step, prospect, [prefix_length]))[0]

    def _later(self, leaving: Leaving, share: float) -> Sequence[int]:
        """Ranks as if touched later, by a share of what is given at most."""
        step = leaving.step + int(share * self._lifetimes * self._lifetime_steps)
        level = _LEVELS[leaving.prospect]
        return _place((level << _STEP_BITS) + step, leaving.prefix_lengths)


class ProtectedPrefixes(_Lasting):
    """Like `LeastWanted`, but prefixes that requests share outlive what one request left.

    Source: segmented LRU.
    """

    __slots__ = ()

    def __init__(self, lifetimes: float = 2.0) -> None:
        """No page was evicted.

        Args:
            lifetimes: How much longer they stay, in the steps that pages stay.
        """
        super().__init__(lifetimes)

    def ranks(self, leaving: Leaving, /) -> Sequence[int]:
        """Branches at a later time."""
        return self._later(leaving, float(leaving.prospect == Prospect.BRANCHED))


class CostAware(_Lasting):
    """Like `LeastWanted`, but prefixes that save more tokens for their bytes stay longer.

    A window or a state takes the same bytes after a short prefix as after a long one, so what a
    hit saves for each byte kept grows with the prefix.

    Source: GreedyDual-Size; Marconi (arXiv 2411.19379), section 5, for prefixes with states.
    """

    __slots__ = ("_fixed_bytes", "_token_bytes")

    def __init__(self, lifetimes: float = 1.0) -> None:
        """No page was evicted.

        Args:
            lifetimes: How much longer the longest prefix stays than the shortest, in the steps that
                pages stay.
        """
        super().__init__(lifetimes)
        self._token_bytes = self._fixed_bytes = 0.0

    def begin(self, geometry: Geometry, /) -> None:
        """Add up what grows with a prefix and what does not."""
        for table in geometry.page_tables:
            token_bytes = table.small_page_bytes / table.tokens_per_page
            match table.layer_type:
                case SlidingWindow(window_tokens=window_tokens):
                    self._fixed_bytes += window_tokens * token_bytes
                case ChunkedLocal(chunk_tokens=chunk_tokens):
                    self._fixed_bytes += chunk_tokens / 2 * token_bytes
                case State():
                    self._fixed_bytes += table.small_page_bytes
                case _:
                    self._token_bytes += token_bytes

    def ranks(self, leaving: Leaving, /) -> Sequence[int]:
        """The later, the more of the bytes are those of tokens that a hit saves."""
        lengths = leaving.prefix_lengths
        kept_bytes = max(lengths[0], lengths[-1]) * self._token_bytes
        all_bytes = kept_bytes + self._fixed_bytes
        return self._later(leaving, kept_bytes / all_bytes if all_bytes else 0.0)


EVICTION_ORDERS: Mapping[str, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "wanted": LeastWanted,
    "queue": QueueAware,
    "protected": ProtectedPrefixes,
    "cost": CostAware,
}
"""Eviction orders by name."""


NOT_AWAITED = -1
"""Place in the queue of the first reader of a page that has none there."""


def awaited_ranks(
    ranks: Sequence[int], positions: Sequence[int], prospect: Prospect
) -> Sequence[int]:
    """Ranks of pages of which waiting requests will read some.

    Args:
        ranks: Of the pages, if nobody waited for them.
        positions: Of the first such request in the queue, or `NOT_AWAITED`.
        prospect: What else is known of them.
    """
    level = _AWAITED_HELD_LEVEL if prospect == Prospect.HELD else _AWAITED_LEVEL
    latest = (level << _STEP_BITS) + (1 << _STEP_BITS) - 1
    return [
        rank
        if position == NOT_AWAITED
        else (latest - position << _LENGTH_BITS) + (rank & _MOST_TOKENS)
        for rank, position in zip(ranks, positions, strict=True)
    ]


def is_held(rank: int) -> bool:
    """Whether a rank is one of `Prospect.HELD`."""
    level = rank >> _LENGTH_BITS + _STEP_BITS
    return level in (_LEVELS[Prospect.HELD], _AWAITED_HELD_LEVEL)


def prefix_length(rank: int) -> int:
    """The prefix length that went into a rank."""
    return _MOST_TOKENS - (rank & _MOST_TOKENS)


def _place(time: int, prefix_lengths: Sequence[int]) -> Sequence[int]:
    youngest = (time << _LENGTH_BITS) + _MOST_TOKENS
    if isinstance(prefix_lengths, range):
        lengths = prefix_lengths
        return range(youngest - lengths.start, youngest - lengths.stop, -lengths.step)
    return [youngest - length for length in prefix_lengths]
