"""The questions a layer type answers about its slots and their cached content.

A policy is pure: same question, same answer. It knows tokens and the slots of one page table
(slot 0 is the first of page 0) and counts pages, but knows no page ids. "Processed" tokens are
those whose step is over; the next query is token number `num_processed_tokens`. Ranges are
half-open.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from jenga.checks import check_bytes, check_count

NEVER = 1 << 62
"""A number of tokens that no request reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Tokens that an encoder makes of one image, or of one stretch of audio.

    Attributes:
        start_token: The token of the request at which they are first wanted.
        num_tokens: How many.
        content: Names the image: equal contents give equal embeddings. None: never cached.

    Raises:
        ValueError: A number is out of its range, or the content is not bytes.
    """

    start_token: int
    num_tokens: int
    content: bytes | None = None

    def __post_init__(self) -> None:
        check_count("start_token of an image", self.start_token)
        check_count("num_tokens of an image", self.num_tokens, least=1)
        if self.content is not None:
            check_bytes("content of an image", self.content)

    @property
    def end_token(self) -> int:
        """One past the last token, where the image's tokens are tokens of the request."""
        return self.start_token + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What is known of a request from its arrival on.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        images: Its images, in the order of their first tokens. Where an encoder's tokens are not
            those of the request, as in cross attention, one may begin before another's end.

    Raises:
        ValueError: The tokens are no integer of at least 0, images are out of order, or two of one
            content have different numbers of tokens.
    """

    prompt_tokens: int = 0
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        check_count("prompt_tokens", self.prompt_tokens)
        if self.images:
            self._check_images()

    def _check_images(self) -> None:
        for image, after in pairwise(self.images):
            if after.start_token < image.start_token:
                msg = (
                    f"images must be in the order of their first tokens, got one that begins at "
                    f"{after.start_token} after one at {image.start_token}"
                )
                raise ValueError(msg)
        num_tokens: dict[bytes | None, int] = {}
        for image in self.images:
            known = num_tokens.setdefault(image.content, image.num_tokens)
            if image.content is not None and known != image.num_tokens:
                msg = (
                    f"images of one content must have as many tokens, got {known} and "
                    f"{image.num_tokens} of {image.content!r}"
                )
                raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """The units in which a page table is filled and cached.

    Attributes:
        page_slots: Slots of a page.
        hash_tokens: Tokens that each further prefix hash covers; divides `page_slots`, or is a
            multiple of it.
    """

    page_slots: int
    hash_tokens: int

    def __post_init__(self) -> None:
        check_count("page_slots", self.page_slots, least=1)
        check_count("hash_tokens", self.hash_tokens, least=1)


class LayerPolicy(Protocol):
    """How requests use, keep and find again the slots of one layer type.

    Source: Jenga paper, section 5 (`update_last_access`, `set_prefix_length`,
    `get_possible_prefix`). There they change the evictor's books; here they say what to change.
    """

    def check_facts(self, facts: RequestFacts, /) -> None:
        """Refuse a request that the layer type cannot serve.

        Raises:
            ValueError: Says why.
        """
        ...

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Slots that the step computing tokens `num_processed_tokens..num_tokens` touches.

        Their pages carry that step's time. No later step touches a slot outside the range that
        was there before: such pages keep the time of the step before and are given up.
        """
        ...

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Processed tokens at which the touched slots next leave a page, or `NEVER`."""
        ...

    def max_tokens(self, facts: RequestFacts, num_processed_tokens: int, num_slots: int, /) -> int:
        """Most tokens for which so many slots suffice, or `NEVER`."""
        ...

    def peak_slots(self, facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Most slots touched by one step until `num_tokens` tokens are computed, in such chunks."""
        ...

    def unfilled_slots(self, facts: RequestFacts, pages: range, /) -> Mapping[int, int]:
        """Pages between the first and the last touched slot -> slots there that nothing fills."""
        ...

    def set_prefix_length(
        self, facts: RequestFacts, pages: range, grain: Grain, /
    ) -> Sequence[int]:
        """Place of each page among those of equal time, in tokens; the greatest goes first.

        Pages of the same tokens agree in every layer type, so that they go together.
        """
        ...

    def final_pages(self, facts: RequestFacts, num_tokens: int, grain: Grain, /) -> int:
        """Pages from the first on whose content is final once so many tokens are computed."""
        ...

    def content_keys(
        self, facts: RequestFacts, prefix_hashes: Sequence[bytes], grain: Grain, pages: range, /
    ) -> Sequence[Hashable]:
        """Keys of the content of pages, as far as the hashes go."""
        ...

    def get_possible_prefix(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Longest prefix, in tokens, from which a request can go on with what is cached.

        Every possible prefix is found by asking again for less than the last answer.

        Args:
            facts: Of the request.
            is_hit: Of each key of `content_keys`, None if it is not cached.
            grain: Of the page table.
            at_most_tokens: The answer is no longer.
        """
        ...

    def reused_pages(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """Numbers of the cached pages with which a request goes on from such a prefix."""
        ...

    @property
    def is_overwritten(self) -> bool:
        """Whether requests write over their pages, so that cached ones must be copied first."""
        ...

    @property
    def names_images(self) -> bool:
        """Whether content is named by images, and found again behind any text."""
        ...


ALL_PAGES = range(NEVER)
"""Asks `content_keys` for as many keys as the hashes give."""


class TokenSlots:
    """What holds for every layer type with one slot for each token of the request."""

    __slots__ = ()

    is_overwritten = False
    names_images = False

    def check_facts(self, _facts: RequestFacts, /) -> None:
        """Any request is served."""

    def unfilled_slots(self, _facts: RequestFacts, _pages: range, /) -> Mapping[int, int]:
        """Every slot is filled."""
        return {}

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """One token for each slot, given up or not."""
        return num_slots

    def set_prefix_length(
        self, _facts: RequestFacts, pages: range, grain: Grain, /
    ) -> Sequence[int]:
        """Tokens up to the end of the page."""
        slots = grain.page_slots
        return range((pages.start + 1) * slots, (pages.stop + 1) * slots, slots)

    def final_pages(self, _facts: RequestFacts, num_tokens: int, grain: Grain, /) -> int:
        """The full pages."""
        return num_tokens // grain.page_slots

    def content_keys(
        self, _facts: RequestFacts, prefix_hashes: Sequence[bytes], grain: Grain, pages: range, /
    ) -> Sequence[Hashable]:
        """The hash of all tokens up to the end of the page; with a number where pages share it."""
        page_slots, hash_tokens = grain.page_slots, grain.hash_tokens
        if page_slots == hash_tokens:
            return prefix_hashes[pages.start : pages.stop]
        if page_slots > hash_tokens:
            ratio = page_slots // hash_tokens
            return prefix_hashes[(pages.start + 1) * ratio - 1 : pages.stop * ratio : ratio]
        ratio = hash_tokens // page_slots
        end = min(pages.stop, len(prefix_hashes) * ratio)
        return [(prefix_hashes[page // ratio], page % ratio) for page in range(pages.start, end)]


_SCAN_PAGES = 64
"""Pages looked at together at first: few where one is missing; then more, in a long window."""


def last_gapless_end(is_hit: Sequence[object], end: int, first_needed: Callable[[int], int]) -> int:
    """The last number of pages, at most `end`, before which no page needed is missing.

    Args:
        is_hit: Of each page, None if it is not cached.
        end: Where to begin.
        first_needed: The first page needed by a request that goes on after so many pages.
    """
    checked, num_scanned = end, _SCAN_PAGES  # pages from `checked` to `end` are there
    while checked > (needed := first_needed(end)):
        start = max(needed, checked - num_scanned)
        pages = is_hit[start:checked]
        if None in pages:
            last_missing = len(pages) - 1 - pages[::-1].index(None)
            end = checked = start + last_missing
            num_scanned = _SCAN_PAGES
        else:
            checked = start
            num_scanned *= 2
    return end
