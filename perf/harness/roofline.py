# ruff: noqa: ANN001, ANN202, N803, PLR0917 - kernels are not Python functions
"""Measure the memory bandwidth of a GPU: reading, copying, and reading runs scattered over pages.

python -m perf.harness.roofline [--only read] [--dry-run]

The rows "hop R every H over P" read runs of R bytes in random order. There is one run in every H
bytes of a pool of P bytes. This is the access pattern of a paged layer whose part of a page is R
bytes long.
"""

import torch
import triton
import triton.language as tl

from perf.harness.timing import Benchmark, Row, Timing

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
READ_BYTES = 2 * GIB
RUNS = (256, KIB, 4 * KIB, 8 * KIB, 64 * KIB)
HOPS = (64 * KIB, 2 * MIB, 32 * MIB)
POOLS = (GIB, 10 * GIB, 100 * GIB)
MAX_HOP_READ_BYTES = GIB
WORD_BYTES = 4
BLOCK_WORDS = 4096
MATMUL_SIZE = 8192


@triton.jit
def _read_kernel(
    sums_ptr,  # i32[num_programs]
    words_ptr,  # i32[num_words]
    num_words: tl.int64,
    BLOCK: tl.constexpr,
):
    """Sum blocks of words. Program p takes every num_programs-th block, beginning with block p."""
    total = tl.full([BLOCK], 0, tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for offset in range(start, num_words, step):
        words = offset + tl.arange(0, BLOCK)
        total += tl.load(words_ptr + words, mask=words < num_words, other=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _hop_kernel(
    sums_ptr,  # i32[num_programs]
    words_ptr,  # i32[pool]
    pages_ptr,  # i32[num_runs]
    num_runs,
    stride_page: tl.int64,
    RUN: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
):
    """Sum the first RUN words of pages. Program p takes every num_programs-th group of pages."""
    total = tl.full([BLOCK_RUNS, RUN], 0, tl.int32)
    for start in range(tl.program_id(0) * BLOCK_RUNS, num_runs, tl.num_programs(0) * BLOCK_RUNS):
        runs = start + tl.arange(0, BLOCK_RUNS)
        live = runs < num_runs
        pages = tl.load(pages_ptr + runs, mask=live, other=0).to(tl.int64)
        offsets = (pages * stride_page)[:, None] + tl.arange(0, RUN)[None, :]
        total += tl.load(words_ptr + offsets, mask=live[:, None], other=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def measure_plain(benchmark: Benchmark, num_bytes: int, num_programs: int) -> None:
    """Add the rows "read" and "copy"."""
    words = torch.ones(num_bytes // WORD_BYTES, dtype=torch.int32, device=benchmark.device)
    sums = torch.zeros(num_programs, dtype=torch.int32, device=benchmark.device)

    def read() -> None:
        _read_kernel[(num_programs,)](
            sums_ptr=sums, words_ptr=words, num_words=words.numel(), BLOCK=BLOCK_WORDS, num_warps=8
        )

    if benchmark.wants_shape("read"):
        timing = benchmark.measure(read)
        if sums.sum().item() != words.numel():
            msg = "the read kernel skipped words"
            raise RuntimeError(msg)
        benchmark.add(_row("read", timing, num_bytes))
    if benchmark.wants_shape("copy"):
        target = torch.empty_like(words)
        timing = benchmark.measure(lambda: target.copy_(words))
        benchmark.add(_row("copy", timing, 2 * num_bytes))


def measure_matmul(benchmark: Benchmark, size: int) -> None:
    """Add the row "matmul": torch's product of two square bfloat16 matrices."""
    if not benchmark.wants_shape("matmul"):
        return
    # With ones or zeros a GPU would draw less power, and clock higher, than with random numbers.
    left, right = torch.randn(2, size, size, device=benchmark.device).bfloat16()
    out = torch.empty_like(left)
    timing = benchmark.measure(lambda: torch.matmul(left, right, out=out))
    num_bytes = 3 * size * size * left.element_size()
    benchmark.add(_row("matmul", timing, num_bytes, num_flops=2 * size**3))


def measure_hops(
    benchmark: Benchmark, run_bytes: int, hop_bytes: int, pool_bytes: int, num_programs: int
) -> None:
    """Add the row of one run length, distance between runs, and pool size."""
    name = f"hop {_size(run_bytes)} every {_size(hop_bytes)} over {_size(pool_bytes)}"
    if run_bytes > hop_bytes or not benchmark.wants_shape(name):
        return
    try:
        pool = torch.zeros(pool_bytes // WORD_BYTES, dtype=torch.int32, device=benchmark.device)
    except torch.OutOfMemoryError:
        print(f"  no {name}: the GPU has no {_size(pool_bytes)}", flush=True)
        return
    num_runs = min(pool_bytes // hop_bytes, MAX_HOP_READ_BYTES // run_bytes)
    pages = torch.randperm(pool_bytes // hop_bytes)[:num_runs].to(torch.int32)
    pages = pages.to(benchmark.device)
    sums = torch.zeros(num_programs, dtype=torch.int32, device=benchmark.device)
    run_words = run_bytes // WORD_BYTES

    def read() -> None:
        _hop_kernel[(num_programs,)](
            sums_ptr=sums,
            words_ptr=pool,
            pages_ptr=pages,
            num_runs=num_runs,
            stride_page=hop_bytes // WORD_BYTES,
            RUN=run_words,
            BLOCK_RUNS=max(1, BLOCK_WORDS // run_words),
            num_warps=8,
        )

    timing = benchmark.measure(read)
    benchmark.add(_row(name, timing, num_runs * run_bytes))


def _row(name: str, timing: Timing, num_bytes: int, *, num_flops: int = 0) -> Row:
    return Row(
        shape=name,
        implementation="roofline",
        timing=timing,
        num_bytes=num_bytes,
        num_flops=num_flops,
        details={},
    )


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark("roofline", __doc__ or "", [], arguments)
    if benchmark.is_dry:
        measure_plain(benchmark, 64 * KIB, 2)
        measure_matmul(benchmark, 64)
        measure_hops(benchmark, 256, 4 * KIB, 64 * KIB, 2)
    else:
        processors = torch.cuda.get_device_properties(benchmark.device).multi_processor_count
        measure_plain(benchmark, READ_BYTES, 8 * processors)
        measure_matmul(benchmark, MATMUL_SIZE)
        for pool_bytes in POOLS:
            for hop_bytes in HOPS:
                for run_bytes in RUNS:
                    measure_hops(benchmark, run_bytes, hop_bytes, pool_bytes, 8 * processors)
                    torch.cuda.empty_cache()
    benchmark.finish()


if __name__ == "__main__":
    main()
