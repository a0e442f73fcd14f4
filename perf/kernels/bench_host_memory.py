"""Time copies of pages between an arena and host memory, compared with one copy of all the bytes.

python -m perf.kernels.bench_host_memory [--only out] [--peers none] [--dry-run]

Pages that are copied together lie in rows, like those of one long prompt, or they are scattered,
like those of many short prompts. One copy of all the bytes shows the rate of the bus.

Copies that overlap with a step are timed too, in both directions. The step consists of matrix
products that take about as long as the copies. It is timed in three ways: alone, with copies ahead,
and with copies that it waits for.
"""

from collections.abc import Callable

import torch

from jenga.tables.request import CopyPath
from jenga.vllm_plugin.orders.copy_rounds import CopyRound
from jenga.vllm_plugin.worker.host_memory import HostMemory
from perf.harness.timing import Benchmark, Row

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ARENA_BYTES = 8 * GIB
PAGES = {"64 KiB": 64 * KIB, "512 KiB": 512 * KIB, "2 MiB": 2 * MIB}
"""Sizes of a page: about 16 tokens of a few layers, of an 8B model, and of a larger model."""

COUNTS = (16, 512)
ROWS = {"in a row": 0, "in rows of 8": 8, "scattered": 1}
"""Number of adjacent pages in both memories. 0 means that all pages are adjacent."""


PRODUCTS = 12
"""Number of products of 8192 x 8192 matrices: about as long as copying a GB to host memory."""


def pages_in_rows(num_pages: int, count: int, row_pages: int) -> torch.Tensor:
    """Draw random rows of adjacent pages, without the null page."""
    row_pages = row_pages or count
    firsts = torch.randperm(num_pages // row_pages - 1)[: count // row_pages] + 1
    return (firsts[:, None] * row_pages + torch.arange(row_pages)).flatten()


def measure_copies(
    benchmark: Benchmark, size: str, page_bytes: int, count: int, arena_bytes: int
) -> None:
    """Add the rows of one size and number of pages."""
    num_pages = arena_bytes // page_bytes
    arena = torch.zeros(arena_bytes, dtype=torch.int8, device=benchmark.device)
    host = HostMemory(arena.device, arena_bytes)
    memory, num_bytes = host.memory, count * page_bytes
    torch.manual_seed(0)
    for name, row_pages in ROWS.items():
        here, there = (tuple(pages_in_rows(num_pages, count, row_pages).tolist()) for _ in range(2))
        for path, way in ((CopyPath.TO_HOST, "out"), (CopyPath.FROM_HOST, "back")):
            is_out = path == CopyPath.TO_HOST
            copies = CopyRound(
                small_pages_per_large_page=1,
                source_pages=here if is_out else there,
                target_pages=there if is_out else here,
                path=path,
            )
            source, target = (arena, memory) if is_out else (memory, arena)
            by_name: dict[str, Callable[[], object]] = {
                "jenga": lambda copies=copies: host.copy(arena, num_pages, copies),
                "one copy": lambda source=source, target=target: target[:num_bytes].copy_(
                    source[:num_bytes], non_blocking=True
                ),
            }
            shape = f"{way} {count} pages of {size} {name}"
            if not benchmark.wants_shape(shape):
                continue
            for implementation, launch in by_name.items():
                if implementation == "jenga" or benchmark.wants_peer(implementation):
                    benchmark.add(
                        Row(
                            shape=shape,
                            implementation=implementation,
                            timing=benchmark.measure(launch),
                            num_bytes=num_bytes,
                            details={},
                        )
                    )


def measure_beside(
    benchmark: Benchmark, size: str, page_bytes: int, count: int, arena_bytes: int, side: int
) -> None:
    """Add the rows of a step's matrix products together with copies.

    Args:
        benchmark: Benchmark to add the rows to.
        size: Text of the page size.
        page_bytes: Size of a page, in bytes.
        count: Number of pages copied.
        arena_bytes: Size of the arena, in bytes.
        side: Number of rows and columns of the matrices.
    """
    num_pages = arena_bytes // page_bytes
    arena = torch.zeros(arena_bytes, dtype=torch.int8, device=benchmark.device)
    host = HostMemory(arena.device, arena_bytes)
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=benchmark.device)
    product = torch.empty_like(matrix)
    sampled = torch.empty(16, dtype=torch.bfloat16, pin_memory=arena.is_cuda)
    torch.manual_seed(0)
    here, there = (tuple(pages_in_rows(num_pages, count, 8).tolist()) for _ in range(2))

    def step() -> None:
        for _ in range(PRODUCTS):
            torch.matmul(matrix, matrix, out=product)
        # The sampled tokens of a step are copied in the same direction as saved pages.
        sampled.copy_(product[0, :16], non_blocking=True)

    for way, path in (("out", CopyPath.TO_HOST), ("in", CopyPath.FROM_HOST)):
        copies = CopyRound(
            small_pages_per_large_page=1, source_pages=here, target_pages=there, path=path
        )

        def step_with_copies_ahead(copies: CopyRound = copies) -> None:
            host.copy_ahead(arena, num_pages, [copies])
            step()
            host.finish_ahead()

        def step_after_copies(copies: CopyRound = copies) -> None:
            host.copy(arena, num_pages, copies)
            step()

        shape = f"{way} {count} pages of {size} beside products"
        by_name: dict[str, Callable[[], object]] = {
            "jenga": step_with_copies_ahead,
            "waited for": step_after_copies,
            "products alone": step,
        }
        for implementation, launch in by_name.items():
            wants = implementation == "jenga" or benchmark.wants_peer(implementation)
            if benchmark.wants_shape(shape) and wants:
                row = Row(
                    shape=shape,
                    implementation=implementation,
                    timing=benchmark.measure(launch),
                    num_bytes=count * page_bytes,
                    details={},
                )
                benchmark.add(row)


def main(arguments: list[str] | None = None) -> None:
    tests = ["tests/vllm_plugin/caching/test_host_copies.py"]
    benchmark = Benchmark("bench_host_memory", __doc__ or "", tests, arguments)
    if benchmark.is_dry:
        measure_copies(benchmark, "1 KiB", KIB, 8, 64 * KIB)
        measure_beside(benchmark, "1 KiB", KIB, 8, 64 * KIB, 32)
    else:
        measure_beside(benchmark, "2 MiB", 2 * MIB, max(COUNTS), ARENA_BYTES, 8192)
        torch.cuda.empty_cache()
        for size, page_bytes in PAGES.items():
            for count in COUNTS:
                measure_copies(benchmark, size, page_bytes, count, ARENA_BYTES)
                torch.cuda.empty_cache()
    benchmark.finish(roofline_gigabytes_per_second=None)


if __name__ == "__main__":
    main()
