"""Time attention over tokens per page, at one number of layers and at one distance of pages.

python -m perf.sweeps.sweep_tokens_per_page [--only decode] [--peers none] [--dry-run]

More tokens per page make a layer's part of a page longer, and fewer page ids to read. With the
layers fixed the distance grows too, as it does in an arena; with the distance fixed only the part
grows.
"""

import dataclasses

from perf.shapes.attention_shapes import DRY_SHAPES, GEMMA_3_27B, LLAMA_8B, AttentionShape
from perf.sweeps.sweeps import Point, run_sweep

TOKENS_PER_PAGE = (16, 32, 64, 128, 256, 528, 784, 1344)
"""528, 784 and 1344 are what vLLM and the paper come to on hybrids."""

NUM_LAYERS = 32
FIXED_DISTANCE_BYTES = 1344 * 8192
"""The largest page's part of one layer of Gemma 3 27B."""

BASES = (
    AttentionShape(name="llama-8b decode 32x4k", requests=((1, 4096),) * 32, **LLAMA_8B),
    AttentionShape(name="llama-8b decode 1x32k", requests=((1, 32_768),), **LLAMA_8B),
    AttentionShape(
        name="gemma-3-27b window decode 16x8k", requests=((1, 8192),) * 16, **GEMMA_3_27B
    ),
    AttentionShape(name="llama-8b prefill 8k", requests=((8192, 8192),), **LLAMA_8B),
)


def points(bases: tuple[AttentionShape, ...]) -> list[Point]:
    """Every base at every number of tokens per page, in two ways."""
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
