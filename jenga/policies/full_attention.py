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
