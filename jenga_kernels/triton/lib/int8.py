"""Conversion to and from int8.

As with float8 (see `fp8`), elements are read in pairs, as 16-bit integers, if products take half
precision. Half precision holds every int8.
"""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, in_float
from jenga_kernels.triton.lib.fp8 import from_fp8
from jenga_kernels.triton.lib.matmul import INTERPRETED

INT8_MAX = tl.constexpr(127.0)
"""Greatest magnitude that is stored; -128 is not stored."""

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23. The low bits of its sum with a small number are that number, rounded to nearest
even."""


@device_function
def to_int8(values):
    """f32 values as int8, rounded to nearest even.

    Magnitudes must not exceed 127 by more than rounding errors. NaN becomes 0.
    """
    return (values + _ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)


@device_function
def from_stored(values, dtype: tl.constexpr):
    """Values of int8, float8 or another float type as `dtype`."""
    if values.dtype == tl.int8:
        # The interpreter can convert only through float32.
        return values.to(tl.float32).to(dtype)
    elif values.dtype.is_fp8():
        return from_fp8(values, dtype)
    else:
        return in_float(values, dtype)


@device_function
def split_int8_pairs(pairs):
    """First and second elements, in half precision, of pairs i16[M, N] of int8."""
    if INTERPRETED:
        first = (pairs & 255).to(tl.int8)
        return first.to(tl.float16), (pairs >> 8).to(tl.int8).to(tl.float16)
    else:
        # A byte b behind 0x64 is 1024 + b in half precision. As unsigned, elements are 128 greater.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, offset;
            xor.b32 bytes, $2, 0x80808080;
            mov.b32 offset, 0x64806480;
            prmt.b32 $0, bytes, 0x64646464, 0x4240;
            prmt.b32 $1, bytes, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
