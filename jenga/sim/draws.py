"""What made-up workloads draw, and the checks of their arguments."""

import math
import random
from collections.abc import Iterator, Sequence

MOST_REQUESTS = 10_000_000
"""Requests, texts or sessions of a workload: more than a replay comes to the end of."""

Range = tuple[int, int]
"""Fewest and most, all between as likely."""


def check_arguments(**arguments: float | tuple[float, float]) -> None:
    """Refuse arguments of a workload that are out of range.

    Args:
        arguments: By their names, which say what they are: `num_*` and other counts of things are
            positive, `*_tokens` are at least 1, `*_share` are probabilities, and rates, seconds and
            exponents are finite and at least 0. Both ends of a range are, in order.

    Raises:
        ValueError: One is not; it is named.
    """
    for name, value in arguments.items():
        ends = value if isinstance(value, tuple) else (value,)
        if name.endswith("_share"):
            is_right, expected = _are_between(ends, 0, 1), "from 0 to 1"
        elif name.startswith("num_"):
            is_right = _are_between(ends, 1, MOST_REQUESTS)
            expected = f"from 1 to {MOST_REQUESTS}"
        elif name.endswith("_tokens"):
            is_right, expected = _are_between(ends, 1, math.inf), "at least 1"
        else:
            is_right, expected = _are_between(ends, 0, math.inf), "at least 0"
        if not is_right:
            shown = "-".join(map(str, ends)) if len(ends) > 1 else f"{value:g}"
            msg = f"{name} must be {expected}, got {shown}"
            raise ValueError(msg)


def _are_between(ends: Sequence[float], least: float, most: float) -> bool:
    return all(least <= end <= most and end < math.inf for end in ends) and ends[0] <= ends[-1]


def wait_s(draw: random.Random, per_s: float) -> float:
    """Seconds until the next of so many a second that come at random; 0 where all come at once."""
    return -math.log(1 - draw.random()) / per_s if per_s else 0.0


def arrivals_s(draw: random.Random, per_s: float) -> Iterator[float]:
    """Times at random, so many a second, without end; 0 where all come at once."""
    time_s = 0.0
    while True:
        yield time_s
        time_s += wait_s(draw, per_s)


def popularity(num_texts: int, exponent: float) -> list[float]:
    """Sums of the popularity of texts, the most popular first: Zipf's law.

    Args:
        num_texts: How many there are.
        exponent: Text i is asked for in proportion to `(i + 1) ** -exponent`; 0 for all alike.

    Returns:
        What `random.Random.choices` takes as `cum_weights`.
    """
    sums: list[float] = []
    total = 0.0
    for index in range(num_texts):
        total += (index + 1) ** -exponent
        sums.append(total)
    return sums
