"""The search for a capacity, on a grid of rates that all systems and runs share."""

from collections.abc import Callable
from math import log2

STEPS_PER_DOUBLING = 24
"""Rates of the grid: each is 2.9 % above the one before it."""

FIRST_STRIDE = 6
"""Steps to the second rate that is tried; further ones are twice as far each time."""


def rate_at(step: int) -> float:
    """The rate of a step of the grid, with five digits."""
    return float(f"{2 ** (step / STEPS_PER_DOUBLING):.5g}")


def step_of(rate: float) -> int:
    """The step of the grid that is nearest to a rate."""
    return round(STEPS_PER_DOUBLING * log2(rate))


def highest(passes: Callable[[int], bool], *, start: int, least: int, most: int) -> int | None:
    """The highest step that passes, if those below one that passes do; None if `least` does not.

    Where passing is not monotonic, a step that passes below one that does not.

    Args:
        passes: Asked for few steps.
        start: The step that is tried first.
        least: The lowest step that is tried.
        most: The highest one.
    """
    start = min(max(start, least), most)
    stride = FIRST_STRIDE
    if passes(start):
        low, high = start, most + 1
        while low < most:
            step = min(low + stride, most)
            if not passes(step):
                high = step
                break
            low = step
            stride *= 2
    else:
        low, high = least - 1, start
        while high > least:
            step = max(high - stride, least)
            if passes(step):
                low = step
                break
            high = step
            stride *= 2
        if low < least:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low
