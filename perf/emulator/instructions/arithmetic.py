"""Instructions that read and write registers only."""

from collections.abc import Callable

import numpy as np

from perf.emulator import numbers
from perf.emulator.errors import EmulationError
from perf.emulator.instructions import approximations
from perf.emulator.numbers import Array, bits_of, flush, halves, joined
from perf.emulator.ptx import Instruction, Vector
from perf.emulator.waves import Lanes, Step, Wave, reader, writer

PACKED = {"f16x2": "f16", "bf16x2": "bf16", "s16x2": "s16", "u16x2": "u16"}
"""Type of a pair in one register -> type of each element."""

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
"""Part of an instruction's name -> rounding to whole numbers."""


def arithmetic(instruction: Instruction) -> Step | None:
    """Return the step of an instruction; None if it is of another family."""
    name, *flags = instruction.opcode.split(".")
    return BUILDERS.get(name, _plain)(instruction, name, flags)


def _step(instruction: Instruction, kind: str, *kinds: str):  # noqa: ANN202
    """Return a function that turns a numpy function into the step of an instruction.

    The numpy function takes operands of types `kinds` and returns one result of type `kind`.
    """
    write = writer(instruction.operands[0], kind)
    sources = instruction.operands[1:]
    if len(sources) != len(kinds):
        msg = f"{instruction.text}: {len(sources)} operands, expected {len(kinds)}"
        raise EmulationError(msg)
    reads = [reader(operand, each) for operand, each in zip(sources, kinds, strict=True)]

    def make(function) -> Step:  # noqa: ANN001
        def step(wave: Wave, lanes: Lanes | None) -> None:
            write(wave, function(*(read(wave) for read in reads)), lanes)

        return step

    return make


def _elementwise(kind: str, flags: list[str], function):  # noqa: ANN001, ANN202
    """Extend a function to both elements of a pair, or flush subnormals if the flags say so."""
    if kind in PACKED:
        each = PACKED[kind]

        def on_pairs(*pairs: Array) -> Array:
            low, high = zip(*(halves(pair) for pair in pairs), strict=True)
            results = [
                numbers.bits(function(*(numbers.meaning(part, each) for part in half)), each, 16)
                for half in (low, high)
            ]
            return joined(*results)

        return on_pairs
    if "ftz" in flags and kind == "f32":
        return lambda *values: flush(function(*(flush(value) for value in values)))
    return function


def _raw(kind: str) -> str:
    """Return the type that operands are read as: pairs are read as the bits of a register."""
    return "b32" if kind in PACKED else kind


def _plain(instruction: Instruction, name: str, flags: list[str]) -> Step | None:
    kind = flags[-1] if flags else ""
    is_float = "f" in kind
    raw = _raw(kind)
    if is_float and name in approximations.UNARY:
        table = approximations.ROUNDED if "rn" in flags else approximations.UNARY
        return _step(instruction, raw, raw)(_elementwise(kind, flags, table[name]))
    if is_float and name == "div":
        function = approximations.ROUNDED[name] if "rn" in flags else approximations.quotient
        return _step(instruction, raw, raw, raw)(_elementwise(kind, flags, function))
    if name in numbers.UNARY:
        function = numbers.UNARY[name]
        return _step(instruction, raw, raw)(_elementwise(kind, flags, function))
    if name in {"shl", "shr"}:
        return _step(instruction, kind, kind, "u32")(numbers.BINARY[name])
    table = numbers.BINARY | (numbers.FLOAT_BINARY if is_float else numbers.WHOLE_BINARY)
    if name not in table:
        return None
    function = table[name]
    if "xorsign" in flags:
        function = numbers.smaller_magnitude
    elif "NaN" in flags:
        function = {"min": np.minimum, "max": np.maximum}[name]
    elif "relu" in flags:
        plain = function
        function = lambda left, right: np.maximum(plain(left, right), 0)  # noqa: E731
    return _step(instruction, raw, raw, raw)(_elementwise(kind, flags, function))


def _product(instruction: Instruction, name: str, flags: list[str]) -> Step:
    kind = flags[-1]
    is_sum = name != "mul"
    if "f" in kind:
        if not is_sum:
            function = _elementwise(kind, flags, np.multiply)
        elif kind == "f64":
            function = lambda a, b, c: a * b + c  # noqa: E731
        else:
            function = _elementwise(kind, flags, _fused)
        raw = _raw(kind)
        return _step(instruction, raw, *[raw] * (3 if is_sum else 2))(function)
    if "wide" in flags:
        wide = kind[0] + str(2 * bits_of(kind))
        dtype = numbers.meaning(np.zeros(1, dtype=np.uint64), wide).dtype
        if is_sum:
            return _step(instruction, wide, kind, kind, wide)(
                lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c
            )
        return _step(instruction, wide, kind, kind)(lambda a, b: a.astype(dtype) * b.astype(dtype))
    product = numbers.high_product if "hi" in flags else np.multiply
    if is_sum:
        return _step(instruction, kind, kind, kind, kind)(lambda a, b, c: product(a, b) + c)
    return _step(instruction, kind, kind, kind)(product)


def _fused(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)


def _bits(instruction: Instruction, name: str, flags: list[str]) -> Step:
    kind = flags[-1]
    if name == "prmt":
        return _step(instruction, "b32", "b32", "b32", "b32")(numbers.select_bytes)
    if name == "lop3":
        return _step(instruction, "b32", "b32", "b32", "b32", "b32")(numbers.look_up_bits)
    if name == "bfe":
        return _step(instruction, kind, kind, "u32", "u32")(numbers.extract_bits)
    if name == "popc":
        return _step(instruction, "u32", kind)(np.bitwise_count)
    is_left, is_wrapped = "l" in flags, "wrap" in flags

    def funnel(low: Array, high: Array, count: Array) -> Array:
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        count = (count & np.uint32(31) if is_wrapped else np.minimum(count, 32)).astype(np.uint64)
        shifted = (both << count) >> np.uint64(32) if is_left else both >> count
        return shifted.astype(np.uint32)

    return _step(instruction, "u32", "u32", "u32", "u32")(funnel)


def _select(instruction: Instruction, _name: str, flags: list[str]) -> Step:
    kind = flags[-1]
    return _step(instruction, kind, kind, kind, "pred")(
        lambda left, right, is_left: np.where(is_left, left, right)
    )


def _compare(instruction: Instruction, _name: str, flags: list[str]) -> Step:
    comparison, kind = flags[0], flags[-1]
    combine = next((flag for flag in flags[1:-1] if flag in {"and", "or", "xor"}), None)
    operands = instruction.operands
    num_results = len(operands) - 2 - (combine is not None)
    write = writer(operands[0], "pred")
    write_other = writer(operands[1], "pred") if num_results == 2 else None
    left, right = (reader(operand, kind) for operand in operands[num_results:][:2])
    third = reader(operands[-1], "pred") if combine else None
    is_flushed = "ftz" in flags

    def step(wave: Wave, lanes: Lanes | None) -> None:
        values = [left(wave), right(wave)]
        if is_flushed:
            values = [flush(value) for value in values]
        result = numbers.compare(comparison, *values)
        other = ~result
        if combine and third:
            function = numbers.BINARY[combine]
            result, other = function(result, third(wave)), function(other, third(wave))
        write(wave, result, lanes)
        if write_other:
            write_other(wave, other, lanes)

    return step


def _move(instruction: Instruction, _name: str, flags: list[str]) -> Step:
    kind = flags[-1]
    result, source = instruction.operands
    if isinstance(result, Vector):
        part_bits = bits_of(kind) // len(result.parts)
        writes = [writer(part, f"b{part_bits}") for part in result.parts]
        read = reader(source, kind)

        def split(wave: Wave, lanes: Lanes | None) -> None:
            values = read(wave)
            for index, write in enumerate(writes):
                shift = values.dtype.type(index * part_bits)
                part = (values >> shift).astype(numbers.UNSIGNED[part_bits])
                write(wave, part, lanes)

        return split
    write = writer(result, kind)
    if isinstance(source, Vector):
        part_bits = bits_of(kind) // len(source.parts)
        reads = [reader(part, f"b{part_bits}") for part in source.parts]

        def join(wave: Wave, lanes: Lanes | None) -> None:
            dtype = numbers.UNSIGNED[bits_of(kind)]
            parts = [read(wave).astype(dtype) for read in reads]
            total = sum(
                (part << dtype(index * part_bits) for index, part in enumerate(parts[1:], 1)),
                start=parts[0],
            )
            write(wave, total, lanes)

        return join
    return _step(instruction, kind, kind)(lambda values: values)


def _convert(instruction: Instruction, _name: str, flags: list[str]) -> Step:
    to, of = flags[-2:]
    if to in PACKED and of == "f32":
        each = PACKED[to]
        # The first operand becomes the upper half.
        return _step(instruction, "b32", "f32", "f32")(
            lambda high, low: joined(numbers.bits(low, each, 16), numbers.bits(high, each, 16))
        )
    if to in numbers.FLOAT8 and of == "f32":
        float8 = numbers.FLOAT8[to]
        return _step(instruction, "b16", "f32", "f32")(
            lambda high, low: (
                numbers.to_float8(low, float8).astype(np.uint16)
                | (numbers.to_float8(high, float8).astype(np.uint16) << np.uint16(8))
            )
        )
    if to == "f16x2" and of in numbers.FLOAT8:
        float8 = numbers.FLOAT8[of]
        return _step(instruction, "b32", "b16")(
            lambda pair: joined(
                *(
                    numbers.bits(numbers.from_float8(part, float8), "f16", 16)
                    for part in (pair & np.uint16(255), pair >> np.uint16(8))
                )
            )
        )
    if to == "tf32" and of == "f32" and "rna" in flags:
        return _step(instruction, "b32", "f32")(
            lambda values: numbers.rounded_to_tf32(values).view(np.uint32)
        )
    if "x" in to + of or "tf32" in (to, of):
        msg = f"conversion {instruction.opcode}"
        raise EmulationError(msg)
    whole = next((ROUNDINGS[flag] for flag in flags if flag in ROUNDINGS), None)
    target = numbers.meaning(np.zeros(1, dtype=np.uint64), to).dtype
    is_flushed = "ftz" in flags

    def convert(values: Array) -> Array:
        if is_flushed and of == "f32":
            values = flush(values)
        if whole is not None:
            values = whole(values)
        if values.dtype.kind == "f" and target.kind in "iu":
            limits = np.iinfo(target)
            inside = np.clip(values.astype(np.float64), float(limits.min), float(limits.max))
            # float64 rounds the largest 64-bit integer up by one, so that value is set apart.
            top = values >= float(limits.max)
            cast = np.where(np.isnan(values) | top, 0, inside).astype(target)
            return np.where(top, target.type(limits.max), cast)
        return values.astype(target)

    return _step(instruction, to, of)(convert)


def _to_generic(instruction: Instruction, name: str, flags: list[str]) -> Step:
    """Convert an address to a generic one: for parameters, which the emulator leaves unchanged."""
    if flags[0] != "param":
        raise EmulationError(instruction.opcode)
    return _move(instruction, name, flags)


BUILDERS: dict[str, Callable[[Instruction, str, list[str]], Step | None]] = {
    "mov": _move,
    "cvt": _convert,
    "cvta": _to_generic,
    "setp": _compare,
    "selp": _select,
    "mad": _product,
    "fma": _product,
    "mul": _product,
    "prmt": _bits,
    "lop3": _bits,
    "bfe": _bits,
    "shf": _bits,
    "popc": _bits,
}
"""Name of an instruction -> function that returns its step. `_plain` serves all other names."""
