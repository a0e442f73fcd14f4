"""Points of texts from which requests may go on, and when each was read, whether kept or not.

A point is a prefix of a text, named by its hash. It is remembered for some time after it was
evicted, because only then it shows whether the eviction was right.

Time is counted in bytes of cache that requests computed. It stands still while nothing is
computed, and points grow old as fast as others could take their place.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

REMEMBERED_ARENAS = 8.0
"""Arenas full of computed bytes for which a point is remembered after it was last read.

With one arena, learning loses a ninth of the hits that are possible; two do nearly as well.
"""

LEARN_EVERY = 16
"""Admissions after which a policy takes in what was observed."""


class Kind(IntEnum):
    """Where in a text a point is.

    Attributes:
        PROMPT_END: The end of a prompt.
        BEFORE_END: Some hundred tokens before the end of a prompt, where a question may begin.
        ANSWER_END: The end of what a request generated.
        BRANCH: Where two requests went different ways.
        IMAGE: An encoder's output for one image; it belongs to no text.
    """

    PROMPT_END = 0
    BEFORE_END = 1
    ANSWER_END = 2
    BRANCH = 3
    IMAGE = 4


GUESSES = (Kind.PROMPT_END, Kind.BEFORE_END)
"""Points of a request that still runs, left without knowing that another request goes on there."""


class Past(IntEnum):
    """What is known of a point's readers.

    Attributes:
        NEW_TEXT: Not read yet; left by a request whose text nobody had sent before.
        KNOWN_TEXT: Not read yet; left by a request that went on from within a known text.
        TURN: Not read yet; left by a request that was the first to go on from the end of a prompt
            or an answer.
        READ: Read at least once.
    """

    NEW_TEXT = 0
    KNOWN_TEXT = 1
    TURN = 2
    READ = 3


class Point:
    """What is remembered of one point.

    Attributes:
        key: Hash of the prefix, or the name of an image.
        num_tokens: Tokens of the prefix.
        kind: Where in its text it is.
        past: What is known of its readers.
        waits_since: Time at which it was left or read last.
        last_kept: Time at which it was kept or read last.
    """

    __slots__ = ("key", "kind", "last_kept", "num_tokens", "past", "waits_since")

    def __init__(self, key: Hashable, num_tokens: int, kind: Kind, past: Past, time: float) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.kind = kind
        self.past = past
        self.waits_since = self.last_kept = time


NO_POINT = Point(None, 0, Kind.BRANCH, Past.NEW_TEXT, 0.0)
"""Stands for the point of what is not kept."""


class Observer(Protocol):
    """Learns from how long points wait for a reader."""

    def observe(self, point: Point, waited_bytes: float, *, was_read: bool) -> None:
        """Record that a point's wait ended, with a reader or because it was forgotten.

        Args:
            point: As it was until then.
            waited_bytes: How long it had waited.
            was_read: Whether a request asked for it.
        """
        ...

    def learn(self, waiting: Iterable[Point], time: float) -> None:
        """Take in what was observed, and how long the points that still wait have waited."""
        ...


class ReuseHistory:
    """All points that are remembered, and the time.

    Attributes:
        time: Bytes of cache that requests computed so far.
    """

    __slots__ = ("_horizon_bytes", "_num_admitted", "_observer", "_points", "time")

    def __init__(self, observer: Observer, *, arena_bytes: int) -> None:
        """Nothing is known.

        Args:
            observer: Told of every wait that ends.
            arena_bytes: Size of the arena, by which time is measured.
        """
        self._observer = observer
        self._horizon_bytes = REMEMBERED_ARENAS * arena_bytes
        self._points: OrderedDict[Hashable, Point] = OrderedDict()  # by `waits_since`
        self._num_admitted = 0
        self.time = 0.0

    def __len__(self) -> int:
        return len(self._points)

    def get(self, key: Hashable) -> Point | None:
        """The point of a key, if it is remembered."""
        return self._points.get(key)

    def path(self, prefix_hashes: Sequence[bytes]) -> list[Point]:
        """The points that a text passes, in order."""
        return [point for point in map(self._points.get, prefix_hashes) if point is not None]

    def deepest(self, prefix_hashes: Sequence[bytes]) -> Point | None:
        """The last point that a text passes."""
        return next(filter(None, map(self._points.get, reversed(prefix_hashes))), None)

    def leave(self, key: Hashable, num_tokens: int, kind: Kind, past: Past) -> Point:
        """Record that a request leaves a point; a point that is known only grows young again."""
        point = self._points.get(key)
        if point is None:
            point = Point(key, num_tokens, kind, past, self.time)
            self._points[key] = point
            return point
        point.last_kept = self.time
        if kind == Kind.BRANCH != point.kind:
            self._observer.observe(point, self.time - point.waits_since, was_read=False)
            point.kind = kind
            self._wait_again(point)
        return point

    def read(self, point: Point) -> None:
        """Record that a request asks for a point, whether it is kept or not."""
        self._observer.observe(point, self.time - point.waits_since, was_read=True)
        point.past = Past.READ
        self._wait_again(point)

    def renew(self, point: Point) -> None:
        """Let a point that is kept be as young as one that was just left."""
        point.last_kept = self.time

    def forget(self, point: Point) -> None:
        """Forget a point that was replaced by a later one; nothing is learnt from it."""
        self._points.pop(point.key, None)

    def _wait_again(self, point: Point) -> None:
        point.waits_since = self.time
        self._points[point.key] = point
        self._points.move_to_end(point.key)

    def admit(self, computed_bytes: float) -> None:
        """Let time pass, as a request comes in that computes so much; forget what is too old."""
        self.time += computed_bytes
        points, oldest = self._points, self.time - self._horizon_bytes
        while points and (first := next(iter(points.values()))).waits_since < oldest:
            del points[first.key]
            self._observer.observe(first, self.time - first.waits_since, was_read=False)
        self._num_admitted += 1
        if self._num_admitted % LEARN_EVERY == 0:
            self._observer.learn(points.values(), self.time)


def past_of(deepest: Point | None) -> Past:
    """The past of the points that a request leaves, by the deepest point that its text passes."""
    if deepest is None:
        return Past.NEW_TEXT
    is_end = deepest.kind in (Kind.PROMPT_END, Kind.ANSWER_END)
    return Past.TURN if is_end and deepest.past != Past.READ else Past.KNOWN_TEXT
