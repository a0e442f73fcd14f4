"""Count the memory accesses of our kernels and vLLM's Triton kernels in an emulated H200.

python -m perf.counts.emulated_traffic [--only D] [--peers none] [--save FOLDER]

The PTX for compute capability 9.0 runs on shapes that are cut to few requests. The program counts
sectors of global memory and turns at the banks of shared memory. The counts show how a kernel uses
the memory system, not how fast it is.
"""

import argparse
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

from perf.counts.static_counts import HELPERS, launches
from perf.emulator.driver import EmulatedGpu
from perf.emulator.memory.counters import Counters
from perf.harness.compiled_launches import CAPABILITY, show_vllm_a_gpu

MAX_REQUESTS = 4
MAX_TOKENS = 2048
MAX_QUERIES = 256
"""Limits that shapes are cut to.

A program should go through several tiles, and the table should take only minutes.
"""

HEADER = f"""\
{"shape":38} {"kernel of":11} {"kernel":30} {"KiB":>7} {"moved":>6} {"again":>6} \
{"stored":>6} {"banks":>6} {"per KiB":>7}"""

LEGEND = (
    "KiB of different sectors that a launch loads; bytes moved for each byte that is asked for;",
    "how often a sector is asked for; bytes moved for each byte stored; turns at the banks of",
    "shared memory for each that is needed; instructions of PTX by warps for each KiB",
)


def line(shape: str, owner: str, name: str, counters: Counters) -> str:
    """Format a row of the table."""
    loads, stores, shared = counters.loads, counters.stores, counters.shared
    kib = loads.distinct_bytes / 1024

    def ratio(part: float, whole: float) -> str:
        return f"{part / whole:.2f}" if whole else "-"

    return (
        f"{shape[:38]:38} {owner:11} {name[:30]:30} {kib:7.0f} "
        f"{ratio(loads.moved_bytes, loads.asked_bytes):>6} "
        f"{ratio(loads.moved_bytes, loads.distinct_bytes):>6} "
        f"{ratio(stores.moved_bytes, stores.asked_bytes):>6} "
        f"{ratio(shared.taken, shared.needed):>6} {counters.instructions / max(kib, 1):7.0f}"
    )


def counted(gpu: EmulatedGpu, prepare: Callable[[], Callable[[], object]]) -> dict[str, Counters]:
    """Return the counters of a launch's kernels by name, without the kernels that prepare it."""
    launch = prepare()
    gpu.counters.clear()
    launch()
    return dict(gpu.counters)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.counts.emulated_traffic", description=__doc__
    )
    parser.add_argument(
        "--only", default="", help="count only shapes whose name begins with this text"
    )
    parser.add_argument(
        "--peers",
        choices=("vllm", "none"),
        default="vllm",
        help="implementations to compare with (default: %(default)s)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="write the table to this folder"
    )
    options = parser.parse_args(arguments)
    from triton.runtime import driver

    gpu = EmulatedGpu(CAPABILITY, counts=True)
    driver.set_active(gpu)
    if options.peers == "vllm":
        show_vllm_a_gpu()
    versions = {name: importlib.metadata.version(name) for name in ("triton", "torch")}
    lines = [
        f"Counted in an emulated GPU, nothing timed: compute capability 9.0, {versions}",
        f"{MAX_REQUESTS} requests of {MAX_TOKENS} tokens and {MAX_QUERIES} queries at most",
        *LEGEND,
        "",
        HEADER,
    ]
    print("\n".join(lines), flush=True)
    for shape, owner, prepare in launches(MAX_TOKENS, MAX_QUERIES, MAX_REQUESTS):
        if not shape.startswith(options.only) or (owner == "vllm" and options.peers == "none"):
            continue
        try:
            kernels = counted(gpu, prepare)
        except Exception as error:  # a peer that fails must not end the run
            if owner == "jenga":
                raise
            print(f"  {shape}: no {owner}: {str(error)[:200]}", flush=True)
            continue
        for name, counters in kernels.items():
            if name not in HELPERS:
                lines.append(line(shape, owner, name, counters))
                print(lines[-1], flush=True)
    if options.save:
        text = "\n".join(["# What kernels ask of memory, not speed", "", "```", *lines, "```", ""])
        (options.save / "emulated_traffic.md").write_text(text)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # With an empty value, vLLM assumes a GPU machine that hides its GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
