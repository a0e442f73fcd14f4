"""Random draws of made-up workloads, and the checks of their arguments."""

import math
import random
from collections.abc import Iterator

from jenga.sim.workload.fields import MOST_NUMBER, SHOWN_CHARS
from jenga.sim.workload.requests import MOST_TOKENS

MOST_REQUESTS = 1_000_000
"""Most requests, texts or sessions of a workload. A replay of so many takes days."""

MOST_EXPONENT = 8
"""Largest exponent of Zipf's law. With it, nearly all requests read the first text."""

Range = tuple[int, int]
"""Fewest and most. All values between them are equally likely."""


def check_arguments(**arguments: float | tuple[float, float]) -> None:
    """Refuse arguments of a workload that are out of range.

    Args:
        arguments: Arguments by name. The name says the kind: `num_*` and `*_tokens` are at least 1,
            `*_share` are probabilities, and rates, seconds and exponents are at least 0. Both ends
            of a range are checked, and must be in order.

    Raises:
        ValueError: An argument is out of range. The message names it.
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
    """Draw the seconds to the next arrival, of `per_s` a second at random. 0 if `per_s` is 0."""
    return -math.log(1 - draw.random()) / per_s if per_s else 0.0


def arrivals_s(draw: random.Random, per_s: float) -> Iterator[float]:
    """Yield random arrival times, `per_s` a second, without end. All are 0 if `per_s` is 0."""
    time_s = 0.0
    while True:
        yield time_s
        time_s += wait_s(draw, per_s)


def popularity(num_texts: int, exponent: float) -> list[float]:
    """Return cumulative weights of texts by Zipf's law, the most popular text first.

    Args:
        num_texts: Number of texts.
        exponent: Text `i` is read in proportion to `(i + 1) ** -exponent`; 0 for equally often.

    Returns:
        Sums for the argument `cum_weights` of `random.Random.choices`.
    """
    sums: list[float] = []
    total = 0.0
    for index in range(num_texts):
        total += (index + 1) ** -exponent
        sums.append(total)
    return sums
