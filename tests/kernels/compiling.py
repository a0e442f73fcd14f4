"""Compile, on a machine without a GPU, exactly what the operations would launch on one.

A job is a function that calls public operations on CPU tensors. It runs in a process of its own
(the interpreter is off there) where launches compile for the given GPU and are recorded.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from perf.machine_code import PretendedGpu, count, take_apart

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "wgmma_of_registers": r"\bwgmma\.mma_async[^;]*?\}, \{",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "load_128": r"\bld\.global[.\w]*\.v4\.b32|\bld\.global[.\w]*\.v2\.b64|\bcp\.async\.c[ag]"
    r"\.shared\.global \[[^;]*?, 0x10",
    "load_64": r"\bld\.global[.\w]*\.v2\.b32",
    "store_128": r"\bst\.global[.\w]*\.v4\.b32|\bst\.global[.\w]*\.v2\.b64",
    "load_global": r"\bld\.global",
    "store_global": r"\bst\.global",
    "cp_async": r"\bcp\.async\.c[ag]",
    "cp_async_ahead": r"\bcp\.async\.wait_group\s+[1-9]",
    "tma": r"\bcp\.async\.bulk\.tensor",
    "load_shared_byte": r"\bld\.shared\.[bsu]8\b",
    "half_to_bfloat": r"\bcvt\.rn\.bf16\.f16\b",
}
"""Names of counts -> what they count in PTX."""


TRITON_OF_LIMITS = "3.7."
"""The Triton whose registers and instructions the tests limit; others compile to something else."""

MAX_STACK_BYTES = 128
"""What a kernel may spill with another Triton: a few values."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel."""

    name: str
    capability: int
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    grid: tuple[int, ...]
    counts: dict[str, int]
    loop_counts: dict[str, int]
    """Instructions of the main loop by kind; see `perf.machine_code`."""

    @property
    def loop_instructions(self) -> int:
        """Instructions of the main loop."""
        return sum(self.loop_counts.values())


def compile_job(job: Callable[[], None], *capabilities: int) -> list[Compiled]:
    """Run a module-level function in the compiling process, for each compute capability.

    With another Triton than the limits are stated for, no kernel may spill much, and nothing else
    is looked at.
    """
    results: list[Compiled] = []
    root = Path(__file__).parents[2]
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    # Libraries may come from that path. Some of a job's tensors would lie on a GPU if it saw one.
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    for capability in capabilities:
        command = [sys.executable, "-m", "tests.kernels.compiling"]
        command += [job.__module__, job.__name__, str(capability)]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout.splitlines()[-1])
        results += [Compiled(**row | {"grid": tuple(row["grid"])}) for row in rows]
    assert results, f"{job.__name__} launched nothing"
    if not version("triton").startswith(TRITON_OF_LIMITS):
        most = max(results, key=lambda kernel: (kernel.stack_bytes, kernel.registers))
        assert most.stack_bytes <= MAX_STACK_BYTES, most
        pytest.skip(f"compiles; limits are for Triton {TRITON_OF_LIMITS}x: at most {most}")
    return results


def _main(module: str, function: str, capability: int) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(PretendedGpu(capability))
    compiled: dict[int, tuple[object, tuple[int, ...]]] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, **kwargs: object) -> object:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        grid = kwargs["grid"]
        assert 0 < grid[0] < 2**31, grid
        assert all(0 < programs < 2**16 for programs in grid[1:]), grid
        compiled[id(kernel)] = (kernel, grid)
        return kernel

    JITFunction.run = compile_only
    getattr(importlib.import_module(module), function)()
    rows = []
    for kernel, grid in compiled.values():
        code = take_apart(kernel.asm["cubin"])
        counts = {
            name: len(re.findall(text, kernel.asm["ptx"])) for name, text in INSTRUCTIONS.items()
        }
        row = Compiled(
            name=kernel.metadata.name,
            capability=capability,
            num_warps=kernel.metadata.num_warps,
            registers=code.registers,
            stack_bytes=code.stack_bytes,
            shared_bytes=kernel.metadata.shared,
            grid=grid,
            counts=counts,
            loop_counts=dict(count(code.main_loop)),
        )
        rows.append(asdict(row))
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
