"""Full attention: every token reads all before it."""

from dataclasses import dataclass

from jenga.policies.base import NEVER, RequestFacts


@dataclass(frozen=True, slots=True)
class FullAttentionPolicy:
    """Keeps every token; a prefix is hit if all of it is."""

    def update_last_access(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """All tokens."""
        return range(num_tokens)

    def next_release(
        self, _facts: RequestFacts, _num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Never."""
        return NEVER

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """One token for each slot."""
        return num_slots

    def peak_slots(self, _facts: RequestFacts, num_tokens: int, _chunk_tokens: int, /) -> int:
        """All tokens."""
        return num_tokens

    def set_prefix_length(self, _facts: RequestFacts, slot_end: int, /) -> int:
        """Tokens up to the end of the page."""
        return slot_end
