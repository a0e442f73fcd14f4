"""Quantiles of any number of values, in bounded memory."""

import math
from array import array
from collections import Counter

from jenga.sim.results.rows import Spread

EXACT_VALUES = 1 << 16
"""Number of values that are kept exactly. Beyond it, only the count of each bin is kept."""

_BIN_WIDTH = 0.002
"""Relative width of a bin. Its middle is off by at most half of it."""

_LEAST = 1e-9
"""Values below it, in seconds, share one bin: a nanosecond does not matter."""


class Quantiles:
    """Quantiles of values that are not negative. Each value is counted when it is added.

    Up to `EXACT_VALUES` values, quantiles are values that occurred. With more values they are
    within 0.1 % of one. The width of a bin grows with the value, so a few thousand bins are enough
    for all possible seconds.

    Source: the bins are DDSketch's (Masson et al., VLDB 2019).
    """

    def __init__(self) -> None:
        """Begin without values."""
        self._values = array("d")
        self._bins: Counter[int] = Counter()
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Count a value."""
        self._sum += value
        self._count += 1
        if self._count <= EXACT_VALUES:
            self._values.append(value)
            return
        if self._values:
            self._bins.update(map(_bin, self._values))
            self._values = array("d")
        self._bins[_bin(value)] += 1

    def spread(self) -> Spread:
        """Return the quantiles and the mean. All are 0 if there are no values."""
        if not self._count:
            return Spread()
        p50, p90, p99 = self._at(0.50, 0.90, 0.99)
        return Spread(p50=p50, p90=p90, p99=p99, mean=self._sum / self._count)

    def _at(self, *shares: float) -> list[float]:
        ranks = [round(share * (self._count - 1)) for share in shares]
        if self._values:
            ordered = sorted(self._values)
            return [ordered[rank] for rank in ranks]
        found: list[float] = []
        num_below = 0
        for number in sorted(self._bins):
            num_below += self._bins[number]
            while len(found) < len(ranks) and ranks[len(found)] < num_below:
                found.append(_middle(number))
        return found


def _bin(value: float) -> int:
    return math.floor(math.log(max(value, _LEAST)) / _BIN_WIDTH)


def _middle(number: int) -> float:
    return math.exp((number + 0.5) * _BIN_WIDTH)
