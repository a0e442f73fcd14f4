"""Sliding window: a token reads itself and a fixed number before it."""

from dataclasses import dataclass

from jenga.policies.base import RequestFacts


@dataclass(frozen=True, slots=True)
class SlidingWindowPolicy:
    """Keeps the tokens of the window; a prefix is hit if those before its end are.

    Attributes:
        window_tokens: Tokens a query reads, itself included.
    """

    window_tokens: int

    def update_last_access(
        self, _facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """The next query's window, and all tokens after it."""
        return range(max(0, num_processed_tokens - self.window_tokens + 1), num_tokens)

    def next_release(
        self, _facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Where the window leaves the page in which it begins."""
        start = max(0, num_processed_tokens - self.window_tokens + 1)
        end_of_page = (start // page_slots + 1) * page_slots
        return end_of_page + self.window_tokens - 1

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """One token for each slot, given up or not."""
        return num_slots

    def peak_slots(self, _facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """A chunk and the window of its first token."""
        return min(num_tokens, self.window_tokens - 1 + chunk_tokens)

    def set_prefix_length(self, _facts: RequestFacts, slot_end: int, /) -> int:
        """Tokens up to the end of the page."""
        return slot_end
