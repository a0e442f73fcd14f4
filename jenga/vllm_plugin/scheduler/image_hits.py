"""Images that layers of cross attention read: their hits, and the steps that encode them.

An image has pages of its own, which are found again by its content behind any text. It takes them
in the step that computes its token of the prompt, and every later token of its group reads them.

An image is looked up when its request is admitted, if its token is computed in that first step. An
image that comes later in the prompt is looked up in the step that begins it.
"""

from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from jenga.geometry import Geometry
from jenga.policies.base import Image
from jenga.spec import CrossAttention
from jenga.tables.request import MISSING
from jenga.vllm_plugin.specs.image_features import image_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.v1.request import Request

    from jenga.tables.request import PrefixHit


class ImageHits:
    """Knows the images of a request, and which of them a lookup found.

    It has the interface of `EncoderHits`.
    """

    __slots__ = ("_found", "_found_by", "_tables")

    def __init__(self, geometry: Geometry) -> None:
        """Start without a lookup.

        Args:
            geometry: Geometry of the arena.
        """
        self._tables = {
            index: table.tokens_per_page
            for index, table in enumerate(geometry.page_tables)
            if isinstance(table.layer_type, CrossAttention)
        }
        self._found_by: str | None = None
        self._found: frozenset[int] = frozenset()

    @property
    def table_indices(self) -> "Collection[int]":
        """Page tables of cross attention."""
        return self._tables.keys()

    def can_name(self, _request: "Request") -> bool:
        """Return True: an image is a token of the prompt, so hashes include each."""
        return True

    def images(self, request: "Request") -> tuple[Image, ...]:
        """Get the images of a request."""
        return tuple(
            Image(
                start_token=feature.mm_position.offset,
                num_tokens=(num_tokens := image_tokens(feature)),
                content=_content(request, feature.identifier, num_tokens),
            )
            for feature in request.mm_features
        )

    def most_hit_tokens(self, request: "Request") -> int:
        """Get the largest number of tokens that may be hit. The last one is computed for logits."""
        return request.num_tokens - 1

    def settle(self, request: "Request", hit: "PrefixHit") -> "PrefixHit":
        """Remove images from a hit that only some page tables of cross attention have.

        The encoder writes the pages of all layers. If it ran for some of them, it would write pages
        that other requests read.

        Returns:
            The hit. `found` refers to it from now on.
        """
        images = hit.facts.images
        complete = [
            _complete(hit, index, page_tokens) for index, page_tokens in self._tables.items()
        ]
        found = frozenset[int]().union(*complete).intersection(*complete)
        pages, has_missing = list(hit.pages), list(hit.has_missing)
        host_pages = list(hit.host_pages)
        for (index, page_tokens), own in zip(self._tables.items(), complete, strict=True):
            if own != found:
                kept = {
                    page
                    for number, place in enumerate(_places(images, page_tokens))
                    if number in found
                    for page in place
                }
                pages[index] = [
                    page if number in kept else MISSING
                    for number, page in enumerate(hit.pages[index])
                ]
                host_pages[index] = {
                    number: page for number, page in hit.host_pages[index].items() if number in kept
                }
                has_missing[index] = True
        self._found_by, self._found = request.request_id, found
        return replace(
            hit,
            pages=tuple(pages),
            host_pages=tuple(host_pages),
            has_missing=tuple(has_missing),
        )

    def are_found(self, _request: "Request") -> bool:
        """Return False. It is asked only of models with an encoder of their own."""
        return False

    def found(self, request: "Request") -> frozenset[int]:
        """Get the numbers of the request's images that its lookup found, if it was the last one."""
        return self._found if self._found_by == request.request_id else frozenset()


def _places(images: "Sequence[Image]", page_tokens: int) -> "list[range]":
    """Get the numbers of each image's pages in a page table."""
    ends = accumulate(-(-image.num_tokens // page_tokens) for image in images)
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _complete(hit: "PrefixHit", index: int, page_tokens: int) -> set[int]:
    """Get the numbers of the images whose pages were all found, in the arena or in host memory."""
    pages, on_host = hit.pages[index], hit.host_pages[index]
    return {
        number
        for number, place in enumerate(_places(hit.facts.images, page_tokens))
        if place.stop <= len(pages)
        and all(pages[page] != MISSING or page in on_host for page in place)
    }


def _content(request: "Request", identifier: str, num_tokens: int) -> bytes:
    """Hash an image, and the cache salt of its request."""
    name = (identifier, num_tokens, request.cache_salt)
    return blake2b(repr(name).encode(), digest_size=32).digest()


def images_to_encode(
    request: "Request",
    found: frozenset[int],
    num_computed_tokens: int,
    num_new_tokens: int,
    budget_tokens: int,
    *,
    is_admitted: bool,
) -> tuple[list[int], int, int]:
    """Choose the images that a step encodes for a request.

    These are the images that begin within the step and were not found. At an admission, they are
    also the images before the step's tokens that were not found: text can be hit while an image
    before it was evicted.

    Args:
        request: The request.
        found: Numbers of its images that were found. They are of an admission only.
        num_computed_tokens: Number of tokens before the step, with those of a hit.
        num_new_tokens: Number of tokens that the step may compute.
        budget_tokens: Number of image tokens that the step may still encode. Images before the
            step's tokens do not count: all must be encoded at once, and could be more than any
            budget.
        is_admitted: Whether the step admits the request.

    Returns:
        The numbers of the images, the number of tokens that the step computes, and the budget that
        is left. The step ends before an image that is beyond the budget.
    """
    chosen: list[int] = []
    for number, feature in enumerate(request.mm_features):
        start_token = feature.mm_position.offset
        if start_token >= num_computed_tokens + num_new_tokens:
            break
        is_before = start_token < num_computed_tokens
        if number in found or (is_before and not is_admitted):
            continue
        num_tokens = image_tokens(feature)
        if not is_before:
            if num_tokens > budget_tokens:
                num_new_tokens = start_token - num_computed_tokens
                break
            budget_tokens -= num_tokens
        chosen.append(number)
    if not num_new_tokens:
        return [], 0, budget_tokens
    return chosen, num_new_tokens, budget_tokens


class NoEncoderCache(EncoderCacheManager):
    """An encoder cache without content, for images whose outputs go to pages at once."""

    def allocate(self, request: "Request", input_id: int) -> None:
        """Keep nothing."""

    def check_and_update_cache(self, request: Any, input_id: int) -> bool:  # noqa: ANN401
        """Return False: nothing is cached here."""
        return False
