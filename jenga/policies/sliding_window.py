"""Sliding window: a token reads itself and a fixed number of tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.checks import check_count
from jenga.policies.base import Grain, RequestFacts, TokenSlots, last_gapless_end


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

    def get_possible_prefix(
        self, _facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the longest prefix whose window has no missing page."""
        page_slots = grain.page_slots
        end = last_gapless_end(
            is_hit,
            min(len(is_hit), at_most_tokens // page_slots),
            lambda end: max(0, end * page_slots - self.window_tokens + 1) // page_slots,
        )
        return end * page_slots

    def reused_pages(
        self, _facts: RequestFacts, _is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """Return the pages of the next token's window."""
        end = num_tokens // grain.page_slots
        return range(min(max(0, num_tokens - self.window_tokens + 1) // grain.page_slots, end), end)
