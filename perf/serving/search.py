"""Search for a capacity, on a grid of rates that all systems and runs share."""

from collections.abc import Callable
from math import log2

STEPS_PER_DOUBLING = 24
"""Number of rates from one rate of the grid to its double: each is 2.9 % above the one before."""

FIRST_STRIDE = 6
"""Steps from the first rate that is tried to the second. Each further stride is twice as long."""


def rate_at(step: int) -> float:
    """Return the rate of a step of the grid, rounded to five digits."""
    return float(f"{2 ** (step / STEPS_PER_DOUBLING):.5g}")


def step_of(rate: float) -> int:
    """Return the step of the grid that is nearest to a rate."""
    return round(STEPS_PER_DOUBLING * log2(rate))


def highest(passes: Callable[[int], bool], *, start: int, least: int, most: int) -> int | None:
    """Return the highest step that passes, by doubling strides and bisection.

    The search assumes that all steps below a passing one pass too. If they do not, the result is a
    step that passes, below one that does not.

    Args:
        passes: Function that tells whether a step passes. It is called for few steps, because a
            call is slow.
        start: Step that is tried first.
        least: Lowest step that is tried.
        most: Highest step that is tried.

    Returns:
        The step. None if `least` does not pass.
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
