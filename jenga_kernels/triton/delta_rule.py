"""What kernels of the gated delta rule share: rows of length one, and what a token's gate says."""

import triton.language as tl

from jenga_kernels.triton.device import device_function
from jenga_kernels.triton.matmul import INTERPRETED
from jenga_kernels.triton.recurrence import LOG2E, row_sums, softplus

NORM_EPSILON = tl.constexpr(1e-6)
"""Added to a squared length before its root, as in the models that train with it."""

LEAST_LOG2 = tl.constexpr(-126.0)
"""Decay of a token, in powers of two, below which the state before it counts for nothing."""


@device_function
def rounded(values, dtype: tl.constexpr):
    """Values in float32 as the nearest ones in `dtype`.

    The interpreter cuts bfloat16 off instead, so that errors of a chain of products all point the
    same way; there, half a unit in the last place is added first.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(dtype)


@device_function
def inverse_length(squares):
    """What to multiply a vector with for length one, from its squared length."""
    return 1.0 / tl.sqrt(squares + NORM_EPSILON)


@device_function
def sigmoid(v):
    """1 / (1 + exp(-v)), 0 where that exponential is infinite."""
    return 1.0 / (1.0 + tl.exp2(-v * LOG2E))


@device_function
def decay_log2(gates, rate, bias):
    """Logarithms to base two of the decays of tokens, from gates in float32.

    Gates are natural logarithms, or, where there is a `rate`, what its softplus makes into them.
    """
    if rate is not None:
        if bias is not None:
            gates += bias
        gates = -rate * softplus(gates)
    return tl.maximum(gates * LOG2E, LEAST_LOG2)


@device_function
def unit_factors(rows):
    """What to multiply each row of [M, N] with for length one."""
    rows = rows.to(tl.float32)
    return inverse_length(row_sums(rows * rows))
