"""Image embeddings in a worker that live in slots of keys and values.

The bytes of a row are spread over the first layers of full attention, as many as it takes. Each of
them holds as many bytes of the row as its keys and values of one token will have. So an embedding
is overwritten by its own token alone, wherever a step ends within a page.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.errors import InvariantError
from jenga.vllm_plugin.arena.layout import JengaGroupSpec, JengaKVCacheConfig
from jenga.vllm_plugin.orders.step_images import RowSlots
from jenga.vllm_plugin.worker.image_pages import StepEmbeddings

_WORD = torch.int32
"""Dtype as which bytes of rows and caches are copied. Keys and values are multiples of it."""


class TokenSlots:
    """The memory of tokens in full attention, seen as rows of images."""

    __slots__ = ("_caches", "_dtype", "_row_words", "_width")

    def __init__(self, caches: Sequence[torch.Tensor], *, width: int, dtype: torch.dtype) -> None:
        """Take the first caches that hold a row together.

        Args:
            caches: Caches of layers, [num_pages, num_kv_heads, page_tokens, elements of a key and a
                value], each contiguous in its last dimension. They are written in place.
            width: Number of elements of a row.
            dtype: Dtype of a row.

        Raises:
            InvariantError: A row is larger than the slots of all caches together.
        """
        row_bytes = width * dtype.itemsize
        self._caches: list[torch.Tensor] = []  # [num_pages, page_tokens, num_kv_heads, words]
        self._row_words: list[int] = []  # of each of them
        for cache in caches:
            if sum(self._row_words) * _WORD.itemsize >= row_bytes:
                break
            by_token = cache.view(_WORD).transpose(1, 2)
            self._caches.append(by_token)
            self._row_words.append(by_token.shape[2] * by_token.shape[3])
        if sum(self._row_words) * _WORD.itemsize < row_bytes:
            msg = (
                f"a row of {row_bytes} bytes is larger than a slot of {len(caches)} layers, of "
                f"{sum(self._row_words) * _WORD.itemsize} bytes"
            )
            raise InvariantError(msg)
        self._width, self._dtype = width, dtype

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return self._width

    def _places(self, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Get the pages of slots and their numbers in them, both i64[num_slots]."""
        cache = self._caches[0]
        places = async_tensor_h2d(
            np.stack(np.divmod(slots, cache.shape[1])), dtype=torch.int64, device=cache.device
        )
        return places[0], places[1]

    def read(self, slots: np.ndarray) -> torch.Tensor:
        """Copy the rows in slots, i64[num_slots], to a new tensor, [num_slots, width]."""
        pages, numbers = self._places(slots)
        pieces = [cache[pages, numbers].flatten(1) for cache in self._caches]
        return torch.cat(pieces, dim=1).view(self._dtype)[:, : self._width]

    def write(self, slots: np.ndarray, rows: torch.Tensor) -> None:
        """Write rows, [num_slots, width], to slots, i64[num_slots]."""
        pages, numbers = self._places(slots)
        row_bytes = rows.to(self._dtype).contiguous().view(torch.uint8)  # [num_slots, bytes]
        filled = row_bytes.new_zeros((len(rows), sum(self._row_words) * _WORD.itemsize))
        filled[:, : row_bytes.shape[1]] = row_bytes
        pieces = filled.view(_WORD).split(self._row_words, dim=1)
        for cache, piece in zip(self._caches, pieces, strict=True):
            cache[pages, numbers] = piece.unflatten(1, cache.shape[2:])


class HostedRows:
    """The rows of one image whose tokens are still to be computed."""

    __slots__ = ("_place", "_slots")

    def __init__(self, slots: TokenSlots, place: RowSlots) -> None:
        self._slots = slots
        self._place = place

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Copy consecutive rows to a new tensor, [num_rows, width].

        Raises:
            InvariantError: Keys and values have replaced some of them.
        """
        first_row, slots = self._place.first_row, self._place.slots
        start, end, _ = rows.indices(first_row + len(slots))
        if start < first_row:
            msg = f"rows {start} to {end} of an image are to be read, {first_row} are replaced"
            raise InvariantError(msg)
        return self._slots.read(slots[start - first_row : end - first_row])


class HostedEmbeddings(StepEmbeddings):
    """Rows of images in the slots of their tokens."""

    __slots__ = ("_slots",)

    def __init__(self, slots: TokenSlots) -> None:
        """Start without a step."""
        super().__init__()
        self._slots = slots

    def rows_of(self, place: RowSlots, /) -> HostedRows:
        """Get the rows of the image that slots hold."""
        return HostedRows(self._slots, place)

    def write(
        self, identifier: str, places: Sequence[RowSlots] | None, rows: torch.Tensor, /
    ) -> None:
        """Write an image wherever a prompt shows it; see `StepEmbeddings.__setitem__`."""
        width = self._slots.width
        if places is None or rows.shape[1] != width:
            msg = (
                f"an encoder made {tuple(rows.shape)} rows of image {identifier!r}, for which "
                f"{places} of {width} elements are set aside"
            )
            raise InvariantError(msg)
        for place in places:
            unread = rows[place.first_row : place.first_row + len(place.slots)]
            if len(unread) != len(place.slots):
                msg = (
                    f"an encoder made {len(rows)} rows of image {identifier!r}, of which those "
                    f"from {place.first_row} on are to fill {len(place.slots)} slots"
                )
                raise InvariantError(msg)
            self._slots.write(place.slots, unread)


def hosted_embeddings(model_runner: Any, config: JengaKVCacheConfig) -> HostedEmbeddings | None:  # noqa: ANN401
    """Make the embeddings of a model runner, if they live in slots of keys and values."""
    for group in config.kv_cache_groups:
        if isinstance(group, JengaGroupSpec) and group.image_row is not None:
            layers = model_runner.vllm_config.compilation_config.static_forward_context
            row = group.image_row.parts[0]
            slots = TokenSlots(
                [layers[name].kv_cache for name in group.layer_names],
                width=row.shape[0],
                dtype=getattr(torch, row.dtype),
            )
            return HostedEmbeddings(slots)
    return None
