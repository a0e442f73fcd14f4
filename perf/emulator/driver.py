"""Driver for Triton that runs launches in the emulator."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from perf.emulator.dependence import Dependence
from perf.emulator.errors import EmulationError
from perf.emulator.launches import EmulatedKernel
from perf.emulator.memory.counters import Counters
from perf.emulator.memory.global_memory import GlobalMemory
from perf.emulator.memory.tensor_maps import TensorMap
from perf.harness.machine_code import PretendedGpu

MAX_THREADS = 1024
"""Largest number of threads of a program."""

SCRATCH_BYTES = 16
"""Bytes of each scratch memory that Triton passes to a kernel. Our kernels do not use them."""


FENCES_COPIES = (3, 7, 1)
"""First release of Triton that puts a fence between asynchronous copies and tensor cores.

A kernel cannot place this fence itself, because the compiler builds the pipeline. As far as is
known, Hopper works without the fence, and Blackwell does not.
Source: triton-lang/triton#9610 and #10537.
"""

ROUNDED_APART = ("_replayssm_output_only_kernel",)
"""Kernels of vLLM in which threads store sums at one place that differ in the last digit.

Each thread adds its own product and that of another thread. The compiler fuses the thread's own
product and the sum into one instruction. Each thread therefore rounds only the other's product.
"""


class EmulatedGpu(PretendedGpu):
    """Triton's driver of an emulated GPU: it compiles as for a real one, and runs on CPU tensors.

    Args:
        capability: Compute capability times ten, such as 90.
        counts: Whether to count the memory traffic of launches.

    Attributes:
        counters: Name of a kernel -> counters of its launches.
        ahead: Memory of the last launch, with the record of its stores.
    """

    def __init__(self, capability: int, *, counts: bool = False) -> None:
        super().__init__(capability)
        self.counters: dict[str, Counters] = {}
        self.ahead: GlobalMemory | None = None
        self._counts = counts

    def launcher_cls(self, source: Any, metadata: Any) -> "Launcher":  # noqa: ANN401
        """Return the object that launches a kernel. Triton expects a method of this name."""
        return Launcher(source, metadata, self)

    def counters_of(self, name: str) -> Counters | None:
        """Return the counters for launches of a kernel; None if launches are not counted."""
        return self.counters.setdefault(name, Counters()) if self._counts else None

    def load_binary(self, *_: object) -> tuple[object, object, int, int, int]:
        """Return a loaded kernel as Triton expects it.

        Returns:
            Handles of the module and of the function, registers, spills, and the largest number
            of threads.
        """
        return self, self, 0, 0, MAX_THREADS


class Launcher:
    """Object that Triton calls to launch a kernel.

    Args:
        source: Source that was compiled, with the types of the arguments.
        metadata: The compiler's metadata of the kernel.
        gpu: GPU that counts the launches.
    """

    def __init__(self, source: Any, metadata: Any, gpu: EmulatedGpu) -> None:  # noqa: ANN401
        self._gpu = gpu
        self._kinds = list(source.signature.values())
        self._maps = getattr(metadata, "tensordesc_meta", None)
        self._shared_bytes = metadata.shared
        self._is_dependent = metadata.launch_pdl
        release = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
        self._kernel = EmulatedKernel(
            _ptx_of(metadata).read_text(),
            are_copies_fenced=release >= FENCES_COPIES,
            may_stores_differ=metadata.name in ROUNDED_APART,
        )

    def __call__(self, width: int, height: int, depth: int, *arguments: Any) -> None:  # noqa: ANN401
        """Run every program of a grid.

        Args:
            width: Programs in the first dimension of the grid.
            height: Programs in the second dimension.
            depth: Programs in the third dimension.
            arguments: Six arguments for the driver, then those of the kernel.
        """
        given = self._expanded(arguments[6:])
        num_missing = len(self._kernel.kernel.parameters) - len(given)
        given += [torch.zeros(SCRATCH_BYTES, dtype=torch.uint8) for _ in range(num_missing)]
        counters = self._gpu.counters_of(self._kernel.kernel.name)
        if counters:
            counters.launches += 1
        dependence = Dependence(self._gpu.ahead) if self._is_dependent else None
        self._gpu.ahead = self._kernel.launch(
            (width, height, depth), given, self._shared_bytes, counters, dependence
        )

    def _expanded(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the values of the kernel's parameters.

        A tensor descriptor takes several parameters: the tensor map, the shape and the strides.
        """
        given, layouts = [], iter(self._maps or ())
        for argument, kind in _flat(arguments, self._kinds):
            if str(kind).startswith("tensordesc"):
                layout = next(layouts, None)
                if layout is None:
                    msg = "a tensor descriptor that no copy engine is to read"
                    raise EmulationError(msg)
                given += [TensorMap.of(argument, layout), *argument.shape, *argument.strides]
            elif kind != "constexpr":
                given.append(argument)
        return given


def _flat(arguments: Sequence[Any], kinds: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each argument with its type. Those of a named tuple are parameters of their own."""
    for argument, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(argument, kind)
        else:
            yield argument, kind


def _ptx_of(metadata: Any) -> Path:  # noqa: ANN401
    """Return the file with a kernel's PTX in Triton's cache."""
    from triton.runtime.cache import get_cache_manager

    files = get_cache_manager(metadata.hash).get_group(f"{metadata.name}.json") or {}
    found = [Path(path) for name, path in files.items() if name.endswith(".ptx")]
    if len(found) != 1:
        msg = f"Triton's cache has no PTX of {metadata.name}"
        raise EmulationError(msg)
    return found[0]
