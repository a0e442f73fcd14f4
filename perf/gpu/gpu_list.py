"""Run benchmarks in one process, the most informative ones first, until the time is over.

python -m perf.gpu.gpu_list --seconds 200 --results OUT [LIST]

A line of LIST names a benchmark, parts of its shapes' names, and peers. In a part, "$" stands for
the end of the name:

    bench_paged_attention; D13 |X1 ; vllm-triton,flash-attention-3

Without LIST, the list is `BEHIND`. In a short session on a GPU, Python, torch and vLLM should start
only once, because this takes 15 seconds. No tests run here: `perf.gpu.gpu_session --brief` runs
them before.
"""

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perf.harness.machine import module_of
from perf.harness.timing import Benchmark

TIME_IS_UP = 2
"""Exit status if some items of a list were not begun."""

BEHIND = """
roofline; read|copy; none
bench_delta; 80b-a3b f32 1x2048$|80b-a3b f32 4x2048; jenga-plain,jenga-ahead,vllm,flashinfer
bench_delta; 80b-a3b f32 1x8192|80b-a3b f32 16 odd; jenga-plain,jenga-ahead,vllm,flashinfer
bench_delta; 48b-a3b f32 1x2048$|48b-a3b f32 16 odd; jenga-plain,vllm
bench_delta; tp2 f32 1x8192|80b-a3b bf16 4x2048; jenga-plain,jenga-ahead
bench_state_scan; falcon-h1-7b 1x2048$|granite-4.0-h-small tp4 1x2048; vllm
bench_paged_attention; D10 |D11 |P4 ; flashinfer
bench_linear_attention; 8192; none
bench_host_memory; ; all
bench_state_replay; b8; vllm
bench_paged_attention; P1 |P7 |X1 ; flash-attention-3
"""
"""Default list.

It has the shapes that changed since a GPU timed them, those on which a GPU found us slower than a
peer, and those that no GPU has timed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of a list.

    Attributes:
        benchmark: Name of the benchmark's module in `perf`.
        shapes: Parts of shapes' names. A part that ends with "$" must be the end of the name, and
            "" is in every name.
        peers: Value of the benchmark's `--peers`.
    """

    benchmark: str
    shapes: tuple[str, ...]
    peers: str

    def wants(self, name: str) -> bool:
        """Whether a shape belongs to this item."""
        return any(
            name.endswith(part[:-1]) if part.endswith("$") else part in name for part in self.shapes
        )


def read_list(text: str) -> list[Item]:
    """Parse the lines of a list.

    Raises:
        ValueError: A line does not have three fields.
    """
    items: list[Item] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = line.split(";")
        if len(fields) != 3:
            msg = f"a line must be 'benchmark; shapes; peers', got {line!r}"
            raise ValueError(msg)
        # A part may end in a blank, so that "D1 " does not match D13.
        shapes = tuple(fields[1].removeprefix(" ").split("|"))
        items.append(Item(benchmark=fields[0].strip(), shapes=shapes, peers=fields[2].strip()))
    return items


def run(
    items: Sequence[Item], results: Path, *, seconds: float, is_dry: bool = False
) -> tuple[int, int]:
    """Run items in order, and print the names of those for which no time is left.

    Returns:
        Number of items that failed, and number of items for which no time was left.

    Raises:
        SystemExit: A benchmark made the GPU unusable for this process.
    """
    started = time.monotonic()
    num_failed = num_left = 0
    wants_shape = Benchmark.wants_shape
    try:
        for item in items:
            left = seconds - (time.monotonic() - started)
            if left <= 0:
                print(f"no time for {item.benchmark} {'|'.join(item.shapes)}", flush=True)
                num_left += 1
                continue
            deadline = started + seconds

            def wants(
                benchmark: Benchmark, name: str, item: Item = item, deadline: float = deadline
            ) -> bool:
                is_wanted = benchmark.is_dry or item.wants(name)
                return is_wanted and time.monotonic() < deadline

            Benchmark.wants_shape = wants  # pyright: ignore[reportAttributeAccessIssue]
            arguments = ["--skip-tests", "--results", str(results), "--peers", item.peers]
            try:
                module = importlib.import_module(module_of(item.benchmark))
                module.main(arguments + ["--dry-run"] * is_dry)
            except Exception:  # the other benchmarks should still run
                traceback.print_exc()
                num_failed += 1
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        Benchmark.wants_shape = wants_shape
    return num_failed, num_left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a list from the command line.

    Returns:
        0, 1 if a benchmark failed, or `TIME_IS_UP` if some items were not begun.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.gpu_list",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "list", nargs="?", type=Path, help="file of the list (default: the built-in list)"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="begin no shape after this number of seconds"
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of the rows")
    parser.add_argument(
        "--dry-run", action="store_true", help="run tiny shapes, and drop their rows"
    )
    options = parser.parse_args(arguments)
    text = BEHIND if options.list is None else options.list.read_text()
    items = read_list(text)
    num_failed, num_left = run(
        items, options.results, seconds=options.seconds, is_dry=options.dry_run
    )
    if num_failed:
        return 1
    return TIME_IS_UP if num_left else 0


if __name__ == "__main__":
    sys.exit(main())
