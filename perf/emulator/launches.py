"""Launch a kernel of PTX: every program of a grid, several of them in step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from perf.emulator.arithmetic import arithmetic
from perf.emulator.counters import Counters
from perf.emulator.errors import EmulationError
from perf.emulator.matrices import matrices
from perf.emulator.memory import GlobalMemory
from perf.emulator.movement import movement
from perf.emulator.ptx import (
    Address,
    Instruction,
    Kernel,
    Operand,
    Register,
    Symbol,
    Vector,
    read_kernel,
)
from perf.emulator.waves import Decoded, Launch, Place, Step, Wave, run

MAX_LANES = 4096
"""Threads that run in step; more share the cost of an instruction, fewer fit into caches."""

TYPES = {"u64": np.uint64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8, "f32": np.float32}
"""Type of a parameter -> how its value is held."""

FAMILIES: Sequence[Callable[[Instruction], Step | None]] = (movement, matrices, arithmetic)


class EmulatedKernel:
    """A kernel made ready to run.

    Args:
        text: PTX with one kernel, as Triton writes it.
        are_copies_fenced: Whether tensor cores may read what was copied behind a fence only, as
            PTX asks for; some compilers do without.

    Raises:
        EmulationError: An instruction is not known; names it.
    """

    def __init__(self, text: str, *, are_copies_fenced: bool = True) -> None:
        self.kernel = replace(read_kernel(text), are_copies_fenced=are_copies_fenced)
        self._code = [_decoded(each, self.kernel) for each in self.kernel.instructions]
        # Where threads that parted may meet again.
        self._leaders = frozenset(self.kernel.targets.values())

    def launch(
        self,
        grid: Place,
        arguments: Sequence[torch.Tensor | float | None],
        shared_bytes: int,
        counters: Counters | None = None,
    ) -> None:
        """Run every program.

        Args:
            grid: Programs in each dimension.
            arguments: Of the kernel's parameters, in order; tensors lie on the CPU.
            shared_bytes: Of each program.
            counters: What to count in; None for nowhere.

        Raises:
            EmulationError: The kernel does what is an error, or undefined, on a GPU.
        """
        parameters = self.kernel.parameters
        values = {
            name: _held(kind, argument)
            for (name, kind), argument in zip(parameters, arguments, strict=True)
        }
        memory = GlobalMemory(each for each in arguments if isinstance(each, torch.Tensor))
        launch = Launch(
            kernel=self.kernel,
            grid=grid,
            arguments=values,
            memory=memory,
            shared_bytes=shared_bytes,
            counters=counters,
        )
        width, height, depth = grid
        places = [(x, y, z) for z, y, x in np.ndindex(depth, height, width)]
        together = max(1, MAX_LANES // self.kernel.num_threads)
        # Sums overflow as registers do, and garbage is not a number.
        with np.errstate(all="ignore"):
            for first in range(0, len(places), together):
                wave = Wave(launch, places[first : first + together])
                run(wave, self._code, self._leaders)
        memory.check_races()


def _held(kind: str, argument: torch.Tensor | float | None) -> np.ndarray:
    """A parameter's bits, one value."""
    dtype = TYPES.get(kind)
    if dtype is None:
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
    step, target = None, -1
    if name == "bra":
        label = instruction.operands[0]
        target = kernel.targets[label.name] if isinstance(label, Symbol) else -1
    elif name not in {"ret", "exit"}:
        step = next((found for family in FAMILIES if (found := family(instruction))), None)
        if step is None:
            msg = f"{kernel.name}: no such instruction is known: {instruction.text}"
            raise EmulationError(msg)
    return Decoded(
        step=step,
        target=target,
        predicate=instruction.predicate.index if instruction.predicate else None,
        is_negated=instruction.is_negated,
        registers=frozenset() if name == "wgmma" else frozenset(_registers(instruction.operands)),
        text=instruction.text,
    )


def _registers(operands: Sequence[Operand]) -> Iterator[int]:
    for operand in operands:
        match operand:
            case Register(index, _):
                yield index
            case Address(base, _):
                yield from _registers((base,))
            case Vector(parts):
                yield from _registers(parts)
