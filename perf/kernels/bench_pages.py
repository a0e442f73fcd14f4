"""Time copying and clearing of whole pages, and merging of attention, compared with plain PyTorch.

python -m perf.kernels.bench_pages [--only copy] [--peers none] [--dry-run]
"""

from collections.abc import Callable

import torch

from jenga_kernels.attention.attention_merge import attention_merge
from jenga_kernels.pages.page_clear import page_clear
from jenga_kernels.pages.page_copy import page_copy
from jenga_kernels.reference.attention import attention_merge as merge_reference
from perf.harness.timing import Benchmark, Row, read_roofline

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ARENA_BYTES = 16 * GIB
PAGES = {"64 KiB": 64 * KIB, "2 MiB": 2 * MIB, "32 MiB": 32 * MIB}
"""Sizes of a page: about a small page of one layer, one of a whole model, and a model's states."""

COUNTS = (1, 16, 128)
MERGED = {"32 queries": 32, "8192 queries": 8192}
NUM_HEADS, HEAD_DIM = 32, 128


def measure_pages(
    benchmark: Benchmark, size: str, page_bytes: int, count: int, arena_bytes: int
) -> None:
    """Add the rows of one size and number of pages."""
    num_pages = arena_bytes // page_bytes
    pages = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=benchmark.device)
    torch.manual_seed(0)
    order = torch.randperm(num_pages)[: 2 * count].to(benchmark.device)
    sources, targets = order[:count].contiguous(), order[count:].contiguous()
    launches: dict[str, dict[str, Callable[[], object]]] = {
        "copy": {
            "jenga": lambda: page_copy(pages, sources, targets),
            "torch": lambda: pages.index_copy_(0, targets, pages.index_select(0, sources)),
        },
        "clear": {
            "jenga": lambda: page_clear(pages, targets),
            "torch": lambda: pages.index_fill_(0, targets, 0),
        },
    }
    for operation, by_name in launches.items():
        shape = f"{operation} {count} pages of {size}"
        moved = (2 if operation == "copy" else 1) * count * page_bytes
        _measure(benchmark, shape, by_name, num_bytes=moved)


def measure_merge(benchmark: Benchmark, label: str, num_tokens: int) -> None:
    """Add the rows of one number of queries."""
    device = benchmark.device
    first, second = torch.randn(2, num_tokens, NUM_HEADS, HEAD_DIM, device=device).bfloat16()
    lses = torch.randn(2, num_tokens, NUM_HEADS, device=device)
    out = torch.empty_like(first)
    by_name: dict[str, Callable[[], object]] = {
        "jenga": lambda: attention_merge(first, lses[0], second, lses[1], out=out),
        "torch": lambda: merge_reference.attention_merge(first, lses[0], second, lses[1], out=out),
    }
    moved = 3 * first.numel() * 2 + 2 * lses[0].numel() * 4
    _measure(benchmark, f"merge {label}", by_name, num_bytes=moved)


def _measure(
    benchmark: Benchmark, shape: str, by_name: dict[str, Callable[[], object]], *, num_bytes: int
) -> None:
    if not benchmark.wants_shape(shape):
        return
    for name, launch in by_name.items():
        if name == "jenga" or benchmark.wants_peer(name):
            timing = benchmark.measure(launch)
            benchmark.add(
                Row(
                    shape=shape,
                    implementation=name,
                    timing=timing,
                    num_bytes=num_bytes,
                    details={},
                )
            )


def main(arguments: list[str] | None = None) -> None:
    tests = ["tests/kernels/pages/test_pages.py", "tests/kernels/attention/test_attention_merge.py"]
    benchmark = Benchmark("bench_pages", __doc__ or "", tests, arguments)
    if benchmark.is_dry:
        measure_pages(benchmark, "1 KiB", KIB, 2, 16 * KIB)
        measure_merge(benchmark, "4 queries", 4)
    else:
        for size, page_bytes in PAGES.items():
            for count in COUNTS:
                measure_pages(benchmark, size, page_bytes, count, ARENA_BYTES)
                torch.cuda.empty_cache()
        for label, num_tokens in MERGED.items():
            measure_merge(benchmark, label, num_tokens)
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
