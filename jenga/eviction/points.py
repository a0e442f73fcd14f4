"""Points of texts from which requests may go on, and the times of their reads.

A point is a prefix of a text, named by its hash. It may be kept or evicted. It is remembered for
some time after its eviction, because only then can it show whether the eviction was right.

Time is measured in bytes of cache that requests compute. It stands still while nothing is computed.
Points therefore age as fast as other points could replace them.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

REMEMBERED_ARENAS = 8.0
"""Time for which a point is remembered after its last read, in sizes of the arena.

With one arena, learning loses a ninth of the hits that are possible; two do nearly as well.
"""

LEARN_EVERY = 16
"""Number of admissions after which the policy learns from the observations."""


class Kind(IntEnum):
    """Place of a point in its text.

    Attributes:
        PROMPT_END: The end of a prompt.
        BEFORE_END: Some hundred tokens before the end of a prompt, where a question may begin.
        ANSWER_END: The end of the output that a request generated.
        BRANCH: The point where the texts of two requests part.
        IMAGE: An encoder's output for one image. It belongs to no text.
    """

    PROMPT_END = 0
    BEFORE_END = 1
    ANSWER_END = 2
    BRANCH = 3
    IMAGE = 4


GUESSES = (Kind.PROMPT_END, Kind.BEFORE_END)
"""Kinds of points that a running request leaves without knowing of any later reader."""


class Past(IntEnum):
    """Knowledge about the readers of a point.

    Attributes:
        NEW_TEXT: Not read yet. Left by a request whose text was new.
        KNOWN_TEXT: Not read yet. Left by a request that went on from within a known text.
        TURN: Not read yet. Left by a request that was the first to go on from the end of a prompt
            or an answer.
        READ: Read at least once.
    """

    NEW_TEXT = 0
    KNOWN_TEXT = 1
    TURN = 2
    READ = 3


class Point:
    """Knowledge about one point.

    Attributes:
        key: Hash of the prefix, or the name of an image.
        num_tokens: Number of tokens of the prefix.
        kind: Place in its text.
        past: Knowledge about its readers.
        num_reads: Number of known reads. A branch begins with the one that made it.
        waits_since: Time at which it was left or read last.
        last_kept: Time at which it was kept or read last.
    """

    __slots__ = ("key", "kind", "last_kept", "num_reads", "num_tokens", "past", "waits_since")

    def __init__(self, key: Hashable, num_tokens: int, kind: Kind, past: Past, time: float) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.kind = kind
        self.past = past
        self.num_reads = int(past == Past.READ)
        self.waits_since = self.last_kept = time


NO_POINT = Point(None, 0, Kind.BRANCH, Past.NEW_TEXT, 0.0)
"""Placeholder for the point of a node that is not kept."""


class Observer(Protocol):
    """Learns from how long points wait for a reader."""

    def observe(self, point: Point, waited_bytes: float, *, was_read: bool) -> None:
        """Record that a point's wait ended, with a reader or because it was forgotten.

        Args:
            point: The point, as it was during the wait.
            waited_bytes: Length of the wait, in bytes of cache computed.
            was_read: Whether a request asked for the point.
        """
        ...

    def learn(self, waiting: Iterable[Point], time: float) -> None:
        """Learn from the observations, and from the waits so far of points that still wait.

        Args:
            waiting: Points that still wait, by `waits_since`, oldest first.
            time: Now, in bytes of cache computed.
        """
        ...


class RememberedPoints:
    """All points that are remembered, and the time.

    Attributes:
        time: Bytes of cache that requests have computed so far.
    """

    __slots__ = ("_horizon_bytes", "_num_admitted", "_observer", "_points", "time")

    def __init__(self, observer: Observer, *, arena_bytes: int) -> None:
        """Start without points.

        Args:
            observer: Told of every wait that ends.
            arena_bytes: Size of the arena, the unit of the time for which points are remembered.
        """
        self._observer = observer
        self._horizon_bytes = REMEMBERED_ARENAS * arena_bytes
        self._points: OrderedDict[Hashable, Point] = OrderedDict()  # by `waits_since`
        self._num_admitted = 0
        self.time = 0.0

    def __len__(self) -> int:
        return len(self._points)

    def get(self, key: Hashable) -> Point | None:
        """Return the point of a key, if it is remembered."""
        return self._points.get(key)

    def path(self, prefix_hashes: Sequence[bytes]) -> list[Point]:
        """Return the remembered points on a text, in order."""
        return [point for point in map(self._points.get, prefix_hashes) if point is not None]

    def deepest(self, prefix_hashes: Sequence[bytes]) -> Point | None:
        """Return the last remembered point on a text."""
        return next(filter(None, map(self._points.get, reversed(prefix_hashes))), None)

    def record_point(self, key: Hashable, num_tokens: int, kind: Kind, past: Past) -> Point:
        """Record that a request leaves a point. A known point only becomes young again."""
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

    def record_read(self, point: Point) -> None:
        """Record that a request asks for a point, whether the point is kept or evicted."""
        self._observer.observe(point, self.time - point.waits_since, was_read=True)
        point.past = Past.READ
        point.num_reads += 1
        self._wait_again(point)

    def pass_on_reads(self, point: Point, successor: Point) -> None:
        """Record that readers of a point will go on from another one, which it was a guess of."""
        if point.num_reads > successor.num_reads:
            successor.num_reads = point.num_reads
            successor.past = Past.READ

    def reset_age(self, point: Point) -> None:
        """Make a kept point as young as one that was just left."""
        point.last_kept = self.time

    def forget(self, point: Point) -> None:
        """Forget a point that a later one replaced. The policy learns nothing from it."""
        self._points.pop(point.key, None)

    def _wait_again(self, point: Point) -> None:
        point.waits_since = self.time
        self._points[point.key] = point
        self._points.move_to_end(point.key)

    def record_admission(self, computed_bytes: float) -> None:
        """Record that a request is admitted: advance the time and forget points that are too old.

        Args:
            computed_bytes: Bytes of cache that the request computes.
        """
        self.time += computed_bytes
        points, oldest = self._points, self.time - self._horizon_bytes
        while points and (first := next(iter(points.values()))).waits_since < oldest:
            del points[first.key]
            self._observer.observe(first, self.time - first.waits_since, was_read=False)
        self._num_admitted += 1
        if self._num_admitted % LEARN_EVERY == 0:
            self._observer.learn(points.values(), self.time)


def past_of(deepest: Point | None) -> Past:
    """Return the past of the points that a request leaves.

    Args:
        deepest: The last remembered point on the request's text, if any.
    """
    if deepest is None:
        return Past.NEW_TEXT
    is_end = deepest.kind in (Kind.PROMPT_END, Kind.ANSWER_END)
    return Past.TURN if is_end and deepest.past != Past.READ else Past.KNOWN_TEXT
