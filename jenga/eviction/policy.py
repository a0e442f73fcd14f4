"""Eviction policies: what a checkpoint is worth; the one that is worth least goes first."""

from collections.abc import Iterable
from typing import Protocol

from jenga.eviction.points import Observer, Point


class Candidate(Protocol):
    """A checkpoint as policies see it.

    Attributes:
        point: The place in its text, and what is known of its readers.
        heir_of: A point that was evicted and whose readers will come here instead, if any.
        saved_tokens: Tokens that its next reader would have to compute again without it.
        own_bytes: Bytes that come free when it goes.
    """

    point: Point
    heir_of: Point | None
    saved_tokens: int
    own_bytes: int


class EvictionPolicy(Observer, Protocol):
    """Tells what checkpoints are worth.

    To add a policy, write a class with these methods and name it in `jenga.eviction.known`.

    Attributes:
        weighs_guesses: Whether `worth` can be asked before a checkpoint is made. Then a checkpoint
            that is only a guess is not made where it is worth less than what was evicted last.
    """

    weighs_guesses: bool

    def begin(self, *, arena_bytes: int) -> None:
        """Learn the size of the arena, before any other call."""
        ...

    def worth(self, candidate: Candidate, time: float) -> float:
        """What a checkpoint is worth at a time; only compared with what others are worth."""
        ...

    def heir_of(self, candidate: Candidate, heir: Candidate, time: float, /) -> Point | None:
        """The point whose readers an heir is to expect besides its own.

        Args:
            candidate: A checkpoint that goes.
            heir: The checkpoint before it on the same text, where its readers will start.
            time: Now.
        """
        ...


class LeastRecentlyUsed:
    """Checkpoints that were left or read longest ago go first."""

    __slots__ = ()

    weighs_guesses = False

    def begin(self, *, arena_bytes: int) -> None:
        """Nothing depends on it."""

    def observe(self, point: Point, waited_bytes: float, *, was_read: bool) -> None:
        """Nothing depends on it."""

    def learn(self, waiting: Iterable[Point], time: float) -> None:
        """Nothing depends on it."""

    def worth(self, candidate: Candidate, time: float) -> float:
        """The time of the last use."""
        return candidate.point.last_kept - time

    def heir_of(self, _candidate: Candidate, _heir: Candidate, _time: float, /) -> Point | None:
        """None: an heir is as old as its own last use."""
        return None
