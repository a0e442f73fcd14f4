"""Eviction policies. They say what a checkpoint is worth, and the one worth least is evicted."""

from collections.abc import Iterable
from typing import Protocol

from jenga.eviction.points import Observer, Point


class Candidate(Protocol):
    """A checkpoint as policies see it.

    Attributes:
        point: Place in its text, and what is known about its readers.
        heir_of: Evicted point whose readers will start from here instead, if any.
        saved_tokens: Number of tokens that its next reader would have to compute again without it.
        own_bytes: Bytes that its eviction frees.
    """

    point: Point
    heir_of: Point | None
    saved_tokens: int
    own_bytes: int


class EvictionPolicy(Observer, Protocol):
    """Says what checkpoints are worth.

    To add a policy, write a class with these methods and name it in `jenga.eviction.known`.

    Attributes:
        weighs_guesses: Whether `worth` can be asked before a checkpoint is made. If so, a
            checkpoint that is only a guess is not made if it is worth less than the one evicted
            last.
    """

    weighs_guesses: bool

    def begin(self, *, arena_bytes: int) -> None:
        """Store the size of the arena. This is the first call."""
        ...

    def worth(self, candidate: Candidate, time: float) -> float:
        """Return the worth of a checkpoint at a time. It is only compared with that of others."""
        ...

    def heir_of(self, candidate: Candidate, heir: Candidate, time: float, /) -> Point | None:
        """Return the point whose readers an heir will have in addition to its own.

        Args:
            candidate: A checkpoint that is evicted.
            heir: The checkpoint before it on the same text, where its readers will start.
            time: Now, in bytes of cache computed.
        """
        ...


class LeastRecentlyUsed:
    """Evicts the checkpoint that was left or read longest ago."""

    __slots__ = ()

    weighs_guesses = False

    def begin(self, *, arena_bytes: int) -> None:
        """Do nothing. The size of the arena does not matter."""

    def observe(self, point: Point, waited_bytes: float, *, was_read: bool) -> None:
        """Do nothing. Waits do not matter."""

    def learn(self, waiting: Iterable[Point], time: float) -> None:
        """Do nothing. Waits do not matter."""

    def worth(self, candidate: Candidate, time: float) -> float:
        """Return the time of the last use, relative to now."""
        return candidate.point.last_kept - time

    def heir_of(self, _candidate: Candidate, _heir: Candidate, _time: float, /) -> Point | None:
        """Return None. An heir is as old as its own last use."""
        return None
