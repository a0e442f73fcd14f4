"""Quantiles of any number of values in bounded memory."""

import math
from array import array
from collections import Counter

from jenga.sim.results.rows import Spread

EXACT_VALUES = 1 << 16
"""Values kept as they are; of more, only how many fall into each bin."""

_BIN_WIDTH = 0.002
"""Ends of a bin are so far apart, in parts of the value: its middle is half of it off at most."""

_LEAST = 1e-9
"""Values below are one bin: a nanosecond is nothing."""


class Quantiles:
    """Values that are not negative; their quantiles, each value counted when it comes.

    Up to `EXACT_VALUES` values quantiles are values that occurred. Of more they are within 0.1 % of
    one: bins grow with the value, so that a few thousand hold every number of seconds there is.

    Source: the bins are DDSketch's (Masson et al., VLDB 2019).
    """

    def __init__(self) -> None:
        """No value."""
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
        """The quantiles and the mean; all 0 of no values."""
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
