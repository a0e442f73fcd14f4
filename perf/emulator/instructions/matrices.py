"""Matrix instructions: `mma` of one warp, and `wgmma` of four warps, which reads shared memory."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.numbers import Array, halves, meaning, to_tf32
from perf.emulator.ptx import Immediate, Instruction, Operand, Register, Vector
from perf.emulator.waves import GROUP, WARP, Lanes, Reader, Step, Wave, reader, writer

LANES = np.arange(WARP)
ROWS, COLUMNS = LANES // 4, LANES % 4
"""Row and column of each thread of a warp in an 8 x 4 part of a fragment."""

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}


def matrices(instruction: Instruction) -> Step | None:
    """Return the step of an instruction; None if it is of another family."""
    name, *flags = instruction.opcode.split(".")
    if name == "mma":
        return _of_warp(instruction, flags)
    if name != "wgmma":
        return None
    match flags[0]:
        case "fence":
            return _fence_registers
        case "commit_group":
            return lambda wave, lanes: wave.products.commit(wave.whole_groups(lanes, "a commit"))
        case "wait_group":
            count = instruction.operands[0].value  # type: ignore[union-attr]
            return lambda wave, lanes: wave.products.wait(
                wave.whole_groups(lanes, "a wait for products"), count
            )
        case _:
            return _of_group(instruction, flags)


def _fence_registers(wave: Wave, lanes: Lanes | None) -> None:
    groups = wave.whole_groups(lanes, "wgmma.fence")
    fenced: list[Array | None] = list(wave.registers)
    for group in range(wave.num_groups) if groups is None else np.flatnonzero(groups).tolist():
        wave.fenced[group] = fenced


def _check_fenced(wave: Wave, registers: frozenset[int], groups: Array) -> None:
    """Refuse a product whose registers have changed since its group's last `wgmma.fence`.

    Products that are under way have not changed their registers yet.
    """
    for group in groups.tolist():
        fenced = wave.fenced[group]
        if not fenced:
            msg = "no wgmma.fence before the first product"
            raise EmulationError(msg)
        changed = [index for index in registers if wave.registers[index] is not fenced[index]]
        if wave.barriers:
            # Other groups may have written their own lanes of a register. Compare this group's.
            mine = slice(group * GROUP, (group + 1) * GROUP)
            changed = [
                index
                for index in changed
                if (before := fenced[index]) is None
                or (wave.registers[index][mine] != before[mine]).any()
            ]
        if changed:
            msg = "a register was written since the last wgmma.fence"
            raise EmulationError(msg)


def _elements(registers: Array, kind: str) -> Array:
    """Return the values [..., elements] that registers u32[...] hold."""
    if kind == "tf32":
        return to_tf32(registers.view(np.float32))[..., None]
    return np.stack([meaning(half, kind).astype(np.float32) for half in halves(registers)], axis=-1)


def _left(registers: Array, kind: str) -> Array:
    """Return the rows [warps, 16, k] of A from its fragment u32[4, warps, 32]."""
    values = _elements(registers, kind)  # [4, warps, 32, elements]
    each = values.shape[-1]
    matrix = np.empty((values.shape[1], 16, 8 * each), dtype=np.float32)
    for index in range(4):
        rows = ROWS + 8 * (index % 2)
        for element in range(each):
            columns = COLUMNS * each + element + 4 * each * (index // 2)
            matrix[:, rows, columns] = values[index, :, :, element]
    return matrix


def _right(registers: Array, kind: str) -> Array:
    """Return the columns [warps, k, 8] of B from its fragment u32[2, warps, 32]."""
    values = _elements(registers, kind)
    each = values.shape[-1]
    matrix = np.empty((values.shape[1], 8 * each, 8), dtype=np.float32)
    for index in range(2):
        for element in range(each):
            ks = COLUMNS * each + element + 4 * each * index
            matrix[:, ks, ROWS] = values[index, :, :, element]
    return matrix


def _scattered(fragment: Array) -> Array:
    """Return the matrix [warps, 16, n] of an accumulator f32[n / 2, warps, 32]."""
    parts = fragment.reshape(-1, 2, 2, *fragment.shape[1:])  # [n / 8, halves, 2, warps, 32]
    matrix = np.empty((fragment.shape[1], 16, 8 * len(parts)), dtype=np.float32)
    for block in range(len(parts)):
        for half in range(2):
            for element in range(2):
                columns = 8 * block + 2 * COLUMNS + element
                matrix[:, ROWS + 8 * half, columns] = parts[block, half, element]
    return matrix


def _gathered(matrix: Array) -> Array:
    """Return the accumulator f32[n / 2, warps * 32] of a matrix [warps, 16, n]."""
    registers = [
        matrix[:, ROWS + 8 * half, 8 * block + 2 * COLUMNS + element]
        for block in range(matrix.shape[2] // 8)
        for half in range(2)
        for element in range(2)
    ]
    return np.stack(registers).reshape(len(registers), -1)


def _multiply(left: Array, right: Array) -> Array:
    return np.matmul(left.astype(np.float64), right.astype(np.float64))


def _stacked(reads: list[Reader], wave: Wave, groups: Lanes | None = None) -> Array:
    """Return registers, u32 or f32 [registers, warps, 32], of some groups or of all (None)."""
    every = (wave.of(read(wave)) for read in reads)
    if groups is not None and not groups.all():
        every = (each.reshape(-1, GROUP)[groups] for each in every)
    return np.stack([each.reshape(-1, WARP) for each in every])


def _readers(operand: Operand, kind: str) -> list[Reader]:
    if not isinstance(operand, Vector):
        msg = f"{operand} is no fragment"
        raise EmulationError(msg)
    return [reader(part, kind) for part in operand.parts]


def _of_warp(instruction: Instruction, flags: list[str]) -> Step:
    shape, kind = flags[2], flags[-3]
    if shape not in {"m16n8k16", "m16n8k8"} or flags[-1] != "f32" or kind not in ELEMENT_BYTES:
        raise EmulationError(instruction.opcode)
    result, a, b, c = instruction.operands
    lefts, rights, adds = _readers(a, "b32"), _readers(b, "b32"), _readers(c, "f32")
    if (len(lefts), len(rights)) != (4, 2) or not isinstance(result, Vector):
        raise EmulationError(instruction.opcode)
    writes = [writer(part, "f32") for part in result.parts]

    def step(wave: Wave, lanes: Lanes | None) -> None:
        wave.whole_warps(lanes, "mma")
        left = _left(_stacked(lefts, wave), kind)
        right = _right(_stacked(rights, wave), kind)
        total = _scattered(_stacked(adds, wave)) + _multiply(left, right)
        for write, register in zip(writes, _gathered(total.astype(np.float32)), strict=True):
            write(wave, register, lanes)

    return step


SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}
"""Code in a descriptor -> bytes of a row of the swizzle pattern; 16 means no swizzling."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Layout of a matrix in shared memory.

    Attributes:
        start: Address of the first byte.
        leading_bytes: Bytes from one pattern to the next, along the rows in memory.
        stride_bytes: Bytes from eight rows to the next eight.
        row_bytes: Bytes of a row of the swizzle pattern, in which chunks of 16 bytes change places.
    """

    start: int
    leading_bytes: int
    stride_bytes: int
    row_bytes: int

    @classmethod
    def of(cls, bits: int) -> "Descriptor":
        """Read the 64 bits of a descriptor.

        Raises:
            EmulationError: It has a base offset, because its patterns are not aligned.
        """
        if (bits >> 49) & 7:
            msg = "a matrix whose patterns are not aligned"
            raise EmulationError(msg)
        return cls(
            start=(bits & 0x3FFF) << 4,
            leading_bytes=((bits >> 16) & 0x3FFF) << 4,
            stride_bytes=((bits >> 32) & 0x3FFF) << 4,
            row_bytes=SWIZZLES[bits >> 62],
        )

    def addresses(
        self, outer: int, inner: int, element_bytes: int, *, is_transposed: bool
    ) -> Array:
        """Return the addresses of the elements [outer, k] of A or B.

        Args:
            outer: Number of rows of A, or of columns of B.
            inner: Number of elements along k.
            element_bytes: Bytes of an element.
            is_transposed: Whether neighbours in memory are neighbours along `outer`, not along k.
        """
        outers, inners = np.arange(outer)[:, None], np.arange(inner)[None, :]
        along, across = (outers, inners) if is_transposed else (inners, outers)
        bytes_along = along * element_bytes
        if self.row_bytes == SWIZZLES[0] and is_transposed:
            # Without swizzling, the two strides swap their roles.
            jumps = bytes_along // 16 * self.stride_bytes + across // 8 * self.leading_bytes
        else:
            jumps = bytes_along // self.row_bytes * self.leading_bytes
            jumps = jumps + across // 8 * self.stride_bytes
        address = self.start + jumps + across % 8 * self.row_bytes + bytes_along % self.row_bytes
        chunks = self.row_bytes // 16
        return address ^ (((address >> 7) & (chunks - 1)) << 4)


def _of_group(instruction: Instruction, flags: list[str]) -> Step:
    found = re.fullmatch(r"m64n(\d+)k(\d+)", flags[3])
    kind = flags[-1]
    if not found or flags[4] != "f32" or flags[-2] != kind or kind not in ELEMENT_BYTES:
        raise EmulationError(instruction.opcode)
    n, k = int(found[1]), int(found[2])
    result, a, b, keeps, *modes = instruction.operands
    if not isinstance(result, Vector):
        raise EmulationError(instruction.text)
    reads = _readers(result, "f32")
    writes = [writer(part, "f32") for part in result.parts]
    keep = reader(keeps, "pred")
    constants = [mode.value for mode in modes if isinstance(mode, Immediate)]
    signs, transposed = constants[:2], [bool(mode) for mode in constants[2:]]
    if signs != [1, 1]:
        raise EmulationError(instruction.text)
    in_registers = isinstance(a, Vector)
    # An operand may be transposed only if it is in shared memory.
    transposed_a = transposed[0] if len(transposed) > 1 else False
    transposed_b = transposed[-1] if transposed else False
    right_of = _matrix(b, n, k, kind, is_transposed=transposed_b)
    lefts = _readers(a, "b32") if in_registers else []
    left_of = None if in_registers else _matrix(a, 64, k, kind, is_transposed=transposed_a)
    fragments = (*result.parts, *(a.parts if isinstance(a, Vector) else ()))
    registers = frozenset(part.index for part in fragments if isinstance(part, Register))

    def step(wave: Wave, lanes: Lanes | None) -> None:
        groups = wave.whole_groups(lanes, "wgmma")
        taking_part = np.arange(wave.num_groups) if groups is None else np.flatnonzero(groups)
        _check_fenced(wave, registers, taking_part)
        is_kept = wave.of(keep(wave))[::GROUP]
        right = right_of(wave, taking_part)
        left = left_of(wave, taking_part) if left_of else None

        def finish(groups: Lanes) -> None:
            ended = np.repeat(groups, GROUP)
            some = groups[taking_part]
            if left is None:
                rows = _left(_stacked(lefts, wave, groups), kind).reshape(-1, 64, k)
            else:
                rows = left(some)
            products = _multiply(rows, right(some).transpose(0, 2, 1))  # [groups, 64, n]
            total = _scattered(_stacked(reads, wave, groups)).reshape(-1, 64, n)
            before = np.where(is_kept[groups, None, None], total, np.float32(0))
            total = (before + products).astype(np.float32)
            for write, register in zip(writes, _gathered(total.reshape(-1, 16, n)), strict=True):
                values = np.zeros(wave.num_lanes, dtype=np.float32)
                values[ended] = register
                write(wave, values, None if ended.all() else ended)

        wave.products.start(groups, finish, registers)

    return step


def _matrix(
    operand: Operand, outer: int, k: int, kind: str, *, is_transposed: bool
) -> Callable[[Wave, Array], Callable[[Lanes], Array]]:
    """Return a function to call with a wave and groups of warps when their product starts.

    That function finds the matrices and returns a second one. The second is called when the product
    ends, and reads the matrices [groups, outer, k] of the groups that it is given.
    """
    descriptors = reader(operand, "u64")
    size = ELEMENT_BYTES[kind]

    def prepare(wave: Wave, started: Array) -> Callable[[Lanes], Array]:
        each = wave.of(descriptors(wave))[::GROUP][started].tolist()
        places = np.stack(
            [_addresses(bits, outer, k, size, is_transposed=is_transposed) for bits in each]
        )
        words_of = wave.shared.for_products(places, size, started * GROUP)

        def read(some: Lanes) -> Array:
            words = np.ascontiguousarray(words_of(some)).reshape(-1, outer, k, size)
            if kind == "tf32":
                return to_tf32(words.view(np.float32)[..., 0])
            return meaning(words.view(np.uint16)[..., 0], kind).astype(np.float32)

        return read

    return prepare


@lru_cache(maxsize=4096)
def _addresses(bits: int, outer: int, k: int, size: int, *, is_transposed: bool) -> Array:
    found = Descriptor.of(bits).addresses(outer, k, size, is_transposed=is_transposed)
    return found.reshape(-1)
