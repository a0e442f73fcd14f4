"""Instructions that are not rounded to nearest: they err by as much as the manual allows.

The errors of real GPUs are not published. Here an error is drawn from the operand's bits, uniformly
over the allowed range, so that the same operands always give the same result. Bounds on errors that
hold here hold on every GPU. A result that is exact here need not be exact on a GPU, unless the
manual says so.

Source: PTX ISA, floating point instructions.
"""

from collections.abc import Callable

import numpy as np

from perf.emulator.numbers import Array

Exact = Callable[..., Array]

ROUNDING_ULPS = 0.5
"""Error that rounding to float32 adds, in units in the last place."""


LOG_RANGE = (0.5, 2.0)
LOG_ERROR = 2.0**-22
"""Largest error of logarithms: absolute for operands within `LOG_RANGE`, relative elsewhere."""


def errors(*operands: Array) -> Array:
    """Return numbers from -1 to 1 that are a function of the bits of float32 operands."""
    word = np.zeros(operands[0].shape, dtype=np.uint32)
    for operand in operands:
        word = (word ^ np.ascontiguousarray(operand).view(np.uint32)) * np.uint32(0x9E3779B1)
        word ^= word >> np.uint32(15)
        word *= np.uint32(0x85EBCA77)
        word ^= word >> np.uint32(13)
    return word / np.float64(2**31) - 1.0


def exactly(function: Exact) -> Exact:
    """Turn a function of float64 into one that rounds its result to the type of its operands."""

    def rounded(*operands: Array) -> Array:
        return function(*(each.astype(np.float64) for each in operands)).astype(operands[0].dtype)

    return rounded


def within_ulps(function: Exact, ulps: float) -> Exact:
    """Turn a function of float64 into one of float32 with errors of up to `ulps` units.

    A result that is zero, infinite or NaN gets no error, and neither does a result for zero. The
    function stays exact for other types.
    """

    def approximate(*operands: Array) -> Array:
        if operands[0].dtype != np.float32:
            return exactly(function)(*operands)
        exact = function(*(each.astype(np.float64) for each in operands))
        nearest = exact.astype(np.float32)
        is_kept = ~np.isfinite(nearest) | (nearest == 0) | (operands[0] == 0)
        unit = np.spacing(np.abs(np.where(is_kept, np.float32(1), nearest))).astype(np.float64)
        off = exact + errors(*operands) * (ulps - ROUNDING_ULPS) * unit
        return np.where(is_kept, nearest, off.astype(np.float32))

    return approximate


def _logarithm(values: Array) -> Array:
    """Return logarithms to base 2, whose error is not bounded in units in the last place."""
    if values.dtype != np.float32:
        return exactly(np.log2)(values)
    exact = np.log2(values.astype(np.float64))
    near = (values > LOG_RANGE[0]) & (values < LOG_RANGE[1])
    finite = np.where(np.isfinite(exact), exact, 0.0)
    # Leave room for the error of rounding.
    bound = np.where(near, LOG_ERROR, np.abs(finite) * LOG_ERROR) - np.abs(finite) * 2.0**-24
    return (exact + errors(values) * bound).astype(np.float32)


UNARY: dict[str, Exact] = {
    "ex2": within_ulps(np.exp2, 2.5),
    "lg2": _logarithm,
    "rcp": within_ulps(np.reciprocal, 1.0),
    "sqrt": within_ulps(np.sqrt, 1.0),
    "rsqrt": within_ulps(lambda values: 1 / np.sqrt(values), 1.0),
    "tanh": within_ulps(np.tanh, 2.0**12),
}

quotient = within_ulps(np.divide, 2.0)
"""Function for `div.full` and `div.approx`."""

ROUNDED: dict[str, Exact] = {
    "rcp": exactly(np.reciprocal),
    "sqrt": exactly(np.sqrt),
    "div": exactly(np.divide),
}
"""Functions for instructions with `rn`, which are rounded to nearest."""
