"""Image embeddings in pages of their own, kept until the language model has read them."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.policies.base import NEVER, Grain, RequestFacts
from jenga.policies.image_slots import ImageSlots


@dataclass(frozen=True, slots=True)
class ImageEmbeddingPolicy(ImageSlots):
    """Keeps embeddings that are not consumed yet, of the images that have begun.

    Images may overlap, as sound does that belongs to a video. Embeddings of the second one are then
    kept until the first one ends.

    Source: Jenga paper, section 6.2 (KV allocated on demand, embeddings freed on demand).
    """

    def _first_slot(self, facts: RequestFacts, num_processed_tokens: int) -> int:
        """Return the first slot that is not consumed."""
        first = 0
        for image in facts.images:
            if num_processed_tokens < image.end_token:
                return first + image.consumed_tokens(num_processed_tokens)
            first += self.num_pages(image) * self.page_slots
        return first

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots from the first unconsumed embedding on.

        They end with the images that begin before the step's end.
        """
        end = self.slots_wanted(facts, num_tokens)
        return range(min(self._first_slot(facts, num_processed_tokens), end), end)

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Return the token at which the next page, or the rest of the image, is consumed."""
        for image in facts.images:
            if num_processed_tokens < image.end_token:
                consumed = image.consumed_tokens(num_processed_tokens)
                end_of_page = (consumed // page_slots + 1) * page_slots
                return min(image.end_token - image.num_tokens + end_of_page, image.end_token)
        return NEVER

    def peak_slots(self, facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Return the most slots begun and not consumed in a chunk, wherever chunks begin."""
        # The kept slots grow only where an image begins. The chunk's last token is its first one
        # there.
        starts = [
            max(0, image.start_token + 1 - chunk_tokens)
            for image in facts.images
            if image.start_token < num_tokens
        ]
        return max(
            (
                len(self.update_last_access(facts, start, min(start + chunk_tokens, num_tokens)))
                for start in starts
            ),
            default=0,
        )

    def reused_pages(
        self, facts: RequestFacts, is_hit: Sequence[object], _grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """Return the unconsumed pages of every image, if all of them are cached."""
        first_page = self._first_slot(facts, num_tokens) // self.page_slots
        return self.complete_images(facts, is_hit, first_page)
