"""Types of PTX in numpy. Registers hold bits, and an instruction says which type they have."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from perf.emulator.errors import EmulationError

Array = npt.NDArray[np.generic]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}

LEAST_NORMAL = np.finfo(np.float32).tiny


def bits_of(kind: str) -> int:
    """Return the number of bits of a type such as `s32` or `bf16`."""
    return 1 if kind == "pred" else int(kind.lstrip("suef").lstrip("b").lstrip("f"))


def meaning(register: Array, kind: str) -> Array:
    """Return a register's bits as values of type `kind`; a wider register gives its low bits."""
    if kind == "pred":
        return register
    bits = bits_of(kind)
    if register.dtype.itemsize * 8 > bits:
        register = register.astype(UNSIGNED[bits])
    if kind == "bf16":
        return (register.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind[0] == "f":
        return register.view(FLOATS[bits])
    return register.view(SIGNED[bits] if kind[0] == "s" else UNSIGNED[bits])


def bits(values: Array, kind: str, register_bits: int) -> Array:
    """Return values of type `kind` as the bits of a register of `register_bits` bits."""
    if kind == "pred":
        return values
    if kind == "bf16":
        values = to_bfloat(values)
    elif kind[0] == "f":
        values = values.astype(FLOATS[bits_of(kind)], copy=False)
        values = values.view(UNSIGNED[bits_of(kind)])
    if values.dtype.itemsize * 8 == register_bits:
        return values.view(UNSIGNED[register_bits])
    # Signed values are extended with their sign.
    wide = (SIGNED if values.dtype.kind == "i" else UNSIGNED)[register_bits]
    return values.astype(wide).view(UNSIGNED[register_bits])


def to_bfloat(values: Array) -> Array:
    """Round float32 values to bfloat16, to nearest even, and return their bits u16."""
    word = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_tf32(values: Array) -> Array:
    """Return float32 values as tensor cores read them: with the upper 10 bits of the mantissa."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def rounded_to_tf32(values: Array) -> Array:
    """Round float32 values to 10 bits of mantissa, to nearest, ties away from zero."""
    word = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = (word + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, word).view(np.float32)


FLOAT8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}
"""PTX's name of a pair of float8 elements -> torch's type of one element."""


def to_float8(values: Array, dtype: torch.dtype) -> Array:
    """Convert float32 values to float8, and return their bits u8.

    Values out of range become the largest finite number of their sign. NaN loses its sign.
    """
    most = torch.finfo(dtype).max
    held = torch.from_numpy(np.clip(np.abs(values), 0.0, most).astype(np.float32))
    signs = np.where(np.signbit(values) & ~np.isnan(values), np.uint8(0x80), np.uint8(0))
    return held.to(dtype).view(torch.uint8).numpy() | signs


def from_float8(register: Array, dtype: torch.dtype) -> Array:
    """Return float8 elements, given as bits u8, as float32 values."""
    held = torch.from_numpy(np.ascontiguousarray(register, dtype=np.uint8))
    return held.view(dtype).float().numpy()


def halves(register: Array) -> tuple[Array, Array]:
    """Split u32 into its lower and upper half, u16 each."""
    return register.astype(np.uint16), (register >> np.uint32(16)).astype(np.uint16)


def joined(low: Array, high: Array) -> Array:
    """Join two halves u16 to u32."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def flush(values: Array) -> Array:
    """Return float32 values with subnormal ones replaced by zeros of the same sign."""
    return np.where(np.abs(values) < LEAST_NORMAL, np.copysign(np.float32(0), values), values)


def _divide_whole(dividend: Array, divisor: Array) -> Array:
    # Round towards zero. A GPU's result for a zero divisor is not known.
    safe = np.where(divisor == 0, divisor.dtype.type(1), divisor)
    if dividend.dtype.kind == "u":
        return dividend // safe
    quotient = np.abs(dividend.astype(np.int64)) // np.abs(safe.astype(np.int64))
    negative = (dividend < 0) != (safe < 0)
    whole = np.where(negative, -quotient, quotient)
    return np.where(divisor == 0, -1, whole).astype(dividend.dtype)


def _remainder(dividend: Array, divisor: Array) -> Array:
    return dividend - _divide_whole(dividend, divisor) * divisor


def _shift_left(values: Array, count: Array) -> Array:
    most = values.dtype.itemsize * 8
    shifted = values << np.minimum(count, most - 1).astype(values.dtype)
    return np.where(count >= most, values.dtype.type(0), shifted)


def _shift_right(values: Array, count: Array) -> Array:
    most = values.dtype.itemsize * 8
    shifted = values >> np.minimum(count, most - 1).astype(values.dtype)
    if values.dtype.kind == "i":
        return shifted
    return np.where(count >= most, values.dtype.type(0), shifted)


def high_product(left: Array, right: Array) -> Array:
    """Return the upper half of the bits of integer products."""
    size = 8 * left.dtype.itemsize
    if size < 64:
        wide = np.int64 if left.dtype.kind == "i" else np.uint64
        return ((left.astype(wide) * right.astype(wide)) >> wide(size)).astype(left.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b = left.astype(np.uint64), right.astype(np.uint64)
    middle = (a & low) * (b >> half) + (((a & low) * (b & low)) >> half)
    other = (a >> half) * (b & low) + (middle & low)
    product = (a >> half) * (b >> half) + (middle >> half) + (other >> half)
    if left.dtype.kind == "i":
        # Read as unsigned, a negative factor is 2**64 too large.
        product -= np.where(left < 0, b, np.uint64(0)) + np.where(right < 0, a, np.uint64(0))
    return product.astype(left.dtype)


def select_bytes(low: Array, high: Array, selector: Array) -> Array:
    """Carry out `prmt`: each nibble of the selector picks one of eight bytes, or a byte's sign."""
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(both)
    for byte in range(4):
        nibble = (selector.astype(np.uint64) >> np.uint64(4 * byte)) & np.uint64(15)
        picked = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(picked & np.uint64(128), np.uint64(255), np.uint64(0))
        picked = np.where(nibble & np.uint64(8), sign, picked)
        result |= picked << np.uint64(8 * byte)
    return result.astype(np.uint32)


def look_up_bits(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Carry out `lop3`: bits of a, b and c select one of the lowest eight bits of `table`."""
    result = np.zeros_like(a)
    for place in range(8):
        sides = (word if place & bit else ~word for word, bit in ((a, 4), (b, 2), (c, 1)))
        first, second, third = sides
        result |= np.where(table >> place & 1, first & second & third, 0).astype(a.dtype)
    return result


def extract_bits(values: Array, start: Array, count: Array) -> Array:
    """Carry out `bfe`: extract `count` bits from bit `start` on, with their sign if signed."""
    most = values.dtype.itemsize * 8
    start = np.minimum(start, most).astype(np.int64)
    count = np.minimum(count, most - start).astype(np.int64)
    kind = values.dtype
    rise = np.maximum(most - start - count, 0)
    left = _shift_left(values, rise.astype(np.uint32))
    taken = _shift_right(left, (most - count).astype(np.uint32))
    return np.where(count == 0, kind.type(0), taken).astype(kind)


def smaller_magnitude(left: Array, right: Array) -> Array:
    """Carry out `min.xorsign.abs`: the smaller magnitude, negative if the signs differ."""
    least = np.fmin(np.abs(left), np.abs(right))
    return np.where(np.signbit(left) != np.signbit(right), -least, least)


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _shift_left,
    "shr": _shift_right,
}
"""Functions of two operands of any type. Sums and products of integers wrap around."""

WHOLE_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "min": np.minimum,
    "max": np.maximum,
    "div": _divide_whole,
    "rem": _remainder,
}

FLOAT_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "min": np.fmin,
    "max": np.fmax,
}

UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "mov": lambda values: values,
}

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compare(name: str, left: Array, right: Array) -> Array:
    """Compare values, for example by `lt`, or by `ltu`, which is also true if a value is NaN.

    Raises:
        EmulationError: There is no such comparison.
    """
    unordered = name not in COMPARISONS and name.endswith("u")
    function = COMPARISONS.get(name[:-1] if unordered else name)
    if function is None and name not in {"nan", "num"}:
        msg = f"comparison {name!r}"
        raise EmulationError(msg)
    if left.dtype.kind != "f":
        return function(left, right)
    is_nan = np.isnan(left) | np.isnan(right)
    if name == "nan":
        return is_nan
    if name == "num":
        return ~is_nan
    return function(left, right) | is_nan if unordered else function(left, right) & ~is_nan
