"""Tile sizes, warps and stages by shape and machine.

Shapes decide, never model names. The sizes for GPUs are those that compile without spills
(tests/kernels/test_compiled.py); those for the interpreter are large, because it pays per operation
and hardly per element.
"""

from dataclasses import dataclass

import torch
import triton

HOPPER = 90
"""Compute capability of the first GPU with warpgroup matrix instructions."""

ADA = 89
"""Compute capability of the first GPU that converts to and from float8_e4m3fn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What tile sizes depend on.

    Attributes:
        capability: Compute capability times ten; 0 for Triton's interpreter.
        num_processors: Streaming multiprocessors; 1 for the interpreter.
    """

    capability: int
    num_processors: int

    @property
    def is_interpreter(self) -> bool:
        """Whether kernels run in Triton's interpreter."""
        return self.capability == 0

    @property
    def has_fp8(self) -> bool:
        """Whether kernels may read and write float8_e4m3fn."""
        return self.is_interpreter or self.capability >= ADA


INTERPRETER = Machine(capability=0, num_processors=1)


def machine_of(device: torch.device) -> Machine:
    """The machine that runs kernels on `device`'s tensors."""
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(device.index or 0)
    return Machine(
        capability=driver.get_current_target().arch,
        num_processors=properties["multiprocessor_count"],
    )


def power_of_two(value: int) -> int:
    """The least power of two not below `value`."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTiles:
    """Tiles of a kernel that moves rows.

    Attributes:
        block_rows: Rows a program moves.
        num_warps: Warps a program.
    """

    block_rows: int
    num_warps: int


def copy_tiles(machine: Machine, row_elements: int) -> CopyTiles:
    """Tiles of `kv_store`.

    Args:
        machine: Where it runs.
        row_elements: Elements of one row, one head of one token.
    """
    if machine.is_interpreter:
        return CopyTiles(block_rows=1024, num_warps=1)
    # 4 warps with 16 elements of K and of V a thread: two 16-byte loads of each in flight.
    return CopyTiles(block_rows=max(1, 2048 // power_of_two(row_elements)), num_warps=4)
