"""Functions that kernels call."""

import functools
from collections.abc import Callable

import triton


def device_function(function: Callable) -> Callable:
    """`triton.jit` for what kernels call but nobody launches.

    The interpreter patches Triton's language anew at each nested call, which costs more than most
    bodies. A launch has done that already, so there such a function is called as it stands.
    """
    compiled = triton.jit(function)
    if not triton.knobs.runtime.interpret:
        return compiled

    @functools.wraps(function)
    def interpreted(*args: object, **kwargs: object) -> object:
        return compiled.rewrite()(*args, **kwargs)

    return interpreted


@device_function
def ceil_div(dividend, divisor):
    """Quotient of non-negative integers, rounded up."""
    return (dividend + divisor - 1) // divisor
