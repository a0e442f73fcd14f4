"""Chunked local attention: a token reads those before it in its own chunk."""

from dataclasses import dataclass

from jenga.policies.base import RequestFacts


@dataclass(frozen=True, slots=True)
class ChunkedLocalPolicy:
    """Keeps the tokens of the current chunk; a prefix is hit if those before its end are.

    Attributes:
        chunk_tokens: Tokens of a chunk of the attention (not of a prefill).
    """

    chunk_tokens: int

    def update_last_access(
        self, _facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """From the start of the next query's chunk on."""
        return range(num_processed_tokens // self.chunk_tokens * self.chunk_tokens, num_tokens)

    def next_release(
        self, _facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """The first start of a chunk at or after the end of the page where this one begins."""
        start = num_processed_tokens // self.chunk_tokens * self.chunk_tokens
        end_of_page = (start // page_slots + 1) * page_slots
        return -(-end_of_page // self.chunk_tokens) * self.chunk_tokens

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """One token for each slot, given up or not."""
        return num_slots

    def peak_slots(self, _facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """A chunk of the prefill and what its first token reads."""
        return min(num_tokens, self.chunk_tokens - 1 + chunk_tokens)

    def set_prefix_length(self, _facts: RequestFacts, slot_end: int, /) -> int:
        """Tokens up to the end of the page."""
        return slot_end
