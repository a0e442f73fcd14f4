"""A driver for Triton whose launches run in the emulator."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from perf.emulator.counters import Counters
from perf.emulator.dependence import Dependence
from perf.emulator.errors import EmulationError
from perf.emulator.launches import EmulatedKernel
from perf.emulator.memory import GlobalMemory
from perf.emulator.tensor_maps import TensorMap
from perf.harness.machine_code import PretendedGpu

MAX_THREADS = 1024
"""Of a program."""

SCRATCH_BYTES = 16
"""Of each of the scratch memories that Triton passes besides, and our kernels do not use."""


FENCES_COPIES = (3, 7, 1)
"""Triton from which on a fence stands between asynchronous copies and tensor cores that read them.

No kernel can place one where the compiler's pipelines need it. Hopper does without, so far as is
known; Blackwell does not. Source: triton-lang/triton#9610 and #10537.
"""

ROUNDED_APART = ("_replayssm_output_only_kernel",)
"""Kernels of vLLM whose threads store sums at one place that differ in the last digit.

The compiler makes one instruction of a product and the sum with what another thread has for it. Of
the two products that are added each thread then rounds the other's alone.
"""


class EmulatedGpu(PretendedGpu):
    """Triton's driver of an emulated GPU: compiles as for a real one, runs on tensors of the CPU.

    Args:
        capability: Compute capability, such as 90.
        counts: Whether to count what launches ask for.

    Attributes:
        counters: Name of a kernel -> what its launches asked for.
        ahead: Memory of the last launch, with what that stored.
    """

    def __init__(self, capability: int, *, counts: bool = False) -> None:
        super().__init__(capability)
        self.counters: dict[str, Counters] = {}
        self.ahead: GlobalMemory | None = None
        self._counts = counts

    def launcher_cls(self, source: Any, metadata: Any) -> "Launcher":  # noqa: ANN401
        """What launches a kernel, by the name that Triton asks for."""
        return Launcher(source, metadata, self)

    def counters_of(self, name: str) -> Counters | None:
        """What to count a launch of a kernel in."""
        return self.counters.setdefault(name, Counters()) if self._counts else None

    def load_binary(self, *_: object) -> tuple[object, object, int, int, int]:
        """What Triton asks of a loaded kernel: its handles, registers, spills, threads at most."""
        return self, self, 0, 0, MAX_THREADS


class Launcher:
    """What Triton calls to launch a kernel.

    Args:
        source: What was compiled; knows the types of arguments.
        metadata: What the compiler says of it.
        gpu: Where launches are counted.
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
            width: Programs in the first dimension.
            height: In the second.
            depth: In the third.
            arguments: Six that concern the driver, then the kernel's.
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
        """What the kernel's parameters hold: of a tensor's descriptor its shape and strides too."""
        given, layouts = [], iter(self._maps or ())
        for argument, kind in zip(arguments, self._kinds, strict=True):
            if str(kind).startswith("tensordesc"):
                layout = next(layouts, None)
                if layout is None:
                    msg = "a tensor descriptor that no copy engine is to read"
                    raise EmulationError(msg)
                given += [TensorMap.of(argument, layout), *argument.shape, *argument.strides]
            elif kind != "constexpr":
                given.append(argument)
        return given


def _ptx_of(metadata: Any) -> Path:  # noqa: ANN401
    """The compiler's text of a kernel, in Triton's cache."""
    from triton.runtime.cache import get_cache_manager

    files = get_cache_manager(metadata.hash).get_group(f"{metadata.name}.json") or {}
    found = [Path(path) for name, path in files.items() if name.endswith(".ptx")]
    if len(found) != 1:
        msg = f"Triton's cache has no PTX of {metadata.name}"
        raise EmulationError(msg)
    return found[0]
