"""Compile and count the kernels of launches as on an H200, without one. They may be vLLM's too."""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

from perf.harness.machine_code import NUM_PROCESSORS, MachineCode, count, loaded_bytes, take_apart

CAPABILITY = 90
NAME = "NVIDIA H200"
REGISTERS = 65536
SHARED_BYTES = 228 << 10
MAX_WARPS = 64
MAX_PROGRAMS = 32
"""Limits of an H200's compute capability and of one of its processors (SMs).

The source is the CUDA programming guide.
"""

TILE_WIDTH = 44
"""Characters of a column for tiles."""

TILE_NAME = re.compile(r"BLOCK_(SIZE_)?")
"""Beginning of the names of constants that are sizes of blocks, in our kernels and vLLM's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A kernel that a launch compiled.

    Attributes:
        name: Name of the kernel.
        num_warps: Number of warps of a program.
        shared_bytes: Shared memory of a program, in bytes.
        code: The compiled instructions and resources.
        num_programs: Number of programs of the launch.
        constants: Argument -> integer that the kernel was compiled for, fields of groups included.
    """

    name: str
    num_warps: int
    shared_bytes: int
    code: MachineCode
    num_programs: int
    constants: dict[str, int]

    @property
    def programs_per_processor(self) -> int:
        """Number of programs that a processor holds, by registers, shared memory and warps."""
        registers = -(-self.code.registers // 8) * 8 * 32 * self.num_warps
        shared = self.shared_bytes + 1024
        return min(
            MAX_PROGRAMS,
            MAX_WARPS // self.num_warps,
            REGISTERS // registers,
            SHARED_BYTES // shared,
        )

    @property
    def tile(self) -> str:
        """Sizes of the kernel's blocks and its warps, such as `M16 N64 D128, 4 warps`."""
        sizes = (
            f"{TILE_NAME.sub('', name)}{size}"
            for name, size in self.constants.items()
            if TILE_NAME.match(name) and not isinstance(size, bool)
        )
        warps = "1 warp" if self.num_warps == 1 else f"{self.num_warps} warps"
        return ", ".join(filter(None, (" ".join(sizes), warps)))

    @property
    def body(self) -> tuple[str, ...]:
        """Instructions of the loop over keys, or of the whole kernel if it has no such loop.

        A main loop that loads less than 1/16 of the kernel's bytes does not count as such a loop.
        """
        loop = self.code.main_loop
        return (
            loop
            if loaded_bytes(loop) >= loaded_bytes(self.code.instructions) / 16
            else (self.code.instructions)
        )

    @property
    def read_kib(self) -> float:
        """KiB that one program loads in one pass of the body."""
        return loaded_bytes(self.body) * 32 * self.num_warps / 1024

    @property
    def per_kib(self) -> float:
        """Instructions that all warps of a program issue for each KiB loaded in the body."""
        return len(self.body) * self.num_warps / self.read_kib


def named_integers(
    constants: Mapping[tuple[int, ...], object], names: Sequence[str]
) -> dict[str, int]:
    """Return the integers for which a kernel was compiled, by argument or field of a group.

    Args:
        constants: Path of a constant, as Triton has it -> value. A group of constants has the path
            of its parameter, and a constant field of another group has a longer path.
        names: Names of the kernel's parameters.
    """
    found: dict[str, object] = {}
    for path, value in constants.items():
        if hasattr(value, "_asdict"):
            found |= value._asdict()
        elif len(path) == 1:
            found[names[path[0]]] = value
    return {name: value for name, value in found.items() if isinstance(value, int)}


def kinds(instructions: tuple[str, ...]) -> str:
    """Format the number of instructions of each kind, the most frequent first."""
    return "  ".join(f"{kind} {number}" for kind, number in count(instructions).most_common())


def show_vllm_a_gpu() -> None:
    """Let vLLM's CPU build define its Triton kernels and choose their tiles as on an H200."""
    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda _text: False
    # The GPU build has operations that its platform description and its layers load. The CPU
    # build's `_C` requires AVX-512: on other CPUs loading it ends the process.
    for name in ("vllm._C", "vllm._C_stable_libtorch"):
        sys.modules[name] = ModuleType(name)
    attention = ModuleType("vllm.vllm_flash_attn")
    attention.__getattr__ = lambda _name: None
    sys.modules[attention.__name__] = attention
    from vllm import _custom_ops

    for name in dir(_custom_ops):
        if name.startswith("cutlass_scaled_mm_supports"):
            setattr(_custom_ops, name, lambda _capability: False)
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import platform_utils

    class H200(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:  # noqa: ARG003
            return DeviceCapability(*divmod(CAPABILITY, 10))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
            return NAME

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    platforms._current_platform = H200()
    platform_utils.is_pin_memory_available.cache_clear()
    # vLLM's kernels of the gated delta rule ask PyTorch for the GPU's properties.
    torch.cuda.get_device_name = lambda _device=0: NAME
    torch.cuda.get_device_capability = lambda _device=0: divmod(CAPABILITY, 10)
    torch.cuda.get_device_properties = lambda _device=0: SimpleNamespace(
        name=NAME, multi_processor_count=NUM_PROCESSORS
    )


def compiled_by(
    prepare: Callable[[], Callable[[], object]],
    cost: Callable[[Counted], float] = lambda kernel: len(kernel.code.instructions),
) -> list[Counted]:
    """Return the kernels that a launch and its preparation would run.

    Args:
        prepare: Function that prepares and returns the launch.
        cost: Function that replaces timing in autotuning. Among the tiles without register spills,
            those with the least cost are chosen.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    found: dict[int, Counted] = {}
    run, bench, on_disk = JITFunction.run, Autotuner._bench, Autotuner.check_disk_cache

    def compile_only(self: JITFunction, *args: object, **kwargs: object) -> object:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        grid = kwargs["grid"]
        if callable(grid):
            grid = grid(dict(zip(self.arg_names, args, strict=False)) | kwargs)
        found[id(kernel)] = Counted(
            name=kernel.metadata.name,
            num_warps=kernel.metadata.num_warps,
            shared_bytes=kernel.metadata.shared,
            code=take_apart(kernel.asm["cubin"]),
            num_programs=math.prod(grid),
            constants=named_integers(kernel.src.constants, kernel.src.fn.arg_names),
        )
        return kernel

    def count_instead(
        self: Autotuner, *args: object, config: object, **meta: object
    ) -> list[float]:
        kernel = self.fn.run(*args, **(meta | config.all_kwargs()))
        counted = found.pop(id(kernel))
        return [cost(counted) if counted.code.stack_bytes == 0 else math.inf]

    def forget(_self: Autotuner, _key: object, _configs: object, bench: Callable[[], None]) -> bool:
        # On a machine with a GPU, costs stored on disk would later be taken for measured times.
        bench()
        return False

    JITFunction.run, Autotuner._bench, Autotuner.check_disk_cache = (
        compile_only,
        count_instead,
        forget,
    )
    try:
        prepare()()
    finally:
        JITFunction.run, Autotuner._bench, Autotuner.check_disk_cache = run, bench, on_disk
    return list(found.values())
