"""What a compiled kernel consists of: registers, and the instructions of its loops by kind.

The tools that Triton brings along take a binary apart; no GPU is needed.
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
"""Kind -> how its instructions begin, from CUDA's list of those of compute capability 9.0."""


NUM_PROCESSORS = 132
"""Of an H200."""


SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Compute capability -> shared memory of one program at most, from the CUDA programming guide."""


class PretendedGpu:
    """As much of a Triton driver as compiling asks for, on a machine without a GPU."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)
        self.utils = self

    def get_current_target(self) -> object:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only GPU."""
        return 0

    def get_active_torch_device(self) -> object:
        """Where the tensors of its launches are."""
        import torch

        return torch.device("cpu")

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """What tiles depend on besides."""
        shared_bytes = SHARED_BYTES[self.target.arch]
        return {"multiprocessor_count": NUM_PROCESSORS, "max_shared_mem": shared_bytes}

    def get_current_stream(self, _device: int) -> int:
        """The only stream."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """A kernel's binary, taken apart.

    Attributes:
        registers: Of a thread.
        stack_bytes: Of a thread; what does not fit into registers.
        instructions: All of them, without predicates.
        loops: Instructions of each loop that holds no other one.
        product_loop: Of the shortest loop with matrix products, without those of loops in it.
    """

    registers: int
    stack_bytes: int
    instructions: tuple[str, ...]
    loops: tuple[tuple[str, ...], ...]
    product_loop: tuple[str, ...] = ()

    @property
    def num_lost_descriptors(self) -> int:
        """How many matrix products have operands at no place that the program means."""
        return num_lost_descriptors(self.instructions)

    @property
    def main_loop(self) -> tuple[str, ...]:
        """Of those loops the shortest with matrix products; if there is none, the product loop."""

        def weight(loop: tuple[str, ...]) -> tuple[int, int]:
            counts = count(loop)
            return counts["matrix"] > 0, -len(loop)

        longest = max(self.loops, key=weight, default=())
        if self.product_loop and not count(longest)["matrix"]:
            return self.product_loop
        return longest


def beside_products(loop: tuple[str, ...]) -> tuple[str, ...]:
    """What runs in a loop while its last matrix products do: from their start to the wait for all.

    Of asynchronous products alone; without any there is nothing.
    """
    products = [index for index, line in enumerate(loop) if line.startswith("HGMMA")]
    waits = [
        index for index, line in enumerate(loop) if re.match(r"WARPGROUP\.DEPBAR.*gsb0, 0x0", line)
    ]
    if not products or not waits or waits[-1] < products[-1]:
        return ()
    return loop[products[-1] + 1 : waits[-1]]


def count(instructions: tuple[str, ...]) -> Counter[str]:
    """How many instructions there are of each of `KINDS`, and of "other"."""
    return Counter(
        next((kind for kind, text in KINDS.items() if re.match(text, line)), "other")
        for line in instructions
    )


DESCRIPTOR_WORDS = {0x40000040, 0x80000020, 0xC0000010}
"""Upper words of descriptors of tiles in shared memory, of which a product reads an operand."""

OF_ZERO = re.compile(r"(I?MOV|IMAD\.MOV|IMAD\.X|CS2R|IADD3\.X|UMOV|UIADD3\.X)\b.*\b[SU]?RZ\b")
"""What leaves zero, or a carry, in a register."""

REGISTER = re.compile(r"\bU?R\d+")
"""A thread's, or a warp's."""


def num_lost_descriptors(instructions: tuple[str, ...]) -> int:
    """Count sums that make a descriptor of what a register happens to hold.

    Where a product of Hopper reads an operand by parts, the descriptor of each is the first's plus
    a constant of 64 bits; below its upper word stands zero. ptxas 12.8, which Triton 3.6 and 3.7
    bring along, has been seen to lose that zero and the address with it: it adds the constant to
    registers that something else has been loaded into, a thread's or a warp's. Such a product reads
    anywhere in shared memory, or past its end.
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
    """Registers that an instruction writes, as far as they are not a product's."""
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
    """Bytes that one thread loads from global memory in these instructions."""
    return sum(_width(line) for line in instructions if re.match(r"LDG|LD\.", line))


def _width(instruction: str) -> int:
    found = re.search(r"\.(128|64|[US]?16|[US]?8)\b", instruction.split(maxsplit=1)[0])
    return int(found[1].strip("US")) // 8 if found else 4


def take_apart(cubin: bytes) -> MachineCode:
    """Get the instructions and resources of a binary with one kernel."""
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"

    def run(tool: str, *options: str) -> str:
        command = [str(folder / tool), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run("cuobjdump", "--dump-resource-usage")
        listing = run("nvdisasm", "--print-code")
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            instructions.append(found[1])
    loops = _inner_loops(instructions, labels)
    return MachineCode(
        registers=used["REG"],
        stack_bytes=used["STACK"] + used.get("LOCAL", 0),
        instructions=tuple(instructions),
        loops=tuple(tuple(instructions[start:end]) for start, end in loops),
        product_loop=_product_loop(instructions, labels),
    )


def _loops(instructions: list[str], labels: dict[str, int]) -> set[tuple[int, int]]:
    """Ranges of instructions that end with a branch to their first one."""
    ranges: set[tuple[int, int]] = set()
    for index, line in enumerate(instructions):
        target = re.match(r"BRA\b.*`\((\.L\w+)\)", line)
        # A branch to itself fills the space after the end.
        if target and labels.get(target[1], index) < index:
            ranges.add((labels[target[1]], index + 1))
    return ranges


def _inner_loops(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Ranges of instructions that end with a branch to their first one, and hold no other such."""
    ranges = _loops(instructions, labels)
    return sorted(
        outer
        for outer in ranges
        if not any(
            outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1] for inner in ranges
        )
    )


def _product_loop(instructions: list[str], labels: dict[str, int]) -> tuple[str, ...]:
    """Instructions of the shortest loop with matrix products, without those of loops in it."""
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
