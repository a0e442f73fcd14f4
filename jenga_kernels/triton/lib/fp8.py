"""Conversion to and from float8_e4m3fn and float8_e5m2.

Elements are read in pairs, as 16-bit integers, because operands of tensor cores are loaded from
shared memory in units of 16 bits; single bytes are loaded one by one. Half precision holds every
float8. A float8_e5m2 is the upper byte of a half, and one instruction converts two float8_e4m3fn.
bfloat16 would take one more instruction for each element.
"""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, in_float
from jenga_kernels.triton.lib.matmul import INTERPRETED

E4M3_MAX = tl.constexpr(448.0)
"""Greatest finite float8_e4m3fn."""

E5M2_MAX = tl.constexpr(57344.0)
"""Greatest finite float8_e5m2."""

INTERPRETED_NAN = tl.constexpr(480.0)
"""Value that the interpreter reads for a NaN of float8_e4m3fn, and writes as NaN."""

HALF_MAX = tl.constexpr(65504.0)
"""Greatest finite float16."""


@device_function
def to_fp8(values, dtype: tl.constexpr, HAS_FP8: tl.constexpr):
    """f32 values as float8 of type `dtype`, rounded to nearest even; saturated where out of range.

    With HAS_FP8 the GPU's own instructions convert, two elements at a time, because Triton would
    round twice before Hopper. Without it, `dtype` can only be float8_e5m2. Triton does not round
    this type to nearest even either, so it is rounded here.
    """
    if HAS_FP8 and not INTERPRETED:
        return _converted_in_pairs(values, dtype)
    elif dtype == tl.float8e5:
        is_number = values == values  # noqa: PLR0124
        values = tl.clamp(tl.where(is_number, values, 0.0), -E5M2_MAX, E5M2_MAX)
        half = _with_bits(values, 2, -14).to(tl.float16).to(tl.int16, bitcast=True)
        # NaN loses its sign, as it does where the GPU converts.
        byte = tl.where(is_number, (half >> 8) & 255, 0x7F)
        return byte.to(tl.uint8).to(dtype, bitcast=True)
    else:
        # The interpreter's own conversion loses carries out of the mantissa. So it gets values that
        # are already representable.
        tl.static_assert(INTERPRETED, "float8_e4m3fn needs a GPU that converts to it")
        is_number = values == values  # noqa: PLR0124
        values = tl.clamp(tl.where(is_number, values, 0.0), -E4M3_MAX, E4M3_MAX)
        return tl.where(is_number, _with_bits(values, 3, -6), INTERPRETED_NAN).to(dtype)


@device_function
def _converted_in_pairs(values, dtype: tl.constexpr):
    """f32 values as float8 of type `dtype`, by instructions that GPUs have since Ada."""
    if dtype == tl.float8e5:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 lower, upper;
            cvt.rn.satfinite.e5m2x2.f32 lower, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 upper, $4, $3;
            mov.b32 $0, {lower, upper};
            }""",
            "=r,f,f,f,f",
            [values],
            dtype=tl.float8e5,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 lower, upper;
            cvt.rn.satfinite.e4m3x2.f32 lower, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 upper, $4, $3;
            mov.b32 $0, {lower, upper};
            }""",
            "=r,f,f,f,f",
            [values],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=4,
        )


@device_function
def _with_bits(values, NUM_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Finite f32 values rounded to nearest even, to numbers of NUM_BITS mantissa bits.

    Below 2 ** MIN_EXPONENT they become multiples of the step of that exponent: subnormal numbers.
    """
    bits = values.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 255) - 127
    step_bits = (tl.maximum(exponent, MIN_EXPONENT) - NUM_BITS + 127) << 23
    # Adding 1.5 * 2**23 steps leaves no bits below a step.
    anchor = 12582912.0 * step_bits.to(tl.float32, bitcast=True)
    rounded = tl.abs((values + anchor) - anchor).to(tl.int32, bitcast=True)
    return (rounded | (bits & -2147483648)).to(tl.float32, bitcast=True)


@device_function
def from_fp8(values, dtype: tl.constexpr):
    """Values of float8 as `dtype`.

    Between half precision and bfloat16, values pass through float32. The direct conversion of
    float8_e4m3fn would run on the special function unit, which exponentials need. That of
    float8_e5m2 turns NaN into numbers.
    """
    if values.dtype == tl.float8e5:
        values = _half_of_e5m2(values)
        if dtype != tl.float16:
            values = values.to(tl.float32)
    elif INTERPRETED and values.dtype == tl.float8e4nv:
        values = _with_nan(values.to(tl.float32))
    elif dtype == tl.bfloat16 and values.dtype == tl.float8e4nv:
        values = values.to(tl.float16).to(tl.float32)
    return values.to(dtype)


@device_function
def _half_of_e5m2(values):
    """Values of float8_e5m2 in half precision, always as the compiler does it before Hopper."""
    if INTERPRETED:
        halves = values.to(tl.uint8, bitcast=True).to(tl.int16) << 8
        return halves.to(tl.float16, bitcast=True)
    else:
        # Four at a time.
        return tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0, 0x1404;
            prmt.b32 $1, $2, 0, 0x3424;
            }""",
            "=&r,=r,r",
            [values],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@device_function
def converted(values, dtype: tl.constexpr):
    """Values of float8_e4m3fn or another float type as `dtype`, by the compiler's own conversion.

    NaN stays NaN.
    """
    if not values.dtype.is_fp8():
        return in_float(values, dtype)
    elif INTERPRETED:
        return _with_nan(values.to(tl.float32)).to(dtype)
    else:
        return values.to(dtype)


@device_function
def _with_nan(values):
    """f32 values that the interpreter read from float8_e4m3fn, with NaN restored."""
    return tl.where(tl.abs(values) == INTERPRETED_NAN, float("nan"), values)


@device_function
def as_pairs(pages_ptr):
    """Cast `pages_ptr` to a pointer to pairs of its bytes."""
    return pages_ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@device_function
def split_pairs(pairs):
    """First and second elements, in half precision, of pairs i16[M, N] of float8_e4m3fn."""
    if INTERPRETED:
        first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        first = _with_nan(first.to(tl.float32)).to(tl.float16)
        return first, _with_nan(second.to(tl.float32)).to(tl.float16)
    else:
        # Two pairs at a time: their first bytes side by side, then their second ones.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@device_function
def split_e5m2_pairs(pairs):
    """First and second elements, in half precision, of pairs i16[M, N] of float8_e5m2."""
    if INTERPRETED:
        first = (pairs << 8).to(tl.float16, bitcast=True)
        return first, (pairs & -256).to(tl.float16, bitcast=True)
    else:
        # Two pairs at a time.
        return tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0, 0x2404;
            and.b32 $1, $2, 0xFF00FF00;
            }""",
            "=&r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@device_function
def to_half(rows):
    """Rows in half precision. Elements out of range become its greatest finite number."""
    return tl.clamp(rows.to(tl.float32), -HALF_MAX, HALF_MAX).to(tl.float16)


@device_function
def split_rows(rows):
    """First and second elements of each pair in rows [M, N], in half precision."""
    return tl.split(tl.reshape(to_half(rows), [rows.shape[0], rows.shape[1] // 2, 2]))


@device_function
def joined_rows(first, second):
    """Rows [M, 2 * N] whose pairs have these first and second elements, each [M, N]."""
    return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])
