"""Read a kernel's PTX: its parameters, registers and instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from perf.emulator.errors import EmulationError

WIDTHS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}
"""Type of a declared register -> number of its bits."""

SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")
"""Special registers: place of a thread in its program, and of its program in the grid."""


@dataclass(frozen=True, slots=True)
class Register:
    """A register: its index among all registers of the kernel, and the number of its bits."""

    index: int
    bits: int


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer, or the bits of a floating-point number."""

    value: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name: a special register, a parameter, a label, or the start of shared memory."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """A register or parameter, plus an offset in bytes."""

    base: "Register | Symbol"
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Vector:
    """Several operands in braces."""

    parts: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor descriptor, and coordinates in the tensor, innermost dimension first."""

    descriptor: "Operand"
    coordinates: tuple["Operand", ...]


Operand = Register | Immediate | Symbol | Address | Vector | Box

DESCRIPTOR = "b8[128]"
"""Type of a parameter that is a tensor map, which describes a tensor to the copy engine."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: Name as written, such as `add.s32`.
        operands: Operands, results first.
        predicate: Register that selects the threads that take part; None for all.
        is_negated: Whether threads take part if the predicate is false.
        text: The whole instruction as written, for messages.
    """

    opcode: str
    operands: tuple[Operand, ...]
    predicate: Register | None
    is_negated: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel's code.

    Attributes:
        name: Name of the entry.
        parameters: Name and type of each parameter, such as `("k_param_0", "u64")`.
        num_threads: Threads of a program.
        max_registers: Registers of a thread at launch; None if the compiler chooses.
        capability: Compute capability, times ten, that it is compiled for, such as 90.
        instructions: Instructions in order.
        register_bits: Bits of each register.
        targets: Label -> index of the instruction after it.
        tables: Name of a list of labels that a branch chooses from -> the labels.
        is_specialised: Whether some warps may meet or wait without the others of their program.
        are_copies_fenced: Whether tensor cores may read copied data only after a fence.
        may_stores_differ: Whether threads may store different values at one place of shared memory
            at once, so that one of the values remains.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    num_threads: int
    max_registers: int | None
    capability: int
    instructions: tuple[Instruction, ...]
    register_bits: tuple[int, ...]
    targets: dict[str, int]
    tables: dict[str, tuple[str, ...]]
    is_specialised: bool
    are_copies_fenced: bool = True
    may_stores_differ: bool = False


@dataclass
class _Names:
    """Registers and labels by name, in nested scopes. Labels may be used before they are defined.

    Attributes:
        labels: Labels of each scope of the kernel, in the order in which scopes begin.
        scopes: Registers of each open scope, outermost first.
        open_scopes: Indices of the open scopes, outermost first.
        bits: Bits of each register.
    """

    labels: list[frozenset[str]]
    scopes: list[dict[str, Register]] = field(default_factory=lambda: [{}])
    open_scopes: list[int] = field(default_factory=lambda: [0])
    bits: list[int] = field(default_factory=list)
    _num_scopes: int = 1

    def begin(self) -> None:
        self.scopes.append({})
        self.open_scopes.append(self._num_scopes)
        self._num_scopes += 1

    def end(self) -> None:
        self.scopes.pop()
        self.open_scopes.pop()

    def label(self, name: str) -> str:
        """Return a label's name, made distinct from the same name in other scopes."""
        for scope in reversed(self.open_scopes):
            if name in self.labels[scope]:
                return f"{name}@{scope}" if scope else name
        return name

    def declare(self, kind: str, names: str) -> None:
        for name in (part.strip() for part in names.split(",")):
            found = re.fullmatch(r"(%?\w+)<(\d+)>", name)
            each = [f"{found[1]}{i}" for i in range(int(found[2]))] if found else [name]
            for one in each:
                self.scopes[-1][one] = Register(len(self.bits), WIDTHS[kind])
                self.bits.append(WIDTHS[kind])

    def find(self, name: str) -> Register | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)


def read_kernel(text: str) -> Kernel:
    """Read the only kernel of a module.

    Raises:
        EmulationError: The text is not in the subset of PTX that Triton writes.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    # Drop the directives that name lines of the source code.
    text = re.sub(r"^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
    head = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*((?:\.\w+[^{]*)?)\{", text, re.DOTALL)
    target = re.search(r"\.target\s+sm_(\d+)", text)
    if not head or not target:
        msg = "PTX has no .entry or no .target"
        raise EmulationError(msg)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head[3])
    if not threads:
        msg = f"{head[1]} does not say how many threads it has"
        raise EmulationError(msg)
    statements = _body(text[head.end() :])
    names, instructions, targets, tables = _Names(_labels(statements)), [], {}, {}
    label = ""
    for statement in statements:
        if statement == "{":
            names.begin()
        elif statement == "}":
            names.end()
        elif statement.endswith(":"):
            label = statement[:-1]
            targets[names.label(label)] = len(instructions)
        elif found := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL):
            names.declare(found[1], found[2])
        elif found := re.fullmatch(r"\.branchtargets\s(.*)", statement, re.DOTALL):
            tables[label] = tuple(part.strip() for part in found[1].split(","))
        elif not statement.startswith("."):
            instructions.append(_instruction(statement, names))
    registers = re.search(r"\.maxnreg\s+(\d+)", head[3])
    return Kernel(
        name=head[1],
        parameters=tuple(map(_parameter, head[2].split(","))) if head[2].strip() else (),
        num_threads=int(threads[1]),
        max_registers=int(registers[1]) if registers else None,
        capability=int(target[1]),
        instructions=tuple(instructions),
        register_bits=tuple(names.bits),
        targets=targets,
        tables=tables,
        is_specialised=any(map(_parts_warps, instructions)),
    )


def _parameter(declaration: str) -> tuple[str, str]:
    """Return name and type of a parameter.

    Its declaration has the form `.param .u64 .ptr .global name`, or
    `.param .align 64 .b8 name[128]`.
    """
    found = re.fullmatch(
        r"\s*\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s.*?([\w$]+)(\[\d+\])?\s*",
        declaration,
        re.DOTALL,
    )
    if not found:
        msg = f"not a parameter: {declaration!r}"
        raise EmulationError(msg)
    return found[2], found[1] + (found[3] or "")


def _parts_warps(instruction: Instruction) -> bool:
    """Return whether warps may meet or wait here without the others of their program."""
    name = instruction.opcode.split(".")[0]
    if name not in {"bar", "barrier"} or ".warp." in instruction.opcode:
        return name == "mbarrier"
    return instruction.operands != (Immediate(0),)


def _body(text: str) -> list[str]:
    """Return the statements up to the brace that ends the kernel."""
    statements, depth = [], 0
    for statement in _statements(text):
        depth += (statement == "{") - (statement == "}")
        if depth < 0:
            break
        statements.append(statement)
    return statements


def _labels(statements: list[str]) -> list[frozenset[str]]:
    """Return the labels of each scope, in the order in which scopes begin."""
    labels: list[set[str]] = [set()]
    stack = [labels[0]]
    for statement in statements:
        if statement == "{":
            labels.append(set())
            stack.append(labels[-1])
        elif statement == "}":
            stack.pop()
        elif statement.endswith(":"):
            stack[-1].add(statement[:-1])
    return [frozenset(each) for each in labels]


def _statements(body: str) -> Iterator[str]:
    """Yield instructions, declarations, labels, and the braces around scopes."""
    start = depth = 0
    for match in re.finditer(r"[;{}]", body):
        mark, before = match[0], body[start : match.start()]
        while label := re.match(r"\s*([\w$]+:)(?!:)", before):
            yield label[1]
            start += label.end()
            before = before[label.end() :]
        is_between = not before.strip()
        if mark == "{" and not is_between:
            depth += 1
        elif mark == "}" and depth:
            depth -= 1
        elif not depth:
            if not is_between:
                yield before.strip()
            if mark != ";":
                yield mark
            start = match.end()


def _instruction(statement: str, names: _Names) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
    if not found:
        msg = f"not an instruction: {statement!r}"
        raise EmulationError(msg)
    negation, predicate, opcode, rest = found.groups()
    register = names.find(predicate) if predicate else None
    if predicate and register is None:
        msg = f"unknown predicate in {statement!r}"
        raise EmulationError(msg)
    return Instruction(
        opcode=opcode,
        operands=tuple(_operand(text, names) for text in _split(rest)),
        predicate=register,
        is_negated=bool(negation),
        text=" ".join(statement.split()),
    )


def _split(text: str) -> list[str]:
    """Split operands at commas outside of braces, and pairs such as `a|b`."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,|{}\[\]\s][^,|{}\[\]]*", text)
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str, names: _Names) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_operand(part, names) for part in _split(text[1:-1])))
    if text.startswith("["):
        return _place(text, names)
    if register := names.find(text):
        return register
    if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        return Immediate(int(found[1], 16))
    if found := re.fullmatch(r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?", text):
        return Immediate(int(found[1], 0))
    return Symbol(names.label(text))


def _place(text: str, names: _Names) -> Address | Box:
    if "{" in text:
        descriptor, coordinates = _split(text[1:-1])
        parts = _split(coordinates.strip("{}"))
        return Box(_operand(descriptor, names), tuple(_operand(part, names) for part in parts))
    found = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
    if not found:
        msg = f"not an address: {text!r}"
        raise EmulationError(msg)
    base = names.find(found[1]) or Symbol(found[1])
    return Address(base, int(found[2] or "0", 0))
