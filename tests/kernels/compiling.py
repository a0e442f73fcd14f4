"""Compile, on a machine without a GPU, exactly what the operations would launch on one.

A job is a function that calls public operations on CPU tensors. It runs in a process that serves
all jobs for a GPU (the interpreter is off there), where launches compile for it and are recorded.
"""

import atexit
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from perf.harness.machine_code import PretendedGpu, beside_products, count, take_apart

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "wgmma_of_registers": r"\bwgmma\.mma_async[^;]*?\}, \{",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "load_128": r"\bld\.global[.\w]*\.v4\.b32|\bld\.global[.\w]*\.v2\.b64|\bcp\.async\.c[ag]"
    r"\.shared\.global \[[^;]*?, 0x10",
    "load_64": r"\bld\.global[.\w]*\.v2\.b32",
    "store_128": r"\bst\.global[.\w]*\.v4\.b32|\bst\.global[.\w]*\.v2\.b64",
    "store_64": r"\bst\.global[.\w]*\.v2\.b32",
    "load_global": r"\bld\.global",
    "store_global": r"\bst\.global",
    "cp_async": r"\bcp\.async\.c[ag]",
    "cp_async_ahead": r"\bcp\.async\.wait_group\s+[1-9]",
    "tma": r"\bcp\.async\.bulk\.tensor",
    "load_shared_byte": r"\bld\.shared\.[bsu]8\b",
    "half_to_bfloat": r"\bcvt\.rn\.bf16\.f16\b",
    "await_kernel_before": r"\bgriddepcontrol\.wait",
    "let_next_begin": r"\bgriddepcontrol\.launch_dependents",
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
    """Instructions of the main loop by kind; see `perf.harness.machine_code`."""
    beside_products: dict[str, int]
    """Those of them that run while its last asynchronous products do."""
    num_lost_descriptors: int
    """Products that the assembler has made read anything: see `perf.harness.machine_code`."""

    @property
    def loop_instructions(self) -> int:
        """Instructions of the main loop."""
        return sum(self.loop_counts.values())


class Compiler:
    """A process that compiles for one compute capability, and stays for the next job."""

    def __init__(self, capability: int) -> None:
        root = Path(__file__).parents[2]
        kept = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
        # Libraries may come from that path. Some of a job's tensors lie on a GPU if it sees one.
        path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        kept |= {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compiling", str(capability)],
            cwd=root,
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def ask(self, job: Callable[[], None]) -> dict[str, object]:
        """The rows of a job, or its error."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{job.__module__} {job.__name__}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the compiling process has ended"}


@functools.cache
def compiler_for(capability: int) -> Compiler:
    """The process for a compute capability, in the environment of when it was first asked."""
    return Compiler(capability)


def compile_job(job: Callable[[], None], *capabilities: int) -> list[Compiled]:
    """Run a module-level function in a compiling process, for each compute capability.

    With another Triton than the limits are stated for, no kernel may spill much, and nothing else
    is looked at.
    """
    results: list[Compiled] = []
    for capability in capabilities:
        answer = compiler_for(capability).ask(job)
        assert "error" not in answer, answer["error"]
        results += [Compiled(**row | {"grid": tuple(row["grid"])}) for row in answer["rows"]]
    assert results, f"{job.__name__} launched nothing"
    assert not any(kernel.num_lost_descriptors for kernel in results), results
    if not version("triton").startswith(TRITON_OF_LIMITS):
        most = max(results, key=lambda kernel: (kernel.stack_bytes, kernel.registers))
        assert most.stack_bytes <= MAX_STACK_BYTES, most
        pytest.skip(f"compiles; limits are for Triton {TRITON_OF_LIMITS}x: at most {most}")
    return results


def _answer(module: str, function: str, capability: int) -> list[dict[str, object]]:
    """Run a job and say what each kernel that it launched consists of."""
    from triton.runtime.jit import JITFunction

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
    try:
        getattr(importlib.import_module(module), function)()
    finally:
        JITFunction.run = run
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
            beside_products=dict(count(beside_products(code.main_loop))),
            num_lost_descriptors=code.num_lost_descriptors,
        )
        rows.append(asdict(row))
    return rows


def _main(capability: int) -> None:
    """Answer jobs, a line each; whatever they print themselves goes where errors go."""
    from triton.runtime import driver

    answers, sys.stdout = sys.stdout, sys.stderr
    driver.set_active(PretendedGpu(capability))
    for line in sys.stdin:
        try:
            answer = {"rows": _answer(*line.split(), capability)}
        except Exception:  # the test that asked shall show it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
