"""Sliding window: a token reads itself and a fixed number of tokens before it."""

from dataclasses import dataclass

from jenga.checks import check_count
from jenga.policies.base import RequestFacts, TokenSlots


@dataclass(frozen=True, slots=True)
class SlidingWindowPolicy(TokenSlots):
    """Keeps the tokens of the window. A prefix is hit if the next token's window is cached.

    Attributes:
        window_tokens: Number of tokens that a query reads, including its own.
    """

    window_tokens: int

    def __post_init__(self) -> None:
        check_count("window_tokens", self.window_tokens, least=1)

    def update_last_access(
        self, _facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots of the next query's window and of all tokens after it."""
        return range(max(0, num_processed_tokens - self.window_tokens + 1), num_tokens)

    def next_release(
        self, _facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Return the number of processed tokens at which the window leaves its first page."""
        start = max(0, num_processed_tokens - self.window_tokens + 1)
        end_of_page = (start // page_slots + 1) * page_slots
        return end_of_page + self.window_tokens - 1

    def peak_slots(self, _facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Return the tokens of a chunk and of the window of its first token."""
        return min(num_tokens, self.window_tokens - 1 + chunk_tokens)
