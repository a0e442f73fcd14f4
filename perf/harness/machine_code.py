"""Take a compiled kernel apart: its registers, and the instructions of its loops by kind.

The binary tools that come with Triton are used, so no GPU is needed.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "matrix": r"H?GMMA|[HIQ]MMA|UTC\w*MMA",
    "load_global": r"LDG\b|LDG\.|LD\.|UTMALDG",
    "load_ahead": r"LDGSTS",
    "store_global": r"STG|ST\.|RED|ATOM|UTMASTG",
    "shared": r"LDS|STS|LDSM|STSM",
    "special": r"MUFU|F2F\.",
    "float": r"FMUL|FADD|FFMA|FMNMX|FSET|FCHK|H(ADD|MUL|FMA|MNMX|SETP?)2",
    "convert": r"F2|I2F",
    "shuffle": r"SHFL",
    "wait": r"BAR|\w*DEPBAR|WARPSYNC|WARPGROUP|SYNCS|MEMBAR|FENCE",
    "select": r"F?SEL|USEL|U?ISETP|U?PLOP3|P2R|R2P",
    "move": r"U?MOV|IMAD\.MOV|IMAD\.U32|R2UR|CS2R|S2U?R",
    "integer": r"U?(I|LEA|LOP|SHF|VI|PRMT|SGXT|BMSK|FLO|POPC)",
}
"""Kind -> pattern of the beginning of its instructions.

The source is CUDA's instruction list for compute capability 9.0.
"""


NUM_PROCESSORS = 132
"""Number of processors (SMs) of an H200."""


SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Compute capability, times ten -> largest shared memory of one program, in bytes.

The source is the CUDA programming guide.
"""


class PretendedGpu:
    """The part of a Triton driver that compiling needs, for a machine without a GPU."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)
        self.utils = self

    def get_current_target(self) -> object:
        """Return the target to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return the index of the only GPU."""
        return 0

    def get_active_torch_device(self) -> object:
        """Return the device of the tensors in launches."""
        import torch

        return torch.device("cpu")

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Return the other properties that the choice of tiles depends on."""
        shared_bytes = SHARED_BYTES[self.target.arch]
        return {"multiprocessor_count": NUM_PROCESSORS, "max_shared_mem": shared_bytes}

    def get_current_stream(self, _device: int) -> int:
        """Return the only stream."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """A kernel's disassembled binary.

    Attributes:
        registers: Number of registers of a thread.
        stack_bytes: Stack and local memory of a thread, in bytes: values that do not fit in
            registers.
        instructions: All instructions, without predicates.
        loops: Instructions of each innermost loop.
        product_loop: Instructions of the shortest loop with matrix products, without those of the
            loops inside it.
    """

    registers: int
    stack_bytes: int
    instructions: tuple[str, ...]
    loops: tuple[tuple[str, ...], ...]
    product_loop: tuple[str, ...] = ()

    @property
    def num_lost_descriptors(self) -> int:
        """Number of matrix products with a wrong operand address; see `num_lost_descriptors`."""
        return num_lost_descriptors(self.instructions)

    @property
    def main_loop(self) -> tuple[str, ...]:
        """The shortest innermost loop with matrix products; the product loop if there is none."""

        def weight(loop: tuple[str, ...]) -> tuple[int, int]:
            counts = count(loop)
            return counts["matrix"] > 0, -len(loop)

        longest = max(self.loops, key=weight, default=())
        if self.product_loop and not count(longest)["matrix"]:
            return self.product_loop
        return longest


def beside_products(loop: tuple[str, ...]) -> tuple[str, ...]:
    """Return the instructions that run while the last asynchronous matrix products of a loop do.

    They are those between the start of these products and the wait for all products. Without
    asynchronous products the result is empty.
    """
    products = [index for index, line in enumerate(loop) if line.startswith("HGMMA")]
    waits = [
        index for index, line in enumerate(loop) if re.match(r"WARPGROUP\.DEPBAR.*gsb0, 0x0", line)
    ]
    if not products or not waits or waits[-1] < products[-1]:
        return ()
    return loop[products[-1] + 1 : waits[-1]]


def count(instructions: tuple[str, ...]) -> Counter[str]:
    """Count the instructions of each of `KINDS`, and of the kind "other"."""
    return Counter(
        next((kind for kind, text in KINDS.items() if re.match(text, line)), "other")
        for line in instructions
    )


DESCRIPTOR_WORDS = {0x40000040, 0x80000020, 0xC0000010}
"""Upper words of matrix descriptors: they describe operand tiles in shared memory."""

OF_ZERO = re.compile(r"(I?MOV|IMAD\.MOV|IMAD\.X|CS2R|IADD3\.X|UMOV|UIADD3\.X)\b.*\b[SU]?RZ\b")
"""Pattern of instructions that leave zero, or a carry, in a register."""

REGISTER = re.compile(r"\bU?R\d+")
"""Pattern of a register: R of a thread, or UR of a warp."""


def num_lost_descriptors(instructions: tuple[str, ...]) -> int:
    """Count the descriptors that are computed from a register without a defined value.

    A product on Hopper may read an operand in parts. The descriptor of each part is the first one's
    plus a constant of 64 bits, and the register below the upper word must hold zero. ptxas 12.8,
    which comes with Triton 3.6 and 3.7, sometimes loses that zero, and the address with it. It then
    adds the constant to registers of a thread or a warp into which something else was loaded. Such
    a product reads anywhere in shared memory, or past its end.
    """
    found = 0
    written: dict[str, str] = {}
    for line in instructions:
        name, _, rest = line.partition(" ")
        operands = [operand.strip() for operand in rest.split(",")]
        is_sum = name in ("IADD3.X", "UIADD3.X")
        if is_sum and any(_word(operand) in DESCRIPTOR_WORDS for operand in operands):
            sources = REGISTER.findall(",".join(operands[1:]))
            found += any(not OF_ZERO.match(written.get(source, "")) for source in sources)
        for register in _written(name, operands):
            written[register] = line
    return found


def _word(operand: str) -> int | None:
    match = re.fullmatch(r"(-?)0x([0-9a-f]+)", operand)
    if match is None:
        return None
    value = int(match[2], 16)
    return (-value if match[1] else value) % (1 << 32)


def _written(name: str, operands: list[str]) -> list[str]:
    """Return the registers that an instruction writes.

    Those that a matrix product writes are left out.
    """
    if name.startswith(("ST", "RED", "BAR", "BRA", "ISETP", "FSETP", "UISETP", "UT", "LDGSTS")):
        return []
    target = next((operand for operand in operands if not re.match(r"U?P(T|\d)", operand)), "")
    match = re.match(r"(U?R)(\d+)", target)
    if match is None:
        return []
    is_wide = name.startswith(("IMAD.WIDE", "UIMAD.WIDE", "CS2R")) or ".64" in name
    width = 4 if ".128" in name or name.endswith("M88.4") else 2 if is_wide else 1
    return [f"{match[1]}{int(match[2]) + offset}" for offset in range(width)]


def loaded_bytes(instructions: tuple[str, ...]) -> int:
    """Return the bytes that one thread loads from global memory in these instructions."""
    return sum(_width(line) for line in instructions if re.match(r"LDG|LD\.", line))


def _width(instruction: str) -> int:
    found = re.search(r"\.(128|64|[US]?16|[US]?8)\b", instruction.split(maxsplit=1)[0])
    return int(found[1].strip("US")) // 8 if found else 4


def _output_of(cubin: bytes, tool: str, *options: str) -> str:
    """Return what a binary tool of Triton prints about a binary."""
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / tool), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread, for a binary that has one kernel."""
    usage = _output_of(cubin, "cuobjdump", "--dump-resource-usage")
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return used["REG"], used["STACK"] + used.get("LOCAL", 0)


def take_apart(cubin: bytes) -> MachineCode:
    """Return the instructions and resources of a binary that has one kernel."""
    registers, stack_bytes = resources(cubin)
    listing = _output_of(cubin, "nvdisasm", "--print-code")
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            instructions.append(found[1])
    loops = _inner_loops(instructions, labels)
    return MachineCode(
        registers=registers,
        stack_bytes=stack_bytes,
        instructions=tuple(instructions),
        loops=tuple(tuple(instructions[start:end]) for start, end in loops),
        product_loop=_product_loop(instructions, labels),
    )


def _loops(instructions: list[str], labels: dict[str, int]) -> set[tuple[int, int]]:
    """Return the ranges of instructions that end with a branch to their first one."""
    ranges: set[tuple[int, int]] = set()
    for index, line in enumerate(instructions):
        target = re.match(r"BRA\b.*`\((\.L\w+)\)", line)
        # A branch to itself only fills the space after the end.
        if target and labels.get(target[1], index) < index:
            ranges.add((labels[target[1]], index + 1))
    return ranges


def _inner_loops(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Return the ranges of `_loops` that hold no other range."""
    ranges = _loops(instructions, labels)
    return sorted(
        outer
        for outer in ranges
        if not any(
            outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1] for inner in ranges
        )
    )


def _product_loop(instructions: list[str], labels: dict[str, int]) -> tuple[str, ...]:
    """Return the instructions of the shortest loop with matrix products, without inner loops."""
    ranges = _loops(instructions, labels)
    holding = [
        (end - start, start, end)
        for start, end in ranges
        if count(tuple(instructions[start:end]))["matrix"]
    ]
    if not holding:
        return ()
    _, first, last = min(holding)
    within = {
        index
        for start, end in ranges
        if first <= start and end <= last and (start, end) != (first, last)
        for index in range(start, end)
    }
    return tuple(instructions[index] for index in range(first, last) if index not in within)
