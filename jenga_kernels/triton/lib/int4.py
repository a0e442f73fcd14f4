"""Conversion to and from elements of four bits, two a byte, the first in the low half.

Element n, 0 to 15, of a row stands for n times the row's step, plus its least element. Both are
bfloat16 and share one word, the step in the low half. Sums of products need them only once for each
row, so elements become operands as the whole numbers they are.
"""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, rounded
from jenga_kernels.triton.lib.matmul import INTERPRETED

INT4_MAX = tl.constexpr(15.0)
"""Greatest element."""

FIRST_UNIT = tl.constexpr(2.0**-24)
SECOND_UNIT = tl.constexpr(2.0**-20)
"""Units of split elements read as half precision: of the lower, and of the upper four bits of a
byte."""

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23. The low bits of its sum with a small number are that number, rounded to nearest
even."""

_HIGH_HALF = tl.constexpr(-65536)
_BEYOND = tl.constexpr(0x7F800000)
"""Bits of infinity. Ordered as integers, those of -infinity are the complement."""
_NEGATIVE_BEYOND = tl.constexpr(~0x7F800000)


@device_function
def quantised_int4(values, mask, LEAST_RANGE: tl.constexpr):
    """Rows [lines, rows, BLOCK_LINE] as bytes [lines, rows, BLOCK_LINE // 2], and words i32[rows].

    Rows of a smaller range than LEAST_RANGE are stored as their least element alone. A row that is
    not finite, or whose range is not, gets NaN as its step.
    """
    # Integers in the order of the numbers, with NaN beyond infinity.
    ordered = _reordered(values.to(tl.int32, bitcast=True))
    greatest = tl.max(tl.max(tl.where(mask, ordered, -2147483648), 2), 0)
    least = tl.min(tl.min(tl.where(mask, ordered, 2147483647), 2), 0)
    # If the mask excludes all elements, the least is above the greatest.
    is_finite = (greatest < _BEYOND) & (least > _NEGATIVE_BEYOND) & (least <= greatest)
    least = _as_bfloat16(tl.where(is_finite, _reordered(least), 0).to(tl.float32, bitcast=True))
    least = tl.where(least == 0.0, 0.0, least)  # one zero only
    extent = tl.where(is_finite, _reordered(greatest), 0).to(tl.float32, bitcast=True)
    extent = extent - least
    is_finite = is_finite & (tl.abs(extent) < float("inf"))
    is_scaled = is_finite & (extent >= LEAST_RANGE)
    most = tl.full(extent.shape, INT4_MAX, tl.float32)
    step = _as_bfloat16(tl.div_rn(extent, most))
    factor = tl.div_rn(tl.full(extent.shape, 1.0, tl.float32), tl.where(is_scaled, step, 1.0))
    values = tl.where(is_scaled[None, :, None], values - least[None, :, None], 0.0)
    values = tl.clamp(values * factor[None, :, None], 0.0, INT4_MAX)
    bits = (values + _ROUNDING).to(tl.int32, bitcast=True) & 15
    LINES: tl.constexpr = bits.shape[0]
    ROWS: tl.constexpr = bits.shape[1]
    low, high = tl.split(tl.reshape(bits, [LINES, ROWS, bits.shape[2] // 2, 2]))
    step = tl.where(is_scaled, step, tl.where(is_finite, 0.0, float("nan")))
    step_bits = (step.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return (low | (high << 4)).to(tl.uint8), least.to(tl.int32, bitcast=True) | step_bits


@device_function
def _reordered(bits):
    """Convert bits of f32 to integers in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@device_function
def _as_bfloat16(values):
    """Finite f32 as the nearest bfloat16, ties to even, widened.

    It is done in bits, because the interpreter converts a bfloat16 zero to another value.
    """
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & _HIGH_HALF
    return bits.to(tl.float32, bitcast=True)


@device_function
def split_words(words):
    """Split words i32[N] into steps and least elements, f32[N] each."""
    steps = (words << 16).to(tl.float32, bitcast=True)
    return steps, (words & _HIGH_HALF).to(tl.float32, bitcast=True)


@device_function
def restored_int4(pairs, words, dtype: tl.constexpr):
    """Rows [M, 2 * N] in `dtype` from pairs u8[M, N] and each row's word, i32[M]."""
    if INTERPRETED or dtype != tl.bfloat16:
        step, least = split_words(words)
        elements = pairs.to(tl.int32)
        first = (elements & 15).to(tl.float32) * step[:, None] + least[:, None]
        second = (elements >> 4).to(tl.float32) * step[:, None] + least[:, None]
        return rounded(_joined(first, second), dtype)
    else:
        # Four pairs at a time. Four bits n in the last places of 0x4300 are 128 + n in bfloat16.
        # The steps of two pairs are side by side in a register, and so are their least elements.
        words = tl.broadcast_to(words[:, None], pairs.shape)
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 some, base, one, less, step, least;
            mov.b32 base, 0x43004300;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC300C300;
            prmt.b32 some, $4, 0, 0x4140;
            prmt.b32 step, $5, $6, 0x5410;
            prmt.b32 least, $5, $6, 0x7632;
            lop3.b32 $0, some, 0x000F000F, base, 0xEA;
            shr.b32 some, some, 4;
            lop3.b32 $2, some, 0x000F000F, base, 0xEA;
            fma.rn.bf16x2 $0, $0, one, less;
            fma.rn.bf16x2 $2, $2, one, less;
            fma.rn.bf16x2 $0, $0, step, least;
            fma.rn.bf16x2 $2, $2, step, least;
            prmt.b32 some, $4, 0, 0x4342;
            prmt.b32 step, $7, $8, 0x5410;
            prmt.b32 least, $7, $8, 0x7632;
            lop3.b32 $1, some, 0x000F000F, base, 0xEA;
            shr.b32 some, some, 4;
            lop3.b32 $3, some, 0x000F000F, base, 0xEA;
            fma.rn.bf16x2 $1, $1, one, less;
            fma.rn.bf16x2 $3, $3, one, less;
            fma.rn.bf16x2 $1, $1, step, least;
            fma.rn.bf16x2 $3, $3, step, least;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [pairs, words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return _joined(first, second)


@device_function
def _joined(first, second):
    """Rows [M, 2 * N] whose pairs have these first and second elements, each [M, N]."""
    return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])


@device_function
def split_int4_pairs(pairs):
    """First and second elements of pairs u8[M, N], f16[M, N] each, in units of their own.

    Four bits in the last places of half precision are a subnormal number, and so are the next four.
    The first elements are in units of FIRST_UNIT, the second in units of SECOND_UNIT. Matrix
    products take subnormal numbers as they are (Fasi and others, Numerical behavior of NVIDIA
    tensor cores, 2021).
    """
    if INTERPRETED:
        words = pairs.to(tl.int16)
        first = (words & 0x0F).to(tl.float16, bitcast=True)
        return first, (words & 0xF0).to(tl.float16, bitcast=True)
    else:
        # Four pairs at a time.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 left, right;
            prmt.b32 left, $4, 0, 0x4140;
            prmt.b32 right, $4, 0, 0x4342;
            and.b32 $0, left, 0x000F000F;
            and.b32 $1, right, 0x000F000F;
            and.b32 $2, left, 0x00F000F0;
            and.b32 $3, right, 0x00F000F0;
            }""",
            "=&r,=&r,=&r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )


@device_function
def split_int4_quads(quads):
    """Elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 of rows, from items of two bytes, i16[M, N].

    Each result is f16[M, N]. The first and third are in units of FIRST_UNIT, the others in units of
    SECOND_UNIT, as in `split_int4_pairs`.
    """
    if INTERPRETED:
        quads = quads.to(tl.int32)
        above = quads >> 8
        return (
            (quads & 0x0F).to(tl.int16).to(tl.float16, bitcast=True),
            (quads & 0xF0).to(tl.int16).to(tl.float16, bitcast=True),
            (above & 0x0F).to(tl.int16).to(tl.float16, bitcast=True),
            (above & 0xF0).to(tl.int16).to(tl.float16, bitcast=True),
        )
    else:
        # Two quads at a time.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 above;
            shr.b32 above, $4, 8;
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, $4, 0x00F000F0;
            and.b32 $2, above, 0x000F000F;
            and.b32 $3, above, 0x00F000F0;
            }""",
            "=&r,=&r,=&r,=r,r",
            [quads],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@device_function
def split_quad_rows(rows):
    """Elements 4 i to 4 i + 3 of rows [M, N], in their dtype, each [M, N // 4]."""
    M: tl.constexpr = rows.shape[0]
    even, odd = tl.split(tl.reshape(rows, [M, rows.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@device_function
def joined_quad_rows(parts):
    """Rows [M, 4 * N] from elements 4 i to 4 i + 3, f32[M, N] each, in the units of a quad."""
    lower = tl.join(parts[0], parts[2]) * (1 / FIRST_UNIT)
    upper = tl.join(parts[1], parts[3]) * (1 / SECOND_UNIT)
    return tl.reshape(tl.join(lower, upper), [lower.shape[0], 4 * lower.shape[1]])
