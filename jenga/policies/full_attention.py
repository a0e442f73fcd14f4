"""Full attention: every token reads itself and all tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.policies.base import NEVER, Grain, RequestFacts, TokenSlots


@dataclass(frozen=True, slots=True)
class FullAttentionPolicy(TokenSlots):
    """Keeps every token. A prefix is hit if all of it is cached."""

    def update_last_access(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots of all tokens."""
        return range(num_tokens)

    def next_release(
        self, _facts: RequestFacts, _num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Return `NEVER`."""
        return NEVER

    def peak_slots(self, _facts: RequestFacts, num_tokens: int, _chunk_tokens: int, /) -> int:
        """Return the number of all tokens."""
        return num_tokens

    def get_possible_prefix(
        self, _facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the longest prefix without a missing page."""
        try:
            num_hit = is_hit.index(None)
        except ValueError:
            num_hit = len(is_hit)
        return min(num_hit, at_most_tokens // grain.page_slots) * grain.page_slots


@dataclass(frozen=True, slots=True)
class ImageHostPolicy(FullAttentionPolicy):
    """Full attention whose slots hold the embeddings of images until keys and values replace them.

    The step that begins an image takes the slots of all tokens up to the image's end. A slot is
    final only once its keys and values are there, as in full attention.

    Source: Jenga paper, section 6.2 (KV allocated in full, embeddings in its place).
    """

    def update_last_access(
        self, facts: RequestFacts, _num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots of all tokens, and of all images that begin among them."""
        ends = [image.end_token for image in facts.images if image.start_token < num_tokens]
        return range(max([num_tokens, *ends]))

    def max_tokens(self, facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /) -> int:
        """Return one token for each slot, but none of an image that ends behind the slots."""
        starts = [image.start_token for image in facts.images if image.end_token > num_slots]
        return min([num_slots, *starts])

    def peak_slots(self, facts: RequestFacts, num_tokens: int, _chunk_tokens: int, /) -> int:
        """Return the number of all tokens, or that up to the end of the last image begun."""
        return len(self.update_last_access(facts, 0, num_tokens))
