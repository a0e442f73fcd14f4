"""Image embeddings that live in the slots of their tokens until keys and values replace them.

A request gets the slots of a whole image in the step that begins it, so an embedding needs no
memory of its own. It is lost once the step of its token has run. No other request finds it then:
another request with the image encodes it again, unless it finds the keys and values.
"""

from typing import TYPE_CHECKING

import numpy as np

from jenga.manager import Manager
from jenga.vllm_plugin.orders.step_images import HostedStepImages, RowSlots
from jenga.vllm_plugin.scheduler.encoder_cache import ImageBook

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HostedBook(ImageBook):
    """Records which images running requests have encoded and not read to the end."""

    __slots__ = ("_page_tokens",)

    def __init__(self, manager: Manager, table_index: int) -> None:
        """Start without requests.

        Args:
            manager: Manager of the arena.
            table_index: Page table whose slots the embeddings live in.
        """
        super().__init__(manager, table_index)
        self._page_tokens = manager.geometry.page_tables[table_index].tokens_per_page

    def step_starts(self) -> list["Request"]:
        """Forget the step before.

        Returns:
            No requests, because no image can be found by others.
        """
        super().step_starts()
        return []

    def has(self, request: "Request", number: int) -> bool:
        """Whether an input of a request need not be encoded, because its slots hold it."""
        name, identifier = request.request_id, request.mm_features[number].identifier
        if number in self._held.get(name, ()):
            return True
        # vLLM asks again after an allocation for inputs that occur twice in a step.
        if self._encoding.get(identifier) != name or not self._has_place(name, number):
            return False
        self._add(name, number)
        return True

    def _has_place(self, request_id: str, number: int) -> bool:
        """Whether a request of the step has slots for a whole input."""
        return self._rows(request_id, number) is not None

    def orders(self) -> HostedStepImages | None:
        """Get the slots of all images that the step reads or writes. None if there are none."""
        from vllm.multimodal.utils import get_mm_features_in_window

        reads: dict[str, RowSlots] = {}
        for name, (request, start_token, end_token) in self._step.items():
            held = self._held.get(name)
            if not held:
                continue
            low, high = get_mm_features_in_window(
                request.mm_features, start=start_token, end=end_token
            )
            for number in sorted(held.intersection(range(low, high))):
                identifier = request.mm_features[number].identifier
                rows, known = self._rows(name, number), reads.get(identifier)
                # The slots with the most rows of an image serve all requests that show it.
                if rows is not None and (known is None or rows.first_row < known.first_row):
                    reads[identifier] = rows
        writes: dict[str, list[RowSlots]] = {}
        for name, number in self._written:
            identifier = self._step[name][0].mm_features[number].identifier
            targets, rows = writes.setdefault(identifier, []), self._rows(name, number)
            if rows is not None:
                targets.append(rows)
        return HostedStepImages(reads=reads, writes=writes) if reads or writes else None

    def _rows(self, request_id: str, number: int) -> RowSlots | None:
        """Get the slots of an image's rows whose tokens the step has still to compute.

        They are None if the request has no slots for the whole image.
        """
        request, start_token, _ = self._step[request_id]
        place = request.mm_features[number].mm_position
        rows = np.arange(place.length)
        tokens = place.offset + (rows if place.is_embed is None else rows[place.is_embed.numpy()])
        pages = np.asarray(self._manager.page_table(request_id, self._table_index), np.int64)
        if tokens[-1] // self._page_tokens >= len(pages):
            return None
        first_row = int(np.searchsorted(tokens, start_token))
        page, slot = np.divmod(tokens[first_row:], self._page_tokens)
        return RowSlots(first_row=first_row, slots=pages[page] * self._page_tokens + slot)
