"""What made-up workloads draw, and the checks of their arguments."""

import math
import random
from collections.abc import Iterator

from jenga.sim.workload.fields import MOST_NUMBER, SHOWN_CHARS
from jenga.sim.workload.requests import MOST_TOKENS

MOST_REQUESTS = 1_000_000
"""Requests, texts or sessions of a workload: as many as a replay takes days for."""

MOST_EXPONENT = 8
"""Of Zipf's law, by which the first text alone is then read."""

Range = tuple[int, int]
"""Fewest and most, all between as likely."""


def check_arguments(**arguments: float | tuple[float, float]) -> None:
    """Refuse arguments of a workload that are out of range.

    Args:
        arguments: By their names, which say what they are: `num_*` and `*_tokens` are at least 1,
            `*_share` are probabilities, and rates, seconds and exponents are at least 0. Both ends
            of a range are, in order.

    Raises:
        ValueError: One is not; it is named.
    """
    for name, value in arguments.items():
        ends = value if isinstance(value, tuple) else (value,)
        if name.endswith("_share"):
            least, most = 0, 1
        elif name.startswith("num_"):
            least, most = 1, MOST_REQUESTS
        elif name.endswith("_tokens"):
            least, most = 1, MOST_TOKENS
        else:
            least, most = 0, MOST_EXPONENT if name == "exponent" else MOST_NUMBER
        if not (all(least <= end <= most for end in ends) and ends[0] <= ends[-1]):
            shown = "-".join(map(str, ends))[:SHOWN_CHARS]
            words = "at least 0 and finite" if most == MOST_NUMBER else f"from {least} to {most}"
            msg = f"{name} must be {words}, got {shown}"
            raise ValueError(msg)


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
