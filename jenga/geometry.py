"""Large pages, small pages, offsets and strides, by arithmetic only.

The address, from the arena's base, of layer l of small page p of page table g is

    p * small_page_bytes_g + layer_offset_bytes_l

Every `small_page_bytes` divides `large_page_bytes`. The page ids of a page table therefore run over
the whole arena, and a kernel needs only a plain strided view per layer.

Source: Jenga paper, sections 4.1, 4.2 and 4.4.
"""

from dataclasses import dataclass
from math import lcm

from jenga.checks import check_count, check_positive
from jenga.policies import LayerPolicy
from jenga.spec import Layer, LayerType, ModelSpec

TOKENS_PER_PAGE = 16
"""Default number of tokens of a small page, which is also the step of prefix hits."""

ALIGNMENT_BYTES = 64
"""Default alignment of layers and small pages.

Kernels read whole vectors if strides are multiples of 16 elements, which are 64 bytes in float32.
"""

_LEAST_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """How one layer type, or a run of a state type's layers, is cut into small pages.

    A request holds one page table of each. A state type may be cut into several. This one then has
    its layers `layer_start` to `layer_end`.

    Attributes:
        layer_type: Layer type that is stored.
        layer_start: First layer of the type stored here.
        layer_end: One past the last layer.
        tokens_per_page: Number of tokens of a small page, 1 for a state type.
        small_page_bytes: Distance between two small pages, padding included.
        layer_offset_bytes: Start of each stored layer within the small page.
        small_pages_per_large_page: Number of small pages in one large page.
        part_offset_bytes: Start of each part of each stored layer within the small page. A layer
            without parts has one entry, its own offset.
    """

    layer_type: LayerType
    layer_start: int
    layer_end: int
    tokens_per_page: int
    small_page_bytes: int
    layer_offset_bytes: tuple[int, ...]
    small_pages_per_large_page: int
    part_offset_bytes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        owner = f"page table {self.name!r}"
        _check_layer_range(owner, self.layer_type, self.layer_start, self.layer_end)
        for field in ("tokens_per_page", "small_page_bytes", "small_pages_per_large_page"):
            check_positive(owner, field, getattr(self, field))
        shared_tokens = 1 if self.is_state else self.layer_type.tokens_per_slot
        if self.tokens_per_page % shared_tokens or (self.is_state and self.tokens_per_page != 1):
            wanted = "1" if self.is_state else f"a multiple of {shared_tokens}"
            msg = f"{owner}: tokens_per_page must be {wanted}, got {self.tokens_per_page}"
            raise ValueError(msg)
        num_layers = self.layer_end - self.layer_start
        if len(self.layer_offset_bytes) != num_layers:
            msg = (
                f"{owner}: layer_offset_bytes must have one offset for each of {num_layers} "
                f"layers, got {self.layer_offset_bytes}"
            )
            raise ValueError(msg)
        for offset_bytes in self.layer_offset_bytes:
            check_count(f"{owner}: every offset of layer_offset_bytes", offset_bytes)

    @property
    def name(self) -> str:
        """Name of the layer type, with the range of layers if the type is cut."""
        if self.layer_start == 0 and self.layer_end == len(self.layer_type.layers):
            return self.layer_type.name
        return f"{self.layer_type.name}[{self.layer_start}:{self.layer_end}]"

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers stored here, in the order of `layer_offset_bytes`."""
        return self.layer_type.layers[self.layer_start : self.layer_end]

    @property
    def is_state(self) -> bool:
        """Whether a small page holds one state instead of tokens."""
        return self.layer_type.is_state

    @property
    def slots_per_page(self) -> int:
        """Number of slots of a small page, below its tokens if several tokens share a slot."""
        return self.tokens_per_page // self.layer_type.tokens_per_slot

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers stored here, without padding."""
        return sum(layer.slot_bytes for layer in self.layers)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a small page that can hold data."""
        return self.slot_bytes * self.slots_per_page

    @property
    def padding_bytes(self) -> int:
        """Bytes of a small page that never hold data."""
        return self.small_page_bytes - self.payload_bytes

    def policy(self) -> LayerPolicy:
        """Return the policy of the layer type, for pages of this length."""
        return self.layer_type.policy(self.tokens_per_page)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One way to cut the arena for a model.

    Attributes:
        name: Name of the rule that made it: "planned", "lcm", ...
        large_page_bytes: Size of the large pages that the arena is cut into.
        page_tables: One page table per layer type, or several if a state type is cut. An image
            embedding that lives in its host's pages has none.
    """

    name: str
    large_page_bytes: int
    page_tables: tuple[PageTable, ...]

    def __post_init__(self) -> None:
        # `check_geometry` checks whether page tables tile the large page. This class does not,
        # because a rank of a pipeline has the page tables of all ranks, and large pages of its own.
        check_positive(f"geometry {self.name!r}", "large_page_bytes", self.large_page_bytes)
        names = [table.name for table in self.page_tables]
        if not names or len(set(names)) != len(names):
            msg = f"geometry {self.name!r} must have page tables of distinct names, got {names}"
            raise ValueError(msg)

    def num_large_pages(self, arena_bytes: int) -> int:
        """Return the number of large pages that fit in an arena, including the null page.

        Raises:
            ValueError: `arena_bytes` is not an integer of at least 0.
        """
        check_count("arena_bytes", arena_bytes)
        return arena_bytes // self.large_page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """A small page before its stride is chosen: its layers, their offsets, and their bytes.

    Attributes:
        content_bytes: Smallest possible `small_page_bytes`: all layers, each at its aligned offset.
        layer_type: As in `PageTable`, like the fields after it.
    """

    layer_type: LayerType
    layer_start: int
    layer_end: int
    tokens_per_page: int
    layer_offset_bytes: tuple[int, ...]
    part_offset_bytes: tuple[tuple[int, ...], ...]
    content_bytes: int

    def page_table(self, *, large_page_bytes: int, small_pages_per_large_page: int) -> PageTable:
        """Make the page table whose stride puts this many small pages in a large page.

        Raises:
            ValueError: The large page is not a multiple of the number, or its parts are too small.
        """
        check_count("large_page_bytes", large_page_bytes, least=1)
        check_count("small_pages_per_large_page", small_pages_per_large_page, least=1)
        small_page_bytes, remainder = divmod(large_page_bytes, small_pages_per_large_page)
        if remainder or small_page_bytes < self.content_bytes:
            msg = (
                f"small_pages_per_large_page of {self.layer_type.name!r} must divide the "
                f"{large_page_bytes} bytes of a large page into parts of at least "
                f"{self.content_bytes} bytes, got {small_pages_per_large_page}"
            )
            raise ValueError(msg)
        return PageTable(
            layer_type=self.layer_type,
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            tokens_per_page=self.tokens_per_page,
            small_page_bytes=small_page_bytes,
            layer_offset_bytes=self.layer_offset_bytes,
            small_pages_per_large_page=small_pages_per_large_page,
            part_offset_bytes=self.part_offset_bytes,
        )


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def place_layers(
    layer_type: LayerType,
    *,
    tokens_per_page: int = TOKENS_PER_PAGE,
    alignment_bytes: int = ALIGNMENT_BYTES,
    layer_start: int = 0,
    layer_end: int | None = None,
) -> PageContent:
    """Lay layers of a type side by side in a small page, with every layer and part aligned.

    Args:
        layer_type: Layer type that has the layers.
        tokens_per_page: Number of tokens of a small page. A state always takes one slot. A type
            with its own page length keeps that. Tokens that share a slot are never separated.
        alignment_bytes: Unit of every offset.
        layer_start: First layer to place.
        layer_end: One past the last layer. None means all layers from the first on.

    Raises:
        ValueError: A number is not positive, or the type does not have these layers.
    """
    layer_end = len(layer_type.layers) if layer_end is None else layer_end
    owner = f"layer type {layer_type.name!r}"
    _check_layer_range(owner, layer_type, layer_start, layer_end)
    check_positive(owner, "tokens_per_page", tokens_per_page)
    check_positive(owner, "alignment_bytes", alignment_bytes)
    page_tokens = layer_type.tokens_per_page or lcm(tokens_per_page, layer_type.tokens_per_slot)
    num_slots = page_tokens // layer_type.tokens_per_slot
    offsets: list[int] = []
    part_offsets: list[tuple[int, ...]] = []
    end_bytes = 0
    for layer in layer_type.layers[layer_start:layer_end]:
        end_bytes = round_up(end_bytes, alignment_bytes)
        offsets.append(end_bytes)
        parts: list[int] = []
        for piece_bytes in [part.num_bytes for part in layer.parts] or [layer.slot_bytes]:
            end_bytes = round_up(end_bytes, alignment_bytes)
            parts.append(end_bytes)
            end_bytes += piece_bytes * num_slots
        part_offsets.append(tuple(parts))
    return PageContent(
        layer_type=layer_type,
        layer_start=layer_start,
        layer_end=layer_end,
        tokens_per_page=page_tokens,
        layer_offset_bytes=tuple(offsets),
        part_offset_bytes=tuple(part_offsets),
        content_bytes=round_up(end_bytes, alignment_bytes),
    )


def _check_layer_range(owner: str, layer_type: LayerType, layer_start: int, layer_end: int) -> None:
    check_count(f"{owner}: layer_start", layer_start)
    check_positive(owner, "layer_end", layer_end)
    if not layer_start < layer_end <= len(layer_type.layers):
        msg = (
            f"{owner}: layer_start and layer_end must be a range of its {len(layer_type.layers)} "
            f"layers, got {layer_start} and {layer_end}"
        )
        raise ValueError(msg)


def check_page_options(*, tokens_per_page: int, alignment_bytes: int) -> None:
    """Refuse page lengths and alignments that no kernel can read.

    Raises:
        ValueError: `tokens_per_page` is not a multiple of 16, or `alignment_bytes` is not a power
            of two of at least 16.
    """
    check_positive("geometry", "tokens_per_page", tokens_per_page)
    if tokens_per_page % TOKENS_PER_PAGE:
        msg = f"tokens_per_page must be a multiple of {TOKENS_PER_PAGE}, got {tokens_per_page}"
        raise ValueError(msg)
    check_positive("geometry", "alignment_bytes", alignment_bytes)
    is_power_of_two = alignment_bytes & (alignment_bytes - 1) == 0
    if not is_power_of_two or alignment_bytes < _LEAST_ALIGNMENT_BYTES:
        msg = f"alignment_bytes must be a power of two of at least 16, got {alignment_bytes}"
        raise ValueError(msg)


def place_whole_types(
    model: ModelSpec, *, tokens_per_page: int, alignment_bytes: int
) -> tuple[PageContent, ...]:
    """Return the paper's small pages, each with all layers of a type.

    Raises:
        ValueError: See `check_page_options`. 1 is accepted as well, for the paper's examples.
    """
    check_positive("geometry", "tokens_per_page", tokens_per_page)
    check_positive("geometry", "alignment_bytes", alignment_bytes)
    check_page_options(
        tokens_per_page=TOKENS_PER_PAGE if tokens_per_page == 1 else tokens_per_page,
        alignment_bytes=ALIGNMENT_BYTES if alignment_bytes == 1 else alignment_bytes,
    )
    return tuple(
        place_layers(layer_type, tokens_per_page=tokens_per_page, alignment_bytes=alignment_bytes)
        for layer_type in model.layer_types
        if layer_type.has_pages
    )


def exact_lcm(
    model: ModelSpec,
    *,
    tokens_per_page: int = TOKENS_PER_PAGE,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> Geometry:
    """Return the paper's geometry: the large page is the least common multiple of the small pages.

    A small page holds all layers of its type. It has no padding, except what `alignment_bytes` adds
    to odd sizes. On models with recurrent layers, the large page can be larger than any GPU.

    Args:
        model: The layer types.
        tokens_per_page: Number of tokens of a small page, a multiple of 16. 1 reproduces the
            paper's worked examples.
        alignment_bytes: Alignment of every layer and small page. 1 means none.

    Raises:
        ValueError: See `place_whole_types`.

    Source: Jenga paper, sections 4.1 and 4.4.
    """
    contents = place_whole_types(
        model, tokens_per_page=tokens_per_page, alignment_bytes=alignment_bytes
    )
    large_page_bytes = lcm(*(content.content_bytes for content in contents))
    return Geometry(
        name="lcm",
        large_page_bytes=large_page_bytes,
        page_tables=tuple(
            content.page_table(
                large_page_bytes=large_page_bytes,
                small_pages_per_large_page=large_page_bytes // content.content_bytes,
            )
            for content in contents
        ),
    )


def check_arena(geometry: Geometry, arena_bytes: int) -> int:
    """Refuse an arena that is too small to start.

    Returns:
        Number of its large pages, including the null page.

    Raises:
        ValueError: It has fewer large pages than the null page and one per page table.
    """
    check_positive("arena", "arena_bytes", arena_bytes)
    needed_large_pages = 1 + len(geometry.page_tables)
    num_large_pages = geometry.num_large_pages(arena_bytes)
    if num_large_pages < needed_large_pages:
        msg = (
            f"arena_bytes must hold {needed_large_pages} large pages of "
            f"{geometry.large_page_bytes} bytes (the null page and one for each of the "
            f"{len(geometry.page_tables)} page tables), that is "
            f"{needed_large_pages * geometry.large_page_bytes} bytes; "
            f"{arena_bytes} bytes hold {num_large_pages}"
        )
        raise ValueError(msg)
    return num_large_pages


def check_geometry(geometry: Geometry) -> None:
    """Refuse a geometry whose page tables do not tile its large page.

    Raises:
        ValueError: A page table breaks a rule. The message names both.
    """
    for table in geometry.page_tables:
        covered_bytes = table.small_page_bytes * table.small_pages_per_large_page
        if covered_bytes != geometry.large_page_bytes:
            msg = (
                f"page table {table.name!r}: {table.small_pages_per_large_page} small pages of "
                f"{table.small_page_bytes} bytes must fill a large page of "
                f"{geometry.large_page_bytes} bytes"
            )
            raise ValueError(msg)
        end_bytes = 0
        layers = zip(table.layers, table.layer_offset_bytes, strict=True)
        for layer, offset_bytes in layers:
            if offset_bytes < end_bytes:
                msg = f"page table {table.name!r}: layer {layer.name!r} overlaps the one before it"
                raise ValueError(msg)
            end_bytes = offset_bytes + layer.slot_bytes * table.slots_per_page
        for layer, part_offsets in zip(table.layers, table.part_offset_bytes, strict=False):
            if layer.parts:
                end_bytes = max(end_bytes, part_offsets[-1] + layer.parts[-1].num_bytes)
        if end_bytes > table.small_page_bytes:
            msg = (
                f"page table {table.name!r}: layers end at byte {end_bytes} of a small page of "
                f"{table.small_page_bytes}"
            )
            raise ValueError(msg)
