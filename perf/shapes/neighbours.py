"""Shapes of attention where the pages of a request follow one another in the arena."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from perf.shapes.attention_shapes import AttentionShape
from perf.shapes.latent_shapes import LatentShape

Shape = TypeVar("Shape", AttentionShape, LatentShape)

SMALL_PAGE_TOKENS = 32
"""Most slots of a page of which kernels load several as one box."""


def with_neighbours(shapes: Iterable[Shape]) -> Iterator[Shape]:
    """Give shapes, and after each of small pages the same with pages that are neighbours."""
    for shape in shapes:
        yield shape
        if shape.page_tokens <= SMALL_PAGE_TOKENS:
            yield replace(shape, name=f"{shape.name}, neighbours", are_neighbours=True)
