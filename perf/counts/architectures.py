"""Compile our kernels for each kind of GPU, and check that they fit it. No GPU is needed.

    python -m perf.counts.architectures [--only D] [--gpus 89 120] [--out FILE]

For each compute capability and each shape, the kernels of a launch are compiled by the installed
Triton. A row has their registers, the bytes that they spill, and their shared memory beside the
limit of that GPU. A kernel with too much shared memory cannot be launched. A kernel that spills
can, but it is slow. Nothing runs, so the rows say nothing about results or speed.

Rows are appended to `--out` as they are made. Rows of the same commit that are already there are
not made again.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from perf.harness.machine import commit_of
from perf.harness.machine_code import SHARED_BYTES, PretendedGpu, resources

OUT = Path(__file__).parents[1] / "results" / "cpu" / "architectures.jsonl"

HOPPER = 90

GPUS = {
    80: "A100",
    89: "L4, L40S, RTX 40",
    90: "H100, H200",
    100: "B200, GB200",
    120: "RTX 50, RTX PRO 6000",
}
"""Compute capability, times ten -> GPUs that have it. Source: NVIDIA, CUDA GPU Compute Capability.
"""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A compiled kernel.

    Attributes:
        name: Name of the kernel.
        registers: Number of registers of a thread.
        stack_bytes: Bytes that a thread spills.
        shared_bytes: Shared memory of a program, in bytes.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def launches(capability: int) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Yield the name of each shape, and the function that prepares our launch.

    Args:
        capability: Compute capability, times ten. Hopper also has specialised kernels.
    """
    from perf.counts import prompt_counts, static_counts

    for shape, owner, prepare in static_counts.launches():
        if owner == "jenga":
            yield shape, prepare
        elif owner == "specialized" and capability == HOPPER:
            yield f"{shape}, specialised", prepare
    for prompt in (*prompt_counts.launches(), *prompt_counts.delta_plans()):
        if prompt.owner == "jenga":
            yield prompt.name, prompt.prepare


def fitted_by(prepare: Callable[[], Callable[[], object]]) -> list[Fitted]:
    """Compile the kernels of a launch and its preparation for the active driver's GPU.

    Args:
        prepare: Function that prepares and returns the launch.
    """
    from triton.runtime.jit import JITFunction

    found: dict[int, Fitted] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, **kwargs: object) -> object:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        if id(kernel) not in found:
            registers, stack_bytes = resources(kernel.asm["cubin"])
            found[id(kernel)] = Fitted(
                name=kernel.metadata.name,
                registers=registers,
                stack_bytes=stack_bytes,
                shared_bytes=kernel.metadata.shared,
            )
        return kernel

    JITFunction.run = compile_only
    try:
        prepare()()
    finally:
        JITFunction.run = run
    return list(found.values())


def as_row(capability: int, shape: str, kernels: Sequence[Fitted]) -> Row:
    """Summarise the kernels of a shape in a row.

    Args:
        capability: Compute capability, times ten.
        shape: Name of the shape.
        kernels: The kernels.
    """
    limit_bytes = SHARED_BYTES[capability]
    return {
        "capability": capability,
        "shape": shape,
        "kernels": sorted({each.name for each in kernels}),
        "registers": max((each.registers for each in kernels), default=0),
        "shared_bytes": max((each.shared_bytes for each in kernels), default=0),
        "shared_limit_bytes": limit_bytes,
        "spilled_bytes": {each.name: each.stack_bytes for each in kernels if each.stack_bytes},
        "too_large": sorted({each.name for each in kernels if each.shared_bytes > limit_bytes}),
    }


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file. A file that does not exist has none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def newest(rows: Sequence[Row]) -> list[Row]:
    """Return the last row of each compute capability and shape."""
    return list({(row["capability"], row["shape"]): row for row in rows}.values())


def compile_for(capability: int, only: str, path: Path) -> None:
    """Add the missing rows of a compute capability to a file.

    Triton and our choice of tiles keep the first GPU that they see, so each one needs a process.

    Args:
        capability: Compute capability, times ten.
        only: Beginning of the shapes' names.
        path: The file.
    """
    from triton.runtime import driver

    driver.set_active(PretendedGpu(capability))
    common = {"commit": commit_of(), "triton": version("triton"), "torch": version("torch")}
    known = {
        row["shape"]
        for row in read_rows(path)
        if row["capability"] == capability and row["commit"] == common["commit"]
    }
    for shape, prepare in launches(capability):
        if shape in known or not shape.startswith(only):
            continue
        try:
            row = as_row(capability, shape, fitted_by(prepare))
        except ValueError as error:
            # An operation refuses what the GPU does not have, such as float8 before 8.9.
            row = {"capability": capability, "shape": shape, "refused": str(error)[:200]}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | common) + "\n")
        print(describe(row), flush=True)


def describe(row: Row) -> str:
    """Format a row in a line."""
    begin = f"{row['capability'] / 10:4.1f}  {row['shape'][:44]:44}"
    if "refused" in row:
        return f"{begin}  refused: {row['refused']}"
    spilled = "".join(f"; {name} spills {n} B" for name, n in row["spilled_bytes"].items())
    too_large = "".join(f"; {name} does not fit" for name in row["too_large"])
    kib, limit_kib = (row[name] / 1024 for name in ("shared_bytes", "shared_limit_bytes"))
    needed = f"{row['registers']:3} registers, {kib:.0f} of {limit_kib:.0f} KiB"
    return f"{begin}  {needed}{spilled}{too_large}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.counts.architectures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", default="", help="compile only shapes whose name begins with this text"
    )
    parser.add_argument(
        "--gpus",
        nargs="+",
        type=int,
        choices=GPUS,
        default=list(GPUS),
        metavar="CAPABILITY",
        help="compute capabilities, times ten (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help="file to which rows are added"
    )
    options = parser.parse_args(arguments)
    for capability in options.gpus:
        child = get_context("spawn").Process(
            target=compile_for, args=(capability, options.only, options.out)
        )
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(child.exitcode)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
