"""Common part of the layer types whose slots belong to images, not to tokens of the request.

Each image begins on a page of its own. Its pages then hold nothing else, and any request can find
them by the image's content alone.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from jenga.checks import check_count
from jenga.policies.base import NEVER, Grain, Image, RequestFacts


@dataclass(frozen=True, slots=True)
class ImageSlots:
    """Slots of images, one image after another.

    Attributes:
        page_slots: Number of slots of a page.
    """

    page_slots: int

    is_overwritten = False
    names_images = True

    def __post_init__(self) -> None:
        check_count("page_slots", self.page_slots, least=1)

    def check_facts(self, _facts: RequestFacts, /) -> None:
        """Do nothing. Any request is served, since an encoder's tokens need not be its tokens."""

    def num_pages(self, image: Image) -> int:
        """Return the number of pages of one image."""
        return -(-image.num_tokens // self.page_slots)

    def pages_of(self, facts: RequestFacts, number: int) -> range:
        """Return the numbers of the pages of one image, given its number in the request."""
        start = sum(self.num_pages(image) for image in facts.images[:number])
        return range(start, start + self.num_pages(facts.images[number]))

    def slots_wanted(self, facts: RequestFacts, num_tokens: int) -> int:
        """Return the number of slots of the images that begin before `num_tokens` tokens."""
        return self.page_slots * sum(
            self.num_pages(image) for image in facts.images if image.start_token < num_tokens
        )

    def max_tokens(self, facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /) -> int:
        """Return the number of tokens before the first image without slots."""
        for image in facts.images:
            num_slots -= self.num_pages(image) * self.page_slots
            if num_slots < 0:
                return image.start_token
        return NEVER

    def unfilled_slots(self, facts: RequestFacts, pages: range, /) -> Mapping[int, int]:
        """Return the last page of each image -> its unfilled slots."""
        unfilled: dict[int, int] = {}
        end = 0
        for image in facts.images:
            end += self.num_pages(image)
            if end - 1 in pages:
                unfilled[end - 1] = self.num_pages(image) * self.page_slots - image.num_tokens
        return unfilled

    def set_prefix_length(
        self, facts: RequestFacts, pages: range, _grain: Grain, /
    ) -> Sequence[int]:
        """Return one random length for all pages of an image, so that images are evicted whole.

        One missing page costs a whole run of the encoder. The length is drawn from the content, and
        is at most the length of the prompt. Images are then evicted neither before nor after all
        text of their request.

        Source: Jenga paper, section 5.3.
        """
        lengths: list[int] = []
        for index, image in enumerate(facts.images):
            content = image.content or index.to_bytes(4)
            draw = int.from_bytes(blake2b(content, digest_size=8).digest())
            lengths += [1 + draw % max(1, facts.prompt_tokens)] * self.num_pages(image)
        return lengths[pages.start : pages.stop]

    def final_pages(self, facts: RequestFacts, num_tokens: int, _grain: Grain, /) -> int:
        """Return the number of pages of all images whose first token is computed."""
        if not facts.images:
            return 0
        return self.slots_wanted(facts, num_tokens) // self.page_slots

    def content_keys(
        self, facts: RequestFacts, _prefix_hashes: Sequence[bytes], _grain: Grain, pages: range, /
    ) -> Sequence[Hashable]:
        """Return the image's content and the page's number in it, or None without a name."""
        keys = [
            None if image.content is None else (image.content, page)
            for image in facts.images
            for page in range(self.num_pages(image))
        ]
        return keys[pages.start : pages.stop]

    def get_possible_prefix(
        self, _facts: RequestFacts, _is_hit: Sequence[object], _grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return `at_most_tokens`. The encoder can run again without the text before the image."""
        return at_most_tokens

    def complete_images(
        self, facts: RequestFacts, is_hit: Sequence[object], first_page: int
    ) -> list[int]:
        """Return pages from `first_page` on, of images of which all such pages are cached.

        Images that end after the last page of `is_hit` are left out.
        """
        complete: list[int] = []
        start = 0
        for image in facts.images:
            end = start + self.num_pages(image)
            if end > len(is_hit):
                break
            pages = range(max(start, first_page), end)
            if all(is_hit[page] is not None for page in pages):
                complete += pages
            start = end
        return complete
