"""The default eviction policy: expected tokens that a checkpoint saves, per byte it takes.

Points fall into classes, by their place in the text and by what is known about their readers. For
each class, the policy counts after how long its points are read, evicted points included. The rate
at which a point of some age is read follows from that. It is the number of reads between now and a
horizon, divided by the time that points of this class and age wait for them. A wait ends with the
read or at the horizon. The horizon is the one that gives the highest rate.

    worth = rate(class, age) * tokens that a reader saves / bytes that are freed

If texts are read in turn, round after round, old points are worth more than young ones. If
conversations continue, young points are worth more.

The number of reads before changes the rate by a factor (`jenga.eviction.read_trend`), which is
learnt for each kind of point.

Sources: the least hit density of Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by
Maximizing Hit Density" (NSDI 2018), for rates by class and age; Gittins' index for the horizon.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import log2

from jenga.eviction.points import Kind, Past, Point
from jenga.eviction.policy import Candidate
from jenga.eviction.read_trend import ReadTrend

AGES_PER_DOUBLING = 2
"""Number of ranges of ages per doubling. Each range is 1.41 times as long as the one before."""

YOUNGEST_SHARE = 1 / 256
"""Share of an arena that sets the first range of ages.

A point is in that range until about so many bytes of cache were computed after it.
"""

NUM_AGES = 11 * AGES_PER_DOUBLING + 2
"""Number of ranges, up to the age at which points are forgotten, which is eight arenas."""

KEPT_SHARE = 0.97
"""Factor by which counts shrink whenever the policy learns, so that old observations fade."""

COMMON_WEIGHT = 8.0
"""Number of observations that weigh as much as the knowledge of all classes together."""

PRIOR = 0.02
"""Number of reads and of waits that every class is assumed to have at every age."""

NUM_PASTS = len(Past)
NUM_CLASSES = len(Kind) * NUM_PASTS

_WIDTHS = [
    YOUNGEST_SHARE
    * (
        2 ** ((age - 1) / AGES_PER_DOUBLING)
        - (2 ** ((age - 2) / AGES_PER_DOUBLING) if age else 0.0)
    )
    for age in range(NUM_AGES)
]
"""Length of each range of ages, in arenas."""


class LearnedReuse:
    """Learns when points of each class are read again."""

    __slots__ = ("_bytes_scale", "_expected", "_num_lost", "_num_read", "_rates", "_trends")

    weighs_guesses = True

    def __init__(self) -> None:
        """Start without observations: all classes are alike, and young points are worth more."""
        self._bytes_scale = 1.0
        # Class -> range of ages -> number of reads, and of waits that ended without a read.
        self._num_read = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._num_lost = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        nothing = [PRIOR] * NUM_AGES
        self._rates = [_best_rates(nothing, nothing)] * NUM_CLASSES
        self._trends = [ReadTrend() for _ in Kind]
        # Class -> range of ages -> number of reads to be expected in a wait until then.
        self._expected = [[0.0] * NUM_AGES] * NUM_CLASSES

    def begin(self, *, arena_bytes: int) -> None:
        """Store the size of the arena, which is the unit of ages."""
        self._bytes_scale = 1 / (YOUNGEST_SHARE * max(1, arena_bytes))

    def observe(self, point: Point, waited_bytes: float, *, was_read: bool) -> None:
        """Count one wait that ended."""
        counts = self._num_read if was_read else self._num_lost
        age = self._age(waited_bytes)
        counts[_class_of(point)][age] += 1
        if point.num_reads:
            expected = self._expected[_class_of(point)][age]
            self._trends[point.kind].observe(point.num_reads, expected, was_read=was_read)

    def learn(self, waiting: Iterable[Point], time: float) -> None:
        """Compute rates from the counts. A point that still waits counts as a wait of its age."""
        waits = [counts[:] for counts in self._num_lost]
        # Points come in the order of their time, which gives ages without a logarithm for each
        # point.
        edges = [
            2 ** ((age - 1) / AGES_PER_DOUBLING) / self._bytes_scale for age in range(NUM_AGES - 1)
        ]
        age = NUM_AGES - 1
        since = time - edges[age - 1]
        trends = [ReadTrend() for _ in Kind]
        for point in waiting:
            while age and point.waits_since > since:
                age -= 1
                since = time - edges[age - 1] if age else time + 1
            waits[_class_of(point)][age] += 1
            if point.num_reads:
                expected = self._expected[_class_of(point)][age]
                trends[point.kind].observe(point.num_reads, expected, was_read=False)
        for trend, lasting in zip(self._trends, trends, strict=True):
            trend.learn(lasting)
        all_read = [sum(column) for column in zip(*self._num_read, strict=True)]
        all_waits = [sum(column) for column in zip(*waits, strict=True)]
        num_all = max(1.0, sum(all_read) + sum(all_waits))
        unknown: tuple[list[float], list[float]] | None = None
        for index, (read, lost) in enumerate(zip(self._num_read, waits, strict=True)):
            num_known = sum(read) + sum(lost)
            if not num_known and unknown is not None:
                self._rates[index], self._expected[index] = unknown
                continue
            common = COMMON_WEIGHT / (COMMON_WEIGHT + num_known) * COMMON_WEIGHT / num_all
            reads = [a + common * b + PRIOR for a, b in zip(read, all_read, strict=True)]
            losses = [a + common * b + PRIOR for a, b in zip(lost, all_waits, strict=True)]
            self._rates[index] = _best_rates(reads, losses)
            self._expected[index] = _expected_reads(reads, losses)
            if not num_known:
                unknown = self._rates[index], self._expected[index]
        for trend in self._trends:
            trend.fade(KEPT_SHARE)
        for counts in (*self._num_read, *self._num_lost):
            counts[:] = [KEPT_SHARE * count for count in counts]

    def worth(self, candidate: Candidate, time: float) -> float:
        """Return the tokens expected to be saved per unit of time and byte."""
        rate = self._rate(candidate.point, time)
        if candidate.heir_of is not None:
            rate = max(rate, self._rate(candidate.heir_of, time))
        return rate * candidate.saved_tokens / max(1, candidate.own_bytes)

    def heir_of(self, candidate: Candidate, heir: Candidate, time: float, /) -> Point | None:
        """Return the point with the highest read rate among those that the heir stands in for."""
        points = [
            point
            for point in (candidate.point, candidate.heir_of, heir.heir_of)
            if point is not None
        ]
        return max(points, key=lambda point: self._rate(point, time))

    def _rate(self, point: Point, time: float) -> float:
        rate = self._rates[_class_of(point)][self._age(time - point.last_kept)]
        if point.num_reads:
            rate *= self._trends[point.kind].factor(point.num_reads)
        return rate

    def _age(self, num_bytes: float) -> int:
        """Return the range of ages that an age in bytes falls into."""
        scaled = num_bytes * self._bytes_scale
        if scaled < 1 / 2:
            return 0
        return max(0, min(NUM_AGES - 1, int(AGES_PER_DOUBLING * log2(scaled) + 2)))


def _class_of(point: Point) -> int:
    return point.kind * NUM_PASTS + point.past


def _expected_reads(read: Sequence[float], lost: Sequence[float]) -> list[float]:
    """Return for each age the number of reads to be expected in a wait until then.

    Args:
        read: For each age, the number of waits that ended with a read.
        lost: For each age, the number of other waits that ended or last until now.
    """
    ends = [a + b for a, b in zip(read, lost, strict=True)]
    survivors = list(accumulate(reversed(ends)))[::-1]
    return list(accumulate(a / b for a, b in zip(read, survivors, strict=True)))


def _best_rates(read: Sequence[float], lost: Sequence[float]) -> list[float]:
    """Return reads per time for each age, at the horizon that gives most.

    Args:
        read: For each age, the number of waits that ended with a read.
        lost: For each age, the number of other waits that ended or last until now.
    """
    ends = [a + b + PRIOR for a, b in zip(read, lost, strict=True)]
    # Number of points that reach each age, and the time that they spend there.
    survivors = list(accumulate(reversed(ends)))[::-1]
    stays = [count * width for count, width in zip(survivors, _WIDTHS, strict=True)]
    rates: list[float] = []
    for age in range(NUM_AGES):
        best = num_read = stay = 0.0
        for more_read, more_stay in zip(read[age:], stays[age:], strict=True):
            num_read += more_read
            stay += more_stay
            best = max(best, num_read / stay)
        rates.append(best)
    return rates
