"""Time attention for different numbers of tokens per page.

python -m perf.sweeps.sweep_tokens_per_page [--only decode] [--peers none] [--dry-run]

With more tokens per page, a layer's part of a page is longer, and there are fewer page ids to read.
Each number is measured in two ways. With a fixed number of layers, the distance between pages grows
too, as in an arena. With a fixed distance, only the part of the layer grows.
"""

import dataclasses

from perf.shapes.attention_shapes import DRY_SHAPES, GEMMA_3_27B, LLAMA_8B, AttentionShape
from perf.sweeps.sweeps import Point, run_sweep

TOKENS_PER_PAGE = (16, 32, 64, 128, 256, 528, 784, 1344)
"""Numbers of tokens. vLLM and the paper choose 528, 784 and 1344 for hybrids."""

NUM_LAYERS = 32
FIXED_DISTANCE_BYTES = 1344 * 8192
"""Size of one layer's part of the largest page, for Gemma 3 27B."""

BASES = (
    AttentionShape(name="llama-8b decode 32x4k", requests=((1, 4096),) * 32, **LLAMA_8B),
    AttentionShape(name="llama-8b decode 1x32k", requests=((1, 32_768),), **LLAMA_8B),
    AttentionShape(
        name="gemma-3-27b window decode 16x8k", requests=((1, 8192),) * 16, **GEMMA_3_27B
    ),
    AttentionShape(name="llama-8b prefill 8k", requests=((8192, 8192),), **LLAMA_8B),
)


def points(bases: tuple[AttentionShape, ...]) -> list[Point]:
    """Return each base with each number of tokens per page, in both ways."""
    found: list[Point] = []
    for base in bases:
        for tokens in TOKENS_PER_PAGE:
            paged = dataclasses.replace(base, page_tokens=tokens, num_layers=1)
            distant = max(1, FIXED_DISTANCE_BYTES // paged.small_page_bytes)
            ways = {f"{NUM_LAYERS} layers": NUM_LAYERS, "one distance": distant}
            for way, num_layers in ways.items():
                name = f"{base.name}, {way}, {tokens} tokens a page"
                shape = dataclasses.replace(paged, name=name, num_layers=num_layers)
                found.append(Point(series=f"{base.name}, {way}", x=tokens, shape=shape))
    return found


def main(arguments: list[str] | None = None) -> None:
    dry = [
        Point(series=base.name, x=tokens, shape=dataclasses.replace(base, page_tokens=tokens))
        for base in DRY_SHAPES
        for tokens in (16, 48)
    ]
    run_sweep(
        "sweep_tokens_per_page",
        __doc__ or "",
        points(BASES),
        dry=dry,
        axis="tokens per page",
        arguments=arguments,
    )


if __name__ == "__main__":
    main()
