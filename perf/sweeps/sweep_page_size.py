"""Time attention for different sizes of small pages and arenas, with 16 tokens per page.

python -m perf.sweeps.sweep_page_size [--only decode] [--peers none] [--dry-run]

The number of layers that share a small page determines its size in bytes, which is the distance
from one page of a layer to the next. The size of the arena determines over how much memory a
request's pages are scattered.
"""

import dataclasses

from perf.shapes.attention_shapes import DRY_SHAPES, GEMMA_3_27B, LLAMA_8B, AttentionShape
from perf.sweeps.sweeps import Point, run_sweep

NUM_LAYERS = (1, 2, 4, 8, 16, 32, 64, 128)
GIB = 1 << 30
ARENAS = {"an arena of its own": 0, "10 GiB": 10 * GIB, "100 GiB": 100 * GIB}

BASES = (
    AttentionShape(name="llama-8b decode 32x4k", requests=((1, 4096),) * 32, **LLAMA_8B),
    AttentionShape(name="llama-8b decode 1x32k", requests=((1, 32_768),), **LLAMA_8B),
    AttentionShape(
        name="gemma-3-27b window decode 32x2k", requests=((1, 2048),) * 32, **GEMMA_3_27B
    ),
    AttentionShape(name="llama-8b prefill 8k", requests=((8192, 8192),), **LLAMA_8B),
)


def points(bases: tuple[AttentionShape, ...]) -> list[Point]:
    """Return each base with each number of layers, in each arena that is large enough."""
    found: list[Point] = []
    for base in bases:
        for way, arena_bytes in ARENAS.items():
            for num_layers in NUM_LAYERS:
                shape = dataclasses.replace(
                    base,
                    name=f"{base.name}, {num_layers} layers, {way}",
                    num_layers=num_layers,
                    arena_bytes=arena_bytes,
                )
                needed = sum(stored for _, stored in base.requests) * (
                    shape.small_page_bytes // shape.page_tokens
                )
                if arena_bytes and arena_bytes < needed:
                    continue
                kib = shape.small_page_bytes / 1024
                found.append(Point(series=f"{base.name}, {way}", x=kib, shape=shape))
    return found


def main(arguments: list[str] | None = None) -> None:
    dry = [
        Point(
            series=base.name,
            x=num_layers,
            shape=dataclasses.replace(base, num_layers=num_layers, arena_bytes=1 << 20),
        )
        for base in DRY_SHAPES
        for num_layers in (1, 4)
    ]
    run_sweep(
        "sweep_page_size",
        __doc__ or "",
        points(BASES),
        dry=dry,
        axis="KiB of a small page",
        arguments=arguments,
    )


if __name__ == "__main__":
    main()
