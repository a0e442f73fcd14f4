"""The questions that a layer type answers about its slots and their cached content.

A policy is pure: the same question has the same answer. It knows tokens and the slots of one page
table, where slot 0 is the first of page 0. It counts pages, but knows no page ids. "Processed"
tokens are those whose step is over. The next query is token number `num_processed_tokens`. Ranges
are half-open.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from jenga.checks import check_bytes, check_count

NEVER = 1 << 62
"""Number of tokens that no request reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The tokens that an encoder makes of one image, or of one stretch of audio.

    Attributes:
        start_token: Token of the request at which they are first needed.
        num_tokens: Number of tokens, each of which takes a slot.
        placeholder_tokens: Number of tokens of the request from the first to the last one that
            stands for the image. It may be larger than `num_tokens`, because separators between
            them take no slot. By default, it is `num_tokens`.
        content: Name of the image. Equal names mean equal embeddings. None means that the image is
            never cached.

    Raises:
        ValueError: A number is out of its range, or the content is not bytes.
    """

    start_token: int
    num_tokens: int
    placeholder_tokens: int | None = None
    content: bytes | None = None

    def __post_init__(self) -> None:
        check_count("start_token of an image", self.start_token)
        check_count("num_tokens of an image", self.num_tokens, least=1)
        if self.placeholder_tokens is not None:
            check_count("placeholder_tokens of an image", self.placeholder_tokens, least=1)
        if self.content is not None:
            check_bytes("content of an image", self.content)

    @property
    def end_token(self) -> int:
        """One past the last token of the request that stands for the image."""
        return self.start_token + (self.placeholder_tokens or self.num_tokens)

    def consumed_tokens(self, num_processed_tokens: int) -> int:
        """Return the number of the image's first tokens that no later token of a request reads.

        Separators are assumed to come first, so that the number is never too large.

        Args:
            num_processed_tokens: Number of tokens of the request whose step is over.
        """
        if num_processed_tokens >= self.end_token:
            return self.num_tokens
        return max(0, self.num_tokens - (self.end_token - num_processed_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Facts about a request that are known from its arrival on.

    Attributes:
        prompt_tokens: Number of tokens of its prompt.
        images: Its images, in the order of their first tokens. In cross attention, an encoder's
            tokens are not tokens of the request. There an image may begin before the one before it
            ends.

    Raises:
        ValueError: The number of tokens is not an integer of at least 0, images are out of order,
            or two images of one content have different numbers of tokens.
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
        page_slots: Number of slots of a page.
        hash_tokens: Number of tokens that each further prefix hash covers. It divides `page_slots`,
            or is a multiple of it.
    """

    page_slots: int
    hash_tokens: int

    def __post_init__(self) -> None:
        check_count("page_slots", self.page_slots, least=1)
        check_count("hash_tokens", self.hash_tokens, least=1)


class LayerPolicy(Protocol):
    """How requests use, keep and find again the slots of one layer type.

    Source: Jenga paper, section 5 (`update_last_access`, `set_prefix_length`,
    `get_possible_prefix`). There these methods change the evictor's data. Here they return what to
    change.
    """

    def check_facts(self, facts: RequestFacts, /) -> None:
        """Refuse a request that the layer type cannot serve.

        Raises:
            ValueError: The layer type cannot serve it. The message says why.
        """
        ...

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots that the step of tokens `num_processed_tokens..num_tokens` touches.

        Their pages get the time of that step. No later step touches a slot that existed before and
        is outside the range. Pages of such slots keep the time of the step before, and are given
        up.
        """
        ...

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Return the processed tokens at which the touched slots next leave a page, or `NEVER`."""
        ...

    def max_tokens(self, facts: RequestFacts, num_processed_tokens: int, num_slots: int, /) -> int:
        """Return the most tokens for which `num_slots` slots suffice, or `NEVER`."""
        ...

    def peak_slots(self, facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Return the most slots touched by one step until `num_tokens` tokens are computed.

        Each step computes at most `chunk_tokens` tokens.
        """
        ...

    def unfilled_slots(self, facts: RequestFacts, pages: range, /) -> Mapping[int, int]:
        """Return pages in the given range -> number of their slots that nothing fills."""
        ...

    def set_prefix_length(
        self, facts: RequestFacts, pages: range, grain: Grain, /
    ) -> Sequence[int]:
        """Return the place of each page among those of equal time, in tokens.

        In the paper the page with the greatest number is evicted first, and pages of the same
        tokens have the same number in every layer type. The manager orders the pages of all types
        in this way itself (`jenga.arena.ranks`), and does not call this.
        """
        ...

    def final_pages(self, facts: RequestFacts, num_tokens: int, grain: Grain, /) -> int:
        """Return the number of first pages whose content is final after `num_tokens` tokens."""
        ...

    def content_keys(
        self, facts: RequestFacts, prefix_hashes: Sequence[bytes], grain: Grain, pages: range, /
    ) -> Sequence[Hashable]:
        """Return the keys of the content of pages, as far as the hashes go."""
        ...

    def get_possible_prefix(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the longest prefix, in tokens, from which a request can go on with cached content.

        Ask again for less than the last answer to find every possible prefix.

        Args:
            facts: Facts of the request.
            is_hit: For each key of `content_keys`, None if it is not cached.
            grain: Units of the page table.
            at_most_tokens: Upper limit of the answer.
        """
        ...

    def reused_pages(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """Return the numbers of the cached pages with which a request goes on from a prefix."""
        ...

    @property
    def is_overwritten(self) -> bool:
        """Whether requests write over their pages, so that cached pages must be copied first."""
        ...

    @property
    def names_images(self) -> bool:
        """Whether content is named by images, and found again after any text."""
        ...


ALL_PAGES = range(NEVER)
"""Range that asks `content_keys` for as many keys as the hashes give."""


class TokenSlots(ABC):
    """Answers of the layer types with one slot for each token of the request.

    `update_last_access` and `peak_slots` are left to each type. The other answers follow from them.
    """

    __slots__ = ()

    is_overwritten = False
    names_images = False

    @abstractmethod
    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots that a step touches; see `LayerPolicy`."""

    @abstractmethod
    def peak_slots(self, facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Return the most slots that one step touches; see `LayerPolicy`."""

    def check_facts(self, _facts: RequestFacts, /) -> None:
        """Do nothing. Any request is served."""
        return

    def _first_page(self, facts: RequestFacts, num_tokens: int, page_slots: int) -> int:
        """Return the first page that the token after `num_tokens` tokens touches."""
        return self.update_last_access(facts, num_tokens, num_tokens).start // page_slots

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Return where the touched slots leave their first page, found by bisection."""
        first = self._first_page(facts, num_processed_tokens, page_slots)
        low, step = num_processed_tokens, 1
        while self._first_page(facts, low + step, page_slots) == first:
            low += step
            step *= 2
            if low > NEVER:
                return NEVER
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self._first_page(facts, middle, page_slots) == first:
                low = middle
            else:
                high = middle
        return high

    def get_possible_prefix(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the longest prefix after which no touched page is missing."""
        page_slots = grain.page_slots
        end = last_gapless_end(
            is_hit,
            min(len(is_hit), at_most_tokens // page_slots),
            lambda end: self._first_page(facts, end * page_slots, page_slots),
        )
        return end * page_slots

    def reused_pages(
        self, facts: RequestFacts, _is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """Return the full pages that the token after the prefix touches."""
        end = num_tokens // grain.page_slots
        return range(min(self._first_page(facts, num_tokens, grain.page_slots), end), end)

    def unfilled_slots(self, _facts: RequestFacts, _pages: range, /) -> Mapping[int, int]:
        """Return nothing, since every slot is filled."""
        return {}

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """Return one token for each slot, given up or not."""
        return num_slots

    def set_prefix_length(
        self, _facts: RequestFacts, pages: range, grain: Grain, /
    ) -> Sequence[int]:
        """Return the number of tokens up to the end of each page."""
        slots = grain.page_slots
        return range((pages.start + 1) * slots, (pages.stop + 1) * slots, slots)

    def final_pages(self, _facts: RequestFacts, num_tokens: int, grain: Grain, /) -> int:
        """Return the number of full pages."""
        return num_tokens // grain.page_slots

    def content_keys(
        self, _facts: RequestFacts, prefix_hashes: Sequence[bytes], grain: Grain, pages: range, /
    ) -> Sequence[Hashable]:
        """Return the hash of all tokens up to the end of each page.

        Pages that share a hash are numbered in addition.
        """
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
"""Number of pages searched together at first, few in case one is missing.

It doubles each time, for long windows.
"""


def last_gapless_end(is_hit: Sequence[object], end: int, first_needed: Callable[[int], int]) -> int:
    """Return the last number of pages, at most `end`, before which no needed page is missing.

    Args:
        is_hit: For each page, None if it is not cached.
        end: Number of pages to begin with.
        first_needed: Returns the first page that a request needs if it goes on after a number of
            pages.
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
