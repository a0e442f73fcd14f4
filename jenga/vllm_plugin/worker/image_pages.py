"""Image embeddings in a worker: rows in pages of the arena, under the names of their images.

Both of vLLM's model runners keep encoder outputs in a dictionary. `ArenaEmbeddings` takes its
place. It keeps nothing between steps: the scheduler says in each step which pages hold an image.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.errors import InvariantError
from jenga.page_ids import NULL_PAGE, SmallPageId
from jenga.vllm_plugin.arena.layout import (
    JengaKVCacheConfig,
    geometry_of,
    image_table_index,
    stage_of,
)

if TYPE_CHECKING:
    from jenga.vllm_plugin.orders.step_images import HostedStepImages, StepImages


class ImageRows:
    """The rows of one image, read from its pages."""

    __slots__ = ("_page_ids", "_pages")

    def __init__(self, pages: torch.Tensor, page_ids: Sequence[SmallPageId]) -> None:
        """Describe where the rows are.

        Args:
            pages: Pages of the arena, [num_pages, page_rows, width].
            page_ids: Pages of the image, in order. The null page stands for given-up pages.
        """
        self._pages = pages
        self._page_ids = page_ids

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Copy consecutive rows to a new tensor, [num_rows, width].

        Raises:
            InvariantError: Some of them are in pages that were given up.
        """
        page_rows = self._pages.shape[1]
        start, end, _ = rows.indices(len(self._page_ids) * page_rows)
        first = start // page_rows
        ids = self._page_ids[first : -(-end // page_rows)]
        if NULL_PAGE in ids:
            msg = f"rows {start} to {end} of an image are to be read from pages {ids}"
            raise InvariantError(msg)
        index = async_tensor_h2d(list(ids), dtype=torch.int64, device=self._pages.device)
        read = self._pages[index].flatten(0, 1)
        return read[start - first * page_rows : end - first * page_rows]


class StepEmbeddings(ABC):
    """Stands for the dictionary of encoder outputs in a model runner, image by image.

    It keeps nothing between steps. A subclass knows where the rows are.
    """

    __slots__ = ("_reads", "_writes")

    def __init__(self) -> None:
        """Start without a step."""
        self._reads: dict[str, Any] = {}
        self._writes: dict[str, Any] = {}

    def begin_step(self, images: "StepImages | HostedStepImages | None") -> None:
        """Take the places of a step's images."""
        self._reads = dict(images.reads) if images is not None else {}
        self._writes = dict(images.writes) if images is not None else {}

    def get(self, identifier: str, default: object = None) -> object:
        """Get the rows of an image, if the step reads it and they are written."""
        return self.rows_of(self._reads[identifier]) if identifier in self else default

    def __contains__(self, identifier: object) -> bool:
        return identifier in self._reads and identifier not in self._writes

    def __len__(self) -> int:
        return len(self._reads)

    def __setitem__(self, identifier: str, rows: torch.Tensor) -> None:
        """Write an image that the step encodes, [num_rows, width], to all places that await it.

        Rows beyond those places are left out. No token reads them.

        Raises:
            InvariantError: No place awaits it, it has fewer rows, or rows of another width.
        """
        self.write(identifier, self._writes.get(identifier), rows)
        del self._writes[identifier]

    def update(self, outputs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write several images."""
        for identifier, rows in outputs:
            self[identifier] = rows

    def pop(self, identifier: str, default: object = None) -> object:
        """Do nothing: the scheduler does not tell workers to drop images."""
        return default

    def clear(self) -> None:
        """Forget the step."""
        self.begin_step(None)

    @abstractmethod
    def rows_of(self, place: Any, /) -> object:  # noqa: ANN401
        """Get the rows in a place. A slice of them is a tensor, [num_rows, width]."""

    @abstractmethod
    def write(self, identifier: str, places: Any, rows: torch.Tensor, /) -> None:  # noqa: ANN401
        """Write the rows of an image, [num_rows, width], to all places; see `__setitem__`.

        `places` is None if no place awaits the image.
        """


class ArenaEmbeddings(StepEmbeddings):
    """Rows of images in pages of their own."""

    __slots__ = ("_pages",)

    def __init__(self, pages: torch.Tensor) -> None:
        """Start without a step.

        Args:
            pages: Pages of the arena, [num_pages, page_rows, width]. They are written in place.
        """
        super().__init__()
        self._pages = pages

    def rows_of(self, place: Sequence[SmallPageId], /) -> ImageRows:
        """Get the rows of the image that pages hold."""
        return ImageRows(self._pages, place)

    def write(
        self, identifier: str, places: Sequence[Sequence[SmallPageId]] | None, rows: torch.Tensor, /
    ) -> None:
        """Write an image to the pages of each place that shows it; see `__setitem__`."""
        _, page_rows, width = self._pages.shape
        all_ids = places or ()
        rows = rows[: max(map(len, all_ids), default=0) * page_rows]
        num_pages = -(-len(rows) // page_rows)
        if (
            places is None
            or any(len(ids) != num_pages for ids in all_ids)
            or rows.shape[1] != width
        ):
            msg = (
                f"an encoder made {tuple(rows.shape)} rows of image {identifier!r}, for which "
                f"pages {all_ids} of {page_rows} rows of {width} elements are set aside"
            )
            raise InvariantError(msg)
        filled = rows.new_zeros((num_pages, page_rows, width))
        filled.view(-1, width)[: len(rows)] = rows
        filled = filled.to(self._pages.dtype)
        for ids in all_ids:
            numbers = [number for number, page in enumerate(ids) if page != NULL_PAGE]
            table = async_tensor_h2d(
                [numbers, [ids[number] for number in numbers]],
                dtype=torch.int64,
                device=self._pages.device,
            )
            self._pages[table[1]] = filled[table[0]]


def image_pages(config: JengaKVCacheConfig, arena: torch.Tensor) -> torch.Tensor | None:
    """Get the view of the arena in which image embeddings lie, [num_pages, page_rows, width].

    Args:
        config: Configuration of the worker.
        arena: The arena, i8[arena_bytes].
    """
    geometry = geometry_of(config)
    index = image_table_index(geometry)
    if index is None:
        return None
    table, share = geometry.page_tables[index], stage_of(config.kv_cache_groups).shares[index]
    (layer,), (offset_bytes,) = share.layers, share.layer_offset_bytes
    row = layer.parts[0]
    num_pages = config.num_blocks * table.small_pages_per_large_page
    pages = arena.view(num_pages, share.small_page_bytes)
    end_bytes = offset_bytes + table.tokens_per_page * layer.slot_bytes
    rows = pages[:, offset_bytes:end_bytes].view(getattr(torch, row.dtype))
    return rows.unflatten(1, (table.tokens_per_page, *row.shape))
