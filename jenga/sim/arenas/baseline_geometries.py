"""Other ways to cut an arena, with which the planned geometry is compared.

If every small page lies at a multiple of one stride, a baseline is a `Geometry`, and the manager
itself can run on it: `max_page` and `homogeneous`. The other two do not fit in a `Geometry`. They
are records of their own, which only the simulator uses. It treats `GcdPages` as a pool of pieces,
of which a small page needs a fixed number anywhere. It treats `StaticPartition` as one independent
pool for each layer type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from jenga.checks import check_positive
from jenga.geometry import (
    ALIGNMENT_BYTES,
    TOKENS_PER_PAGE,
    Geometry,
    PageContent,
    check_arena,
    exact_lcm,
    place_layers,
    place_whole_types,
)
from jenga.planning.demand import TYPICAL_TOKENS, check_lengths, held_pages, needed_tokens
from jenga.planning.planner import plan
from jenga.spec import (
    FullAttention,
    Layer,
    ModelSpec,
)

GEOMETRY_NAMES = ("planned", "lcm", "max", "homogeneous")
"""All names that `geometry_by_name` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcdPages:
    """Pieces whose size is the greatest common divisor of all small pages.

    Nothing is padded, and any piece serves any layer type. A small page is scattered over its
    pieces, so no kernel for contiguous pages can read it.

    Attributes:
        piece_bytes: The greatest common divisor.
        contents: Small pages of the layer types.
        pieces_per_small_page: Number of pieces in one small page, for each of `contents`.

    Source: Jenga paper, section 4.4, "GCD page".
    """

    piece_bytes: int
    contents: tuple[PageContent, ...]
    pieces_per_small_page: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The part of an arena that belongs to one layer type alone.

    Small page p begins at `offset_bytes + p * content.content_bytes`.

    Attributes:
        content: Small page of the layer type.
        offset_bytes: Offset of the region in the arena.
        num_pages: Number of small pages in the region.
    """

    content: PageContent
    offset_bytes: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPartition:
    """An arena divided once among the layer types. No type can use another's part.

    Attributes:
        arena_bytes: Bytes of the arena.
        regions: One region per layer type.
    """

    arena_bytes: int
    regions: tuple[Region, ...]


def max_page(
    model: ModelSpec,
    *,
    tokens_per_page: int = TOKENS_PER_PAGE,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> Geometry:
    """Pad every small page to the largest one. Smaller types get as many tokens as fit in it.

    Args:
        model: Model with the layer types.
        tokens_per_page: Tokens of the largest type's page. Pages of other types have multiples.
        alignment_bytes: Alignment of every layer and small page.

    Raises:
        ValueError: See `place_whole_types`.

    Source: Jenga paper, section 4.4, "MAX page".
    """
    contents = place_whole_types(
        model, tokens_per_page=tokens_per_page, alignment_bytes=alignment_bytes
    )
    large_page_bytes = max(content.content_bytes for content in contents)
    return Geometry(
        name="max",
        large_page_bytes=large_page_bytes,
        page_tables=tuple(
            _widened(content, large_page_bytes, alignment_bytes).page_table(
                large_page_bytes=large_page_bytes, small_pages_per_large_page=1
            )
            for content in contents
        ),
    )


def _widened(content: PageContent, page_bytes: int, alignment_bytes: int) -> PageContent:
    """Return a page of the same layers, with the most tokens that fit in `page_bytes`."""
    layer_type = content.layer_type
    if layer_type.tokens_per_page is not None:
        return content
    times = page_bytes // content.content_bytes
    return place_layers(
        layer_type,
        tokens_per_page=content.tokens_per_page * times,
        alignment_bytes=alignment_bytes,
    )


def homogeneous(
    model: ModelSpec,
    *,
    tokens_per_page: int = TOKENS_PER_PAGE,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> Geometry:
    """Lay out one page table in which every layer keeps every token: PagedAttention's layout.

    All slots have the size of the largest one. Layers that read another layer's keys and values get
    slots of their own, and so do recurrent layers, because the layout knows only tokens. Image
    embeddings have no place in it.

    Args:
        model: Model with the layer types.
        tokens_per_page: Tokens of a small page.
        alignment_bytes: Alignment of every layer and small page.

    Raises:
        ValueError: No layer type keeps keys and values of tokens, or see `place_whole_types`.

    Source: Kwon et al., PagedAttention (SOSP 2023); Jenga paper, section 3.2.
    """
    kept = [each for each in model.layer_types if not each.is_consumed]
    slot_bytes = max(
        (
            -(-layer.slot_bytes // each.tokens_per_slot)
            for each in kept
            if not each.is_state
            for layer in each.layers
        ),
        default=0,
    )
    if not slot_bytes:
        msg = f"model {model.name!r} must have a layer type that keeps tokens"
        raise ValueError(msg)
    names = [
        f"{each.name}/{name}"
        for each in kept
        for layer in each.layers
        for name in (layer.name, *layer.readers)
    ]
    every_layer = FullAttention(
        name="all", layers=tuple(Layer(name=name, slot_bytes=slot_bytes) for name in names)
    )
    one_type = ModelSpec(name=model.name, layer_types=(every_layer,))
    geometry = exact_lcm(one_type, tokens_per_page=tokens_per_page, alignment_bytes=alignment_bytes)
    return Geometry(
        name="homogeneous",
        large_page_bytes=geometry.large_page_bytes,
        page_tables=geometry.page_tables,
    )


def gcd_pages(
    model: ModelSpec,
    *,
    tokens_per_page: int = TOKENS_PER_PAGE,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> GcdPages:
    """Cut small pages into pieces of their greatest common divisor.

    Args:
        model: Model with the layer types.
        tokens_per_page: Tokens of a small page.
        alignment_bytes: Alignment of every layer and small page.

    Raises:
        ValueError: See `place_whole_types`.
    """
    contents = place_whole_types(
        model, tokens_per_page=tokens_per_page, alignment_bytes=alignment_bytes
    )
    piece_bytes = gcd(*(content.content_bytes for content in contents))
    return GcdPages(
        piece_bytes=piece_bytes,
        contents=contents,
        pieces_per_small_page=tuple(content.content_bytes // piece_bytes for content in contents),
    )


def static_partition(
    model: ModelSpec,
    *,
    arena_bytes: int,
    typical_tokens: Sequence[int] = TYPICAL_TOKENS,
    tokens_per_page: int = TOKENS_PER_PAGE,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> StaticPartition:
    """Divide an arena among the layer types, by the bytes that typical requests hold of each.

    Args:
        model: Model with the layer types.
        arena_bytes: Bytes of the arena.
        typical_tokens: Request lengths. The arena is divided for one request of each length.
        tokens_per_page: Tokens of a small page.
        alignment_bytes: Alignment of every layer and small page.

    Raises:
        ValueError: A type's part holds no small page, a length is not a positive integer, or see
            `place_whole_types`.
    """
    check_positive("arena", "arena_bytes", arena_bytes)
    check_lengths(typical_tokens)
    contents = place_whole_types(
        model, tokens_per_page=tokens_per_page, alignment_bytes=alignment_bytes
    )
    held_bytes = [
        sum(
            held_pages(content.layer_type, content.tokens_per_page, num_tokens)
            for num_tokens in typical_tokens
        )
        * content.content_bytes
        for content in contents
    ]
    regions: list[Region] = []
    offset_bytes = 0
    for content, share_bytes in zip(contents, held_bytes, strict=True):
        num_pages = arena_bytes * share_bytes // sum(held_bytes) // content.content_bytes
        if not num_pages:
            msg = (
                f"arena_bytes must leave a small page of {content.content_bytes} bytes to layer "
                f"type {content.layer_type.name!r}, got {arena_bytes}"
            )
            raise ValueError(msg)
        regions.append(Region(content=content, offset_bytes=offset_bytes, num_pages=num_pages))
        offset_bytes += num_pages * content.content_bytes
    return StaticPartition(arena_bytes=arena_bytes, regions=tuple(regions))


def needed_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Return the bytes that a request's next token reads: the least that any layout can need.

    Image embeddings that live in another layer type's pages need no bytes of their own.

    Raises:
        ValueError: The length is not a positive integer.
    """
    check_positive("request", "num_tokens", num_tokens)
    return sum(
        layer.slot_bytes * needed_tokens(each, num_tokens) // each.tokens_per_slot
        for each in model.layer_types
        if each.has_pages
        for layer in each.layers
    )


def geometry_by_name(name: str, model: ModelSpec, *, arena_bytes: int | None = None) -> Geometry:
    """Return the geometry of a rule.

    Args:
        name: One of `GEOMETRY_NAMES`: "planned", or "lcm", "max" and "homogeneous" for comparison.
        model: Model with the layer types.
        arena_bytes: Bytes of the arena that must hold the geometry. None for no check. The plan
            does not depend on it, because an engine plans before it knows its memory.

    Raises:
        ValueError: No rule has this name, or the rule refuses the model or the arena.
    """
    match name:
        case "planned":
            geometry = plan(model)
        case "lcm":
            geometry = exact_lcm(model)
        case "max":
            geometry = max_page(model)
        case "homogeneous":
            geometry = homogeneous(model)
        case _:
            msg = f"geometry must be one of {', '.join(GEOMETRY_NAMES)}, got {name!r}"
            raise ValueError(msg)
    if arena_bytes is not None:
        check_arena(geometry, arena_bytes)
    return geometry
