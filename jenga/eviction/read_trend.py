"""How the rate at which points are read depends on how often they were read before.

Points of one class and age differ. If some prompts are sent more often than others, points that
were read often are read soon again. If each text has a few questions, points that were read often
have few readers left. Which of the two holds is learnt:

    rate of a point = rate of its class and age * exp(slope * (reads before - mean))

Source: Cox, "Regression Models and Life-Tables" (1972), with one covariate. Reads before count up
to `MOST_READS`.
"""

from math import exp

MOST_READS = 16
"""Number of reads from which points are no longer told apart."""

PRIOR_SPREAD = 1.0
"""Spread that is added to the observed one, so that a few observations show no trend."""

MOST_EXPONENT = 4.0
"""Largest exponent of a factor, positive or negative."""


class ReadTrend:
    """Learns factors of the rate from waits that end, and from those that last.

    Each wait adds the reads that were to be expected in it, by the rates of its class. If points
    with more reads before were read more often than expected, the slope is positive. It is the
    first step of Newton's method on the likelihood of all observations, starting from zero.
    """

    __slots__ = ("_expected", "_expected_n", "_expected_n2", "_factors", "_read", "_read_n")

    def __init__(self) -> None:
        """Start without observations. All factors are 1."""
        # Number of reads, and of expected reads; with `n` and `n2`: each multiplied by the number
        # of reads before, and by its square.
        self._read = self._read_n = 0.0
        self._expected = self._expected_n = self._expected_n2 = 0.0
        self._factors = [1.0] * (MOST_READS + 1)

    def observe(self, num_reads: int, expected: float, *, was_read: bool) -> None:
        """Count one wait.

        Args:
            num_reads: Number of reads of the point before it, at least 1.
            expected: Number of reads to be expected in a wait as long as this one.
            was_read: Whether it ended with a read.
        """
        n = min(num_reads, MOST_READS)
        if was_read:
            self._read += 1
            self._read_n += n
        self._expected += expected
        self._expected_n += expected * n
        self._expected_n2 += expected * n * n

    def learn(self, lasting: "ReadTrend") -> None:
        """Compute the factors.

        Args:
            lasting: Observations of the waits that still last.
        """
        expected = self._expected + lasting._expected
        if not expected:
            return
        expected_n = self._expected_n + lasting._expected_n
        expected_n2 = self._expected_n2 + lasting._expected_n2
        mean = expected_n / expected
        spread = expected_n2 - mean * expected_n
        slope = (self._read_n - mean * self._read) / (spread + PRIOR_SPREAD)
        for n in range(1, MOST_READS + 1):
            exponent = slope * (n - mean)
            self._factors[n] = exp(max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent)))

    def fade(self, kept_share: float) -> None:
        """Multiply all observations by a share, so that old ones count less."""
        self._read *= kept_share
        self._read_n *= kept_share
        self._expected *= kept_share
        self._expected_n *= kept_share
        self._expected_n2 *= kept_share

    def factor(self, num_reads: int) -> float:
        """Return the factor of the rate of a point. It is 1 for a point without reads."""
        return self._factors[min(num_reads, MOST_READS)]
