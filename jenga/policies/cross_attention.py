"""Cross attention: every token reads all tokens of an encoder."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.policies.base import NEVER, Grain, RequestFacts
from jenga.policies.image_slots import ImageSlots


@dataclass(frozen=True, slots=True)
class CrossAttentionPolicy(ImageSlots):
    """Keeps every image. All pages of an image are hit or none, whatever text is before it."""

    def update_last_access(
        self, facts: RequestFacts, _num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots of the images that begin before the step's end."""
        return range(self.slots_wanted(facts, num_tokens))

    def next_release(
        self, _facts: RequestFacts, _num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Return `NEVER`."""
        return NEVER

    def peak_slots(self, facts: RequestFacts, num_tokens: int, _chunk_tokens: int, /) -> int:
        """Return the slots of all images that begin within `num_tokens` tokens."""
        return self.slots_wanted(facts, num_tokens)

    def reused_pages(
        self, facts: RequestFacts, is_hit: Sequence[object], _grain: Grain, _num_tokens: int, /
    ) -> Sequence[int]:
        """Return the pages of every image cached whole, before the prefix's end or after it."""
        return self.complete_images(facts, is_hit, 0)
