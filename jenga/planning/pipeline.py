"""One geometry for the ranks of a pipeline, each of which stores its own layers.

One manager serves all ranks. Page tables, tokens of a page, and small pages of a large page are
therefore the same on every rank. Only bytes differ. A rank's small page holds its share of the
layers, and its large page is as long as necessary for that. The number of large pages is that of
the rank with room for the fewest.

Layers of a type are placed by their number on their rank: the n-th layer of each rank has the same
place. The plan is made for an imaginary rank, which has at each place the widest layer of all
ranks.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import lcm

from jenga.geometry import ALIGNMENT_BYTES, Geometry, PageTable, place_layers, round_up
from jenga.spec import Layer, LayerType, ModelSpec

_STRIDE_ALIGNMENTS = (128, ALIGNMENT_BYTES)
"""Alignments of small pages in bytes. The first, a cache line, is used if the plan has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The layers that one rank stores in the small pages of a page table.

    Attributes:
        layers: Layers of the rank, none if the rank has none of the type.
        small_page_bytes: Distance between two of its small pages.
        layer_offset_bytes: Start of each layer within the small page.
        payload_bytes: Bytes of its small page that can hold data.
    """

    layers: tuple[Layer, ...]
    small_page_bytes: int
    layer_offset_bytes: tuple[int, ...]
    payload_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Bytes of its small page that never hold data."""
        return self.small_page_bytes - self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The memory layout of one rank.

    Attributes:
        large_page_bytes: Size of the large pages that its arena is cut into.
        shares: One share per page table, in the geometry's order.
    """

    large_page_bytes: int
    shares: tuple[Share, ...]

    @property
    def layer_names(self) -> frozenset[str]:
        """Names of all layers it stores."""
        return frozenset(layer.name for share in self.shares for layer in share.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The memory layout of a model that is spread over ranks.

    Attributes:
        geometry: Geometry for the manager. A page of it is the pages of all ranks, one after
            another, so that its bytes are those of all ranks together.
        stages: One stage per rank.
    """

    geometry: Geometry
    stages: tuple[Stage, ...]


def plan_pipeline(
    model: ModelSpec, stages: Sequence[Collection[str]], plan: Callable[[ModelSpec], Geometry]
) -> Pipeline:
    """Plan for a model whose layers are spread over ranks.

    Args:
        model: All layer types of the model.
        stages: Names of the layers of each rank.
        plan: Makes the geometry of a model on one rank.

    Raises:
        ValueError: A layer is on no rank or on several, a rank has no layer that stores anything,
            or `plan` refuses the model.
    """
    _check_stages(model, stages)
    if len(stages) == 1:
        geometry = plan(model)
        return Pipeline(geometry=geometry, stages=(_only_stage(geometry),))
    placed = {
        layer_type.name: [_placed_layers(layer_type, names) for names in stages]
        for layer_type in model.layer_types
    }
    widest = ModelSpec(
        name=model.name,
        layer_types=tuple(
            replace(layer_type, layers=_widest_layers(placed[layer_type.name]))
            for layer_type in model.layer_types
        ),
    )
    geometry = plan(widest)
    shared = [
        [layers[table.layer_start : table.layer_end] for layers in placed[table.layer_type.name]]
        for table in geometry.page_tables
    ]  # page table -> rank -> layers
    made = tuple(
        _stage(geometry, [of_table[rank] for of_table in shared]) for rank in range(len(stages))
    )
    return Pipeline(geometry=_joined(geometry, model, made), stages=made)


def _check_stages(model: ModelSpec, stages: Sequence[Collection[str]]) -> None:
    layers = [layer.name for layer_type in model.layer_types for layer in layer_type.layers]
    for name in layers:
        ranks = [rank for rank, names in enumerate(stages) if name in names]
        if len(ranks) != 1:
            msg = f"layer {name!r} must be on one rank of the pipeline, it is on {ranks or 'none'}"
            raise ValueError(msg)
    for rank, names in enumerate(stages):
        if set(names).isdisjoint(layers):
            msg = (
                f"every rank of a pipeline must have a layer that stores something, rank {rank} "
                f"of {len(stages)} has none; the {len(layers)} layers that do: {layers}"
            )
            raise ValueError(msg)


def _placed_layers(layer_type: LayerType, names: Collection[str]) -> tuple[Layer, ...]:
    """Return a rank's layers of a type, widest first, so that wide layers share their places."""
    layers = [layer for layer in layer_type.layers if layer.name in names]
    return tuple(sorted(layers, key=lambda layer: layer.slot_bytes, reverse=True))


def _widest_layers(of_ranks: Sequence[Sequence[Layer]]) -> tuple[Layer, ...]:
    return tuple(
        max((layer for layer in layers if layer is not None), key=lambda layer: layer.slot_bytes)
        for layers in zip_longest(*of_ranks)
    )


def _only_stage(geometry: Geometry) -> Stage:
    return Stage(
        large_page_bytes=geometry.large_page_bytes,
        shares=tuple(
            Share(
                layers=table.layers,
                small_page_bytes=table.small_page_bytes,
                layer_offset_bytes=table.layer_offset_bytes,
                payload_bytes=table.payload_bytes,
            )
            for table in geometry.page_tables
        ),
    )


def _stage(geometry: Geometry, layers_of_tables: Sequence[tuple[Layer, ...]]) -> Stage:
    """Lay out a rank's layers in pages of the size that they need."""
    contents = [
        place_layers(
            replace(table.layer_type, layers=layers), tokens_per_page=table.tokens_per_page
        )
        if layers
        else None
        for table, layers in zip(geometry.page_tables, layers_of_tables, strict=True)
    ]
    least_bytes = max(
        content.content_bytes * table.small_pages_per_large_page
        for table, content in zip(geometry.page_tables, contents, strict=True)
        if content is not None
    )
    large_page_bytes = round_up(least_bytes, _stride_unit_bytes(geometry))
    shares: list[Share] = []
    for table, content in zip(geometry.page_tables, contents, strict=True):
        layers = content.layer_type.layers if content is not None else ()
        shares.append(
            Share(
                layers=layers,
                small_page_bytes=large_page_bytes // table.small_pages_per_large_page,
                layer_offset_bytes=content.layer_offset_bytes if content is not None else (),
                payload_bytes=sum(layer.slot_bytes for layer in layers) * table.slots_per_page,
            )
        )
    return Stage(large_page_bytes=large_page_bytes, shares=tuple(shares))


def _stride_unit_bytes(geometry: Geometry) -> int:
    """Return the unit of a rank's large page, which aligns every small page of the rank."""
    alignment_bytes = next(
        each
        for each in _STRIDE_ALIGNMENTS
        if each == _STRIDE_ALIGNMENTS[-1]
        or all(table.small_page_bytes % each == 0 for table in geometry.page_tables)
    )
    counts = [table.small_pages_per_large_page for table in geometry.page_tables]
    return alignment_bytes * lcm(*counts)


def _joined(geometry: Geometry, model: ModelSpec, stages: Sequence[Stage]) -> Geometry:
    """Return the geometry whose pages are those of all ranks, one after another."""
    whole_types: dict[str, LayerType] = {}
    for layer_type in model.layer_types:
        indices = [
            index
            for index, table in enumerate(geometry.page_tables)
            if table.layer_type.name == layer_type.name
        ]
        layers = [layer for i in indices for stage in stages for layer in stage.shares[i].layers]
        if layers:  # a type without layers here lives in the pages of another type
            whole_types[layer_type.name] = replace(layer_type, layers=tuple(layers))
    large_page_bytes = sum(stage.large_page_bytes for stage in stages)
    tables: list[PageTable] = []
    ends = dict.fromkeys(whole_types, 0)  # layer type -> number of its layers in page tables so far
    for index, table in enumerate(geometry.page_tables):
        offsets: list[int] = []
        start_bytes = 0
        for stage in stages:
            share = stage.shares[index]
            offsets += [start_bytes + offset for offset in share.layer_offset_bytes]
            start_bytes += share.small_page_bytes
        layer_start = ends[table.layer_type.name]
        ends[table.layer_type.name] += len(offsets)
        tables.append(
            PageTable(
                layer_type=whole_types[table.layer_type.name],
                layer_start=layer_start,
                layer_end=layer_start + len(offsets),
                tokens_per_page=table.tokens_per_page,
                small_page_bytes=start_bytes,
                layer_offset_bytes=tuple(offsets),
                small_pages_per_large_page=table.small_pages_per_large_page,
            )
        )
    return Geometry(
        name=geometry.name, large_page_bytes=large_page_bytes, page_tables=tuple(tables)
    )
