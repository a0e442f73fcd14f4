"""Launch a PTX kernel: run every program of a grid, several programs in step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from perf.emulator.dependence import Dependence
from perf.emulator.errors import EmulationError
from perf.emulator.instructions.arithmetic import arithmetic
from perf.emulator.instructions.matrices import matrices
from perf.emulator.instructions.movement import movement
from perf.emulator.instructions.synchronization import synchronization
from perf.emulator.instructions.tensor_copies import tensor_copies
from perf.emulator.memory.counters import Counters
from perf.emulator.memory.global_memory import GlobalMemory
from perf.emulator.memory.tensor_maps import TensorMap
from perf.emulator.ptx import (
    DESCRIPTOR,
    Address,
    Instruction,
    Kernel,
    Operand,
    Register,
    Symbol,
    Vector,
    read_kernel,
)
from perf.emulator.schedule import Decoded, run, together
from perf.emulator.waves import Launch, Place, Step, Wave, reader

MAX_LANES = 4096
"""Number of threads that run in step.

More threads share the overhead of an instruction. The data of fewer threads fit into CPU caches.
"""

TYPES = {"u64": np.uint64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8, "f32": np.float32}
"""Type of a parameter -> numpy type of its value."""

FAMILIES: Sequence[Callable[[Instruction], Step | None]] = (
    synchronization,
    tensor_copies,
    movement,
    matrices,
    arithmetic,
)


Argument = torch.Tensor | TensorMap | float | None

MAPS_START = 1 << 12
"""Address of a kernel's first tensor map. They are parameters, whose addresses have 32 bits."""

MAP_BYTES = 128
"""Bytes of a tensor map."""


class EmulatedKernel:
    """A kernel that is ready to run.

    Args:
        text: PTX with one kernel, as Triton writes it.
        are_copies_fenced: Whether tensor cores may read copied data only after a fence, as PTX
            requires. Some compilers omit the fence.
        may_stores_differ: Whether threads may store different values at one place of shared memory
            at once. On a GPU one of the values then remains.

    Raises:
        EmulationError: An instruction is unknown. The message names it.
    """

    def __init__(
        self, text: str, *, are_copies_fenced: bool = True, may_stores_differ: bool = False
    ) -> None:
        self.kernel = replace(
            read_kernel(text),
            are_copies_fenced=are_copies_fenced,
            may_stores_differ=may_stores_differ,
        )
        self._code = [_decoded(each, self.kernel) for each in self.kernel.instructions]
        # Targets of branches, where threads that took different paths may meet again.
        self._leaders = frozenset(target for each in self._code for target in each.targets)

    def launch(
        self,
        grid: Place,
        arguments: Sequence[Argument],
        shared_bytes: int,
        counters: Counters | None = None,
        dependence: Dependence | None = None,
    ) -> GlobalMemory:
        """Run every program.

        Args:
            grid: Programs in each dimension.
            arguments: Values of the kernel's parameters, in order. Tensors are on the CPU. A
                tensor descriptor for the copy engine is a `TensorMap`.
            shared_bytes: Shared memory of each program.
            counters: Counters to update; None for no counting.
            dependence: Checks of programs that begin before the launch ahead has ended; None if
                it has ended.

        Returns:
            Global memory, with the record of all loads and stores.

        Raises:
            EmulationError: The kernel does something that is an error, or undefined, on a GPU.
        """
        parameters = self.kernel.parameters
        addresses = {
            id(each): MAPS_START + MAP_BYTES * index
            for index, each in enumerate(arguments)
            if isinstance(each, TensorMap)
        }
        values = {
            name: _held(kind, argument, addresses)
            for (name, kind), argument in zip(parameters, arguments, strict=True)
        }
        maps = {addresses[id(each)]: each for each in arguments if isinstance(each, TensorMap)}
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        memory = GlobalMemory(tensors + [each.base for each in maps.values()])
        launch = Launch(
            kernel=self.kernel,
            grid=grid,
            arguments=values,
            memory=memory,
            shared_bytes=shared_bytes,
            counters=counters,
            maps=maps,
            dependence=dependence,
        )
        width, height, depth = grid
        places = [(x, y, z) for z, y, x in np.ndindex(depth, height, width)]
        together = max(1, MAX_LANES // self.kernel.num_threads)
        # No warnings: integer sums wrap around as in registers, and garbage is often NaN.
        with np.errstate(all="ignore"):
            for first in range(0, len(places), together):
                wave = Wave(launch, places[first : first + together])
                run(wave, self._code, self._leaders)
                if wave.barriers:
                    launch.histories.update(wave.barriers.clocks.histories)
        memory.check_races(launch.histories if self.kernel.is_specialised else None)
        if dependence:
            dependence.check_end(width * height * depth)
        return memory


def _held(kind: str, argument: Argument, addresses: Mapping[int, int]) -> np.ndarray:
    """Return the bits of a parameter; for a tensor map its address, which is found by its `id`."""
    if isinstance(argument, TensorMap) and kind == DESCRIPTOR:
        return np.array([addresses[id(argument)]], dtype=np.uint64)
    dtype = TYPES.get(kind)
    if dtype is None or isinstance(argument, TensorMap):
        msg = f"a parameter of type {kind}"
        raise EmulationError(msg)
    if isinstance(argument, torch.Tensor):
        argument = argument.data_ptr()
    if dtype == np.float32:
        return np.array([argument], dtype=dtype).view(np.uint32)
    size = 8 * np.dtype(dtype).itemsize
    return np.array([int(argument or 0) & (2**size - 1)], dtype=dtype)


def _decoded(instruction: Instruction, kernel: Kernel) -> Decoded:
    name = instruction.opcode.split(".")[0]
    step, choice, targets = None, None, ()
    if name == "bra":
        targets = (_target(instruction.operands[0], kernel),)
    elif name == "brx":
        index, table = instruction.operands
        choice = reader(index, "u32")
        labels = kernel.tables[table.name] if isinstance(table, Symbol) else ()
        targets = tuple(kernel.targets[label] for label in labels)
    elif name in {"ret", "exit"}:
        targets = (-1,)
    else:
        step = next((found for family in FAMILIES if (found := family(instruction))), None)
        if step is None:
            msg = f"{kernel.name}: no such instruction is known: {instruction.text}"
            raise EmulationError(msg)
    size = together(instruction)
    if kernel.is_specialised and kernel.num_threads % size:
        msg = f"{instruction.text}: by {kernel.num_threads} threads, no multiple of {size}"
        raise EmulationError(msg)
    return Decoded(
        step=step,
        targets=targets,
        choice=choice,
        predicate=instruction.predicate.index if instruction.predicate else None,
        is_negated=instruction.is_negated,
        registers=frozenset() if name == "wgmma" else frozenset(_registers(instruction.operands)),
        together=size,
        text=instruction.text,
    )


def _target(label: Operand, kernel: Kernel) -> int:
    if not isinstance(label, Symbol) or label.name not in kernel.targets:
        msg = f"{kernel.name}: a branch to {label}"
        raise EmulationError(msg)
    return kernel.targets[label.name]


def _registers(operands: Sequence[Operand]) -> Iterator[int]:
    for operand in operands:
        match operand:
            case Register(index, _):
                yield index
            case Address(base, _):
                yield from _registers((base,))
            case Vector(parts):
                yield from _registers(parts)
