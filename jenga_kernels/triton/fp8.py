"""Conversion to float8_e4m3fn."""

import triton.language as tl

from jenga_kernels.triton.device import device_function
from jenga_kernels.triton.matmul import INTERPRETED

FP8_MAX = tl.constexpr(448.0)
"""Greatest finite float8_e4m3fn."""


@device_function
def to_fp8(values):
    """f32 values as float8_e4m3fn, rounded to nearest even; out of range becomes +-448.

    The interpreter's own conversion loses carries out of the mantissa, so it gets values that are
    representable already: a number of 3 mantissa bits, or a multiple of 2**-9.
    """
    values = tl.clamp(values, -FP8_MAX, FP8_MAX)
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) & 255) - 127
        step_bits = (tl.maximum(exponent, -6) - 3 + 127) << 23
        # Adding 1.5 * 2**23 steps leaves no bits below a step.
        anchor = 12582912.0 * step_bits.to(tl.float32, bitcast=True)
        rounded = tl.abs((values + anchor) - anchor).to(tl.int32, bitcast=True)
        values = (rounded | (bits & -2147483648)).to(tl.float32, bitcast=True)
    return values.to(tl.float8e4nv)
