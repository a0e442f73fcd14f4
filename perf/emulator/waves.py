"""Programs of a launch that run in step: their threads' registers, and how they go through code.

All threads run an instruction together. Where they part, those that are furthest behind go first,
so they meet again where their paths do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf.emulator.counters import Counters
from perf.emulator.errors import EmulationError
from perf.emulator.memory import (
    BARRIER_BIT,
    PROGRAM_BIT,
    WARP,
    GlobalMemory,
    Lanes,
    SharedMemory,
)
from perf.emulator.numbers import UNSIGNED, Array, bits, bits_of, meaning
from perf.emulator.pending import Pending
from perf.emulator.ptx import SPECIAL, Immediate, Kernel, Operand, Register, Symbol

MAX_STEPS = 5_000_000
"""Instructions after which programs count as ones that do not end."""

Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the programs of a launch have in common.

    Attributes:
        kernel: What they run.
        grid: Programs in each dimension.
        arguments: Parameter -> its bits.
        memory: The tensors.
        shared_bytes: Shared memory of each program.
        counters: What to count in; None for nowhere.
    """

    kernel: Kernel
    grid: Place
    arguments: dict[str, Array]
    memory: GlobalMemory
    shared_bytes: int
    counters: Counters | None


class Wave:
    """Programs that run in step; a lane is one thread of one of them.

    Args:
        launch: Theirs.
        places: Index of each program in the dimensions of the grid.

    Attributes:
        registers: Bits of each register, one value per lane.
        copies: Asynchronous copies that have not landed.
        products: Asynchronous matrix products that are not finished.
        num_barriers: How many each program has passed.
        fenced: The registers as they were at the last `wgmma.fence`, or as products left them.
    """

    def __init__(self, launch: Launch, places: Sequence[Place]) -> None:
        self.kernel = launch.kernel
        self.arguments = launch.arguments
        self.memory = launch.memory
        self.counters = launch.counters
        self.num_threads = self.kernel.num_threads
        self._places = np.array(places, dtype=np.uint32)
        self._grid = launch.grid
        self._set_lanes()
        self.num_barriers = np.zeros(self.num_programs, dtype=np.int64)
        self.shared = SharedMemory(self.num_programs, self.num_threads // WARP, launch.shared_bytes)
        self.copies, self.products = Pending(self.num_programs), Pending(self.num_programs)
        garbage: dict[int, Array] = {
            size: np.full(self.num_lanes, np.iinfo(dtype).max, dtype=dtype)
            for size, dtype in UNSIGNED.items()
        }
        garbage[1] = np.ones(self.num_lanes, dtype=bool)
        self.registers = [garbage[size] for size in self.kernel.register_bits]
        self.fenced: list[Array | None] = []

    def _set_lanes(self) -> None:
        self.num_programs = len(self._places)
        self.num_lanes = self.num_programs * self.num_threads
        lanes = np.arange(self.num_lanes)
        self.programs = lanes // self.num_threads
        thread = (lanes % self.num_threads).astype(np.uint32)
        self.lane_of_warp = lanes % WARP
        x, y, z = self._places[self.programs].T
        counts = (np.array([count], dtype=np.uint32) for count in self._grid)
        self.special = dict(zip(SPECIAL, (thread, x, y, z, *counts), strict=True))
        width, height, _ = self._grid
        place = self._places.astype(np.int64)
        self.program_ids = place[:, 0] + width * (place[:, 1] + height * place[:, 2])

    def of(self, values: Array) -> Array:
        """One value for each lane."""
        if values.shape == (self.num_lanes,):
            return values
        return np.broadcast_to(values, (self.num_lanes,))

    def parties(self, active: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Who some lanes are to global memory."""
        programs = self.programs[active]
        codes = self.program_ids << PROGRAM_BIT | self.num_barriers << BARRIER_BIT
        return codes[programs] | active % self.num_threads // WARP

    def whole_programs(self, lanes: Lanes | None, what: str) -> Lanes | None:
        """Which programs take part in what all their threads must do; None for all.

        Raises:
            EmulationError: Some threads of a program do not.
        """
        return _whole(lanes, self.num_threads, what)

    def num_warps(self, lanes: Lanes | None) -> int:
        """How many warps these lanes are of."""
        if lanes is None:
            return self.num_lanes // WARP
        return int(lanes.reshape(-1, WARP).any(axis=1).sum())

    def whole_warps(self, lanes: Lanes | None, what: str) -> Lanes | None:
        """Which warps take part in what all their threads must do; see `whole_programs`."""
        return _whole(lanes, WARP, what)

    def keep(self, programs: Lanes) -> None:
        """Go on with some programs; the others have ended."""
        lanes = programs[self.programs]
        self._places = self._places[programs]
        self._set_lanes()
        self.num_barriers = self.num_barriers[programs]
        self.shared.keep(programs)
        self.copies, self.products = Pending(self.num_programs), Pending(self.num_programs)
        pairs = zip(self.fenced or self.registers, self.registers, strict=True)
        is_fenced = [held is register for held, register in pairs]
        # Most registers hold what others do.
        kept: dict[int, Array] = {}
        for index, register in enumerate(self.registers):
            if id(register) not in kept:
                kept[id(register)] = register[lanes]
            self.registers[index] = kept[id(register)]
        if self.fenced:
            pairs = zip(is_fenced, self.registers, strict=True)
            self.fenced = [register if fenced else None for fenced, register in pairs]


def _whole(lanes: Lanes | None, num_threads: int, what: str) -> Lanes | None:
    if lanes is None:
        return None
    groups = lanes.reshape(-1, num_threads)
    some = groups.any(axis=1)
    if (some != groups.all(axis=1)).any():
        part = groups[some != groups.all(axis=1)][0]
        msg = f"{what} by {int(part.sum())} of {num_threads} threads"
        raise EmulationError(msg)
    return some


Step = Callable[[Wave, Lanes | None], None]
"""What an instruction does for some of the lanes; None for all of them."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """An instruction, made ready to run.

    Attributes:
        step: What it does; None for a branch or a return.
        target: Where a branch goes; -1 for the end.
        predicate: Index of the register that says which threads take part.
        is_negated: Whether those take part where it is false.
        registers: What it reads or writes at once; none for what fences and waits order.
        text: As written.
    """

    step: Step | None
    target: int
    predicate: int | None
    is_negated: bool
    registers: frozenset[int]
    text: str


def run(wave: Wave, code: Sequence[Decoded], leaders: frozenset[int]) -> None:
    """Run programs to their end.

    Raises:
        EmulationError: What the kernel does is an error; names the instruction.
    """
    waiting: dict[int, Lanes] = {0: np.ones(wave.num_lanes, dtype=bool)}
    num_steps = 0
    while waiting:
        waiting = _without_ended(wave, waiting)
        index = min(waiting)
        lanes = waiting.pop(index)
        every = None if lanes.all() else lanes
        while True:
            num_steps += 1
            decoded = code[index]
            active = every
            if decoded.predicate is not None:
                active = wave.registers[decoded.predicate]
                active = ~active if decoded.is_negated else active
                active = active if every is None else active & lanes
                if active.all():
                    active = None
            if decoded.step is None:
                taken = lanes if active is None else active
                _send(waiting, decoded.target, taken)
                _send(waiting, index + 1, lanes & ~taken)
                break
            if active is None or active.any():
                if wave.counters:
                    wave.counters.instructions += wave.num_warps(active)
                try:
                    if wave.products.is_busy:
                        _check_free(wave, decoded.registers, active)
                    decoded.step(wave, active)
                except EmulationError as error:
                    msg = f"{wave.kernel.name}: {decoded.text}: {error}"
                    raise EmulationError(msg) from error
            index += 1
            if waiting and index in leaders:
                _send(waiting, index, lanes)
                break
        if num_steps > MAX_STEPS:
            msg = f"{wave.kernel.name} does not end"
            raise EmulationError(msg)


def _check_free(wave: Wave, registers: frozenset[int], lanes: Lanes | None) -> None:
    """Refuse registers of products that are under way."""
    active = np.ones(wave.num_lanes, dtype=bool) if lanes is None else lanes
    if wave.products.uses(registers, active.reshape(wave.num_programs, -1).any(axis=1)):
        msg = "a register of a product that nobody has waited for"
        raise EmulationError(msg)


def _send(waiting: dict[int, Lanes], index: int, lanes: Lanes) -> None:
    if index >= 0 and lanes.any():
        waiting[index] = waiting[index] | lanes if index in waiting else lanes


def _without_ended(wave: Wave, waiting: dict[int, Lanes]) -> dict[int, Lanes]:
    """Drop programs that have ended, if they are half of all and nothing is under way."""
    if wave.copies.is_busy or wave.products.is_busy:
        return waiting
    alive = np.logical_or.reduce(list(waiting.values())).reshape(wave.num_programs, -1).any(axis=1)
    if 2 * int(alive.sum()) > wave.num_programs:
        return waiting
    lanes = alive[wave.programs]
    wave.keep(alive)
    return {index: held[lanes] for index, held in waiting.items()}


Reader = Callable[[Wave], Array]
Writer = Callable[[Wave, Array, Lanes | None], None]


def reader(operand: Operand, kind: str) -> Reader:
    """What gives an operand's values of type `kind`: one, or one for each lane."""
    match operand:
        case Register(index, size):
            is_plain = kind[0] in {"b", "u"} and kind != "bf16" and size == bits_of(kind)
            if is_plain or kind == "pred":
                return lambda wave: wave.registers[index]
            return lambda wave: meaning(wave.registers[index], kind)
        case Immediate(value):
            constant = _constant(value, kind)
            return lambda _: constant
        case Symbol("global_smem"):
            start = meaning(np.zeros(1, dtype=np.uint64), kind)
            return lambda _: start
        case Symbol(name) if name in SPECIAL:
            return lambda wave: meaning(wave.special[name], kind)
        case _:
            msg = f"operand {operand}"
            raise EmulationError(msg)


def _constant(value: int, kind: str) -> Array:
    if kind == "pred":
        return np.array([bool(value)])
    held = np.array([value & (2**64 - 1)], dtype=np.uint64)
    return meaning(held, kind)


def writer(operand: Operand, kind: str) -> Writer:
    """What puts values of type `kind` into a register, for some of the threads."""
    if operand == Symbol("_"):
        return lambda _program, _values, _lanes: None
    if not isinstance(operand, Register):
        msg = f"{operand} takes no result"
        raise EmulationError(msg)
    index, size = operand.index, operand.bits

    def write(wave: Wave, values: Array, lanes: Lanes | None) -> None:
        held = wave.of(bits(values, kind, size))
        if lanes is not None:
            held = np.where(lanes, held, wave.registers[index])
        wave.registers[index] = held

    return write


def active_of(lanes: Lanes | None, num_lanes: int) -> npt.NDArray[np.int64]:
    """Indices of lanes."""
    return np.arange(num_lanes) if lanes is None else np.flatnonzero(lanes)
