"""Waves: programs of a launch that run in step, and the registers of their threads."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from perf.emulator.dependence import Dependence
from perf.emulator.errors import EmulationError
from perf.emulator.memory.barriers import Barriers
from perf.emulator.memory.counters import Counters
from perf.emulator.memory.global_memory import (
    BARRIER_BIT,
    GROUP,
    PROGRAM_BIT,
    WARP,
    GlobalMemory,
    Histories,
    Lanes,
)
from perf.emulator.memory.pending import Pending
from perf.emulator.memory.shared_memory import SharedMemory
from perf.emulator.memory.tensor_maps import TensorMap
from perf.emulator.numbers import UNSIGNED, Array, bits, bits_of, meaning
from perf.emulator.ptx import SPECIAL, Immediate, Kernel, Operand, Register, Symbol

Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Things that all programs of a launch share.

    Attributes:
        kernel: The kernel.
        grid: Number of programs in each dimension.
        arguments: Name of a parameter -> its bits.
        memory: Global memory, that is, the tensors.
        shared_bytes: Shared memory of each program.
        counters: Counters to update; None for no counting.
        maps: Address of a parameter that is a tensor map -> the tensor map.
        dependence: Checks of programs that begin before the launch ahead has ended; None if it
            ended before this launch began.
        histories: Clocks that parties knew when they accessed global memory, for kernels with
            specialised warps. Filled while programs run.
    """

    kernel: Kernel
    grid: Place
    arguments: dict[str, Array]
    memory: GlobalMemory
    shared_bytes: int
    counters: Counters | None
    maps: dict[int, TensorMap]
    dependence: Dependence | None = None
    histories: Histories = field(default_factory=dict)


class Wave:
    """Programs that run in step. A lane is one thread of one of them.

    Args:
        launch: Launch of the programs.
        places: Index of each program in the dimensions of the grid.

    Attributes:
        registers: Bits of each register, one value per lane.
        copies: Asynchronous copies that have not landed.
        products: Asynchronous matrix products that have not ended.
        num_barriers: Number of barriers that each program has passed.
        barriers: Barriers and registers of specialised warps; None if warps meet only at barriers
            of their whole program.
        dependence: Checks of a dependent launch, as in `Launch`.
        has_waited: Lanes that have waited for the launch ahead.
        fenced: The registers as they were at the last `wgmma.fence` of each group of warps.
    """

    def __init__(self, launch: Launch, places: Sequence[Place]) -> None:
        self.kernel = launch.kernel
        self.arguments, self.maps = launch.arguments, launch.maps
        self.memory = launch.memory
        self.counters = launch.counters
        self.dependence = launch.dependence
        self.num_threads = self.kernel.num_threads
        self._places = np.array(places, dtype=np.uint32)
        self._grid = launch.grid
        self._set_lanes()
        self.num_barriers = np.zeros(self.num_programs, dtype=np.int64)
        self.has_waited = np.full(self.num_lanes, launch.dependence is None)
        num_warps = self.num_threads // WARP
        self.barriers: Barriers | None = None
        if self.kernel.is_specialised:
            self.barriers = Barriers(
                self.program_ids, num_warps, self.kernel.max_registers, launch.shared_bytes
            )
            self.shared = self.barriers.memory
        else:
            self.shared = SharedMemory(
                self.num_programs,
                num_warps,
                launch.shared_bytes,
                may_stores_differ=self.kernel.may_stores_differ,
            )
        self.copies, self.products = Pending(self.num_programs), Pending(self.num_groups)
        garbage: dict[int, Array] = {
            size: np.full(self.num_lanes, np.iinfo(dtype).max, dtype=dtype)
            for size, dtype in UNSIGNED.items()
        }
        garbage[1] = np.ones(self.num_lanes, dtype=bool)
        self.registers = [garbage[size] for size in self.kernel.register_bits]
        self.fenced: list[list[Array | None]] = [[] for _ in range(self.num_groups)]

    def _set_lanes(self) -> None:
        self.num_programs = len(self._places)
        self.num_lanes = self.num_programs * self.num_threads
        # A program that is not made of whole groups of four warps runs no `wgmma`.
        self.group_threads = GROUP if self.num_threads % GROUP == 0 else self.num_threads
        self.num_groups = self.num_lanes // self.group_threads
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
        """Return one value for each lane."""
        if values.shape == (self.num_lanes,):
            return values
        return np.broadcast_to(values, (self.num_lanes,))

    def parties(self, active: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the parties of some lanes that access global memory now."""
        programs = self.programs[active]
        if self.barriers:
            return self.barriers.clocks.parties(programs, active % self.num_threads // WARP)
        codes = self.program_ids << PROGRAM_BIT | self.num_barriers << BARRIER_BIT
        return codes[programs] | active % self.num_threads // WARP

    def whole_programs(self, lanes: Lanes | None, what: str) -> Lanes | None:
        """Return the programs that take part in an instruction for whole programs; None for all.

        Raises:
            EmulationError: Only some threads of a program take part.
        """
        return _whole(lanes, self.num_threads, what)

    def whole_groups(self, lanes: Lanes | None, what: str) -> Lanes | None:
        """Return the groups of four warps that take part, as `whole_programs` does."""
        return _whole(lanes, self.group_threads, what)

    def num_warps(self, lanes: Lanes | None) -> int:
        """Return the number of warps that these lanes belong to."""
        if lanes is None:
            return self.num_lanes // WARP
        return int(lanes.reshape(-1, WARP).any(axis=1).sum())

    def whole_warps(self, lanes: Lanes | None, what: str) -> Lanes | None:
        """Return the warps that take part, as `whole_programs` does."""
        return _whole(lanes, WARP, what)

    def keep(self, programs: Lanes) -> None:
        """Keep only these programs, because the others have ended."""
        lanes = programs[self.programs]
        groups = lanes[:: self.group_threads]
        self._places = self._places[programs]
        self._set_lanes()
        self.num_barriers = self.num_barriers[programs]
        self.has_waited = self.has_waited[lanes]
        self.shared.keep(programs)
        self.copies, self.products = Pending(self.num_programs), Pending(self.num_groups)
        fenced = [each for each, is_kept in zip(self.fenced, groups, strict=True) if is_kept]
        are_same = {
            id(each): [
                held is register for held, register in zip(each, self.registers, strict=False)
            ]
            for each in fenced
        }
        # Many registers share one array, for example that of garbage. Copy each array once.
        kept: dict[int, Array] = {}
        for index, register in enumerate(self.registers):
            if id(register) not in kept:
                kept[id(register)] = register[lanes]
            self.registers[index] = kept[id(register)]
        again = {
            key: [
                register if is_same else None
                for register, is_same in zip(self.registers, same, strict=False)
            ]
            for key, same in are_same.items()
        }
        self.fenced = [again[id(each)] for each in fenced]


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


Step = Callable[[Wave, Lanes | None], Lanes | None]
"""Function that carries out an instruction for some lanes (None for all).

It returns the lanes that must try again, or None for no lanes.
"""


Reader = Callable[[Wave], Array]
Writer = Callable[[Wave, Array, Lanes | None], None]


def reader(operand: Operand, kind: str) -> Reader:
    """Return a function that reads an operand as type `kind`: one value, or one for each lane."""
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
        case Symbol(name) if re.search(r"_param_\d+$", name):
            return lambda wave: meaning(wave.arguments[name], kind)
        case _:
            msg = f"operand {operand}"
            raise EmulationError(msg)


def _constant(value: int, kind: str) -> Array:
    if kind == "pred":
        return np.array([bool(value)])
    held = np.array([value & (2**64 - 1)], dtype=np.uint64)
    return meaning(held, kind)


def writer(operand: Operand, kind: str) -> Writer:
    """Return a function that writes values of type `kind` to a register, for some of the lanes."""
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
    """Return the indices of some lanes (None for all)."""
    return np.arange(num_lanes) if lanes is None else np.flatnonzero(lanes)
