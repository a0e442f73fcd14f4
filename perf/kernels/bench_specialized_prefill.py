"""Time the warp-specialized prefill kernel for Hopper, the generic kernel and FlashAttention-3.

Shapes of small pages are also timed with pages that follow one another in the arena. There the
kernel can load several of them as one box (`jenga-joined`).

python -m perf.kernels.bench_specialized_prefill [--only P1] [--peers none] [--dry-run]

Its rows have a file of their own, so that no other row is lost if the kernel hangs.
"""

import functools
from dataclasses import replace

import torch

from jenga_kernels.triton.lib.tiles import AttentionTiles
from perf.harness.timing import Benchmark, read_roofline
from perf.kernels.bench_paged_attention import jenga, measure_shape
from perf.peers.attention_peers import PEERS
from perf.shapes.attention_shapes import DRY_SHAPES, SHAPES
from perf.shapes.cache_layouts import Stored
from perf.shapes.neighbours import with_neighbours


def joining_pages(tiles: AttentionTiles) -> AttentionTiles:
    """Change tiles so that neighbouring pages are loaded as one box."""
    specialized = tiles.specialized_prefill
    if specialized is None:  # the caller refuses the shape
        return tiles
    return replace(tiles, specialized_prefill=replace(specialized, joins_pages=True))


IMPLEMENTATIONS = {
    "jenga": functools.partial(jenga, is_warp_specialized=True),
    "jenga-joined": functools.partial(jenga, is_warp_specialized=True, change=joining_pages),
    "jenga-plain": functools.partial(jenga, is_warp_specialized=False),
    "flash-attention-3": PEERS["flash-attention-3"],
}


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_specialized_prefill",
        __doc__ or "",
        ["tests/kernels/attention/test_specialized_prefill.py"],
        arguments,
    )
    for shape in with_neighbours(DRY_SHAPES if benchmark.is_dry else SHAPES):
        is_prefill = shape.num_tokens > len(shape.requests) and shape.stored == Stored.BF16
        if (benchmark.is_dry or is_prefill) and benchmark.wants_shape(shape.name):
            measure_shape(benchmark, shape, IMPLEMENTATIONS)
            if benchmark.device.type == "cuda":
                torch.cuda.empty_cache()
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
