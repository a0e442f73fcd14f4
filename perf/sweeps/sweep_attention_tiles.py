"""Time attention with other tiles than the chosen ones, and FlashAttention-3.

python -m perf.sweeps.sweep_attention_tiles [--only D5] [--peers none] [--dry-run]

The result of each row is compared with that of the chosen tiles. Tiles that need more shared memory
than is available are reported and skipped.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from jenga_kernels.triton.lib.tiles import AttentionTiles, SpecializedTiles
from perf.harness.machine_code import NUM_PROCESSORS
from perf.harness.timing import Benchmark, read_roofline
from perf.kernels.bench_paged_attention import Prepare, jenga, measure_shape
from perf.peers.attention_peers import PEERS
from perf.shapes.attention_shapes import DRY_SHAPES, SHAPES, AttentionShape

Change = Callable[[AttentionTiles], AttentionTiles]
"""Function that turns the chosen tiles into others."""

DECODE_SHAPES = ("D1 ", "D3 ", "D5 ", "D6 ", "D11 ", "D13 ", "D15 ")
PREFILL_SHAPES = ("P1 ", "P3 ", "P4 ")

DECODE_TILES = (
    # Keys, warps, stages, programs per processor
    (16, 1, 5, 8),
    (32, 1, 5, 6),
    (32, 2, 5, 4),
    (64, 2, 5, 3),
    (32, 4, 3, 4),
    (64, 2, 3, 4),
    (64, 4, 2, 4),
    (64, 4, 3, 2),
    (64, 4, 3, 3),
    (64, 4, 5, 1),
    (64, 4, 5, 3),
    (64, 4, 7, 2),
    (128, 4, 5, 1),
    (128, 8, 5, 1),
)
"""Tried in addition to 64 keys, four warps, five stages and two programs per processor."""

PREFILL_TILES = (
    # Rows, keys, warps, stages
    (64, 64, 4, 3),
    (64, 64, 4, 5),
    (64, 128, 4, 3),
    (128, 32, 8, 5),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 64, 8, 7),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 128, 8, 5),
)
"""Tried in addition to 128 rows, 64 keys, eight warps and five stages."""

SPECIALIZED = (
    # Keys, stages, whether warp groups take turns
    (64, 3, True),
    (64, 4, False),
    (64, 4, True),
    (128, 2, False),
    (128, 2, True),
)
"""Tiles of the warp-specialized prefill kernel for Hopper."""


def variants(shape: AttentionShape) -> dict[str, Change]:
    """Return name of a row -> function that turns the chosen tiles into the row's."""
    found: dict[str, Change] = {}
    if shape.num_tokens == len(shape.requests):
        for tiles in DECODE_TILES:
            block_n, num_warps, num_stages, per_processor = tiles
            found[f"jenga n{block_n} w{num_warps} s{num_stages} p{per_processor}"] = (
                functools.partial(other_decode, tiles=tiles)
            )
    else:
        for tiles in PREFILL_TILES:
            block_m, block_n, num_warps, num_stages = tiles
            found[f"jenga m{block_m} n{block_n} w{num_warps} s{num_stages}"] = functools.partial(
                other_prefill, tiles=tiles
            )
        for tiles in SPECIALIZED:
            block_n, num_stages, takes_turns = tiles
            found[f"jenga specialized n{block_n} s{num_stages} turns {takes_turns}"] = (
                functools.partial(specialized, tiles=tiles)
            )
    return found


def other_decode(chosen: AttentionTiles, tiles: tuple[int, int, int, int]) -> AttentionTiles:
    """Replace the chosen tiles for decoding by some of `DECODE_TILES`."""
    block_n, num_warps, num_stages, per_processor = tiles
    decode = replace(chosen.decode, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    return replace(chosen, decode=decode, num_programs=per_processor * NUM_PROCESSORS)


def other_prefill(chosen: AttentionTiles, tiles: tuple[int, int, int, int]) -> AttentionTiles:
    """Replace the chosen tiles for prefill by some of `PREFILL_TILES`."""
    block_m, block_n, num_warps, num_stages = tiles
    prefill = replace(
        chosen.prefill,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return replace(chosen, prefill=prefill, specialized_prefill=None)


def specialized(chosen: AttentionTiles, tiles: tuple[int, int, bool]) -> AttentionTiles:
    """Select the kernel for Hopper with tiles of `SPECIALIZED`."""
    block_n, num_stages, takes_turns = tiles
    found = SpecializedTiles(
        block_n=block_n,
        num_stages=num_stages,
        takes_turns=takes_turns,
        loads_rows=True,
        num_programs=NUM_PROCESSORS,
    )
    return replace(chosen, specialized_prefill=found)


def implementations(shape: AttentionShape) -> dict[str, Prepare]:
    """Return the implementations to time: the chosen tiles first, FlashAttention-3 last."""
    swept = {
        name: functools.partial(jenga, change=change) for name, change in variants(shape).items()
    }
    return {"jenga": jenga, **swept, "flash-attention-3": PEERS["flash-attention-3"]}


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "sweep_attention_tiles",
        __doc__ or "",
        ["tests/kernels/attention/test_paged_attention.py"],
        arguments,
    )
    for shape in DRY_SHAPES[:2] if benchmark.is_dry else SHAPES:
        is_swept = benchmark.is_dry or shape.name.startswith(DECODE_SHAPES + PREFILL_SHAPES)
        if is_swept and benchmark.wants_shape(shape.name):
            measure_shape(benchmark, shape, implementations(shape))
            if benchmark.device.type == "cuda":
                torch.cuda.empty_cache()
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
