"""Chunked local attention: a token reads itself and the tokens before it in its own chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.checks import check_count
from jenga.policies.base import Grain, RequestFacts, TokenSlots, last_gapless_end


@dataclass(frozen=True, slots=True)
class ChunkedLocalPolicy(TokenSlots):
    """Keeps the tokens of the current chunk. A prefix is hit if the tokens of its last chunk are.

    Attributes:
        chunk_tokens: Number of tokens of a chunk of the attention, not of a chunked prefill.
    """

    chunk_tokens: int

    def __post_init__(self) -> None:
        check_count("chunk_tokens", self.chunk_tokens, least=1)

    def _chunk_start(self, token: int) -> int:
        return token // self.chunk_tokens * self.chunk_tokens

    def update_last_access(
        self, _facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return the slots from the start of the next query's chunk on."""
        return range(self._chunk_start(num_processed_tokens), num_tokens)

    def next_release(
        self, _facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Return the first chunk start at or after the end of the page where this chunk begins."""
        end_of_page = (self._chunk_start(num_processed_tokens) // page_slots + 1) * page_slots
        return -(-end_of_page // self.chunk_tokens) * self.chunk_tokens

    def peak_slots(self, _facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Return the tokens of a prefill chunk and those that its first token reads."""
        return min(num_tokens, self.chunk_tokens - 1 + chunk_tokens)

    def get_possible_prefix(
        self, _facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the longest prefix whose last chunk has no missing page."""
        page_slots = grain.page_slots
        end = last_gapless_end(
            is_hit,
            min(len(is_hit), at_most_tokens // page_slots),
            lambda end: self._chunk_start(end * page_slots) // page_slots,
        )
        return end * page_slots

    def reused_pages(
        self, _facts: RequestFacts, _is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """Return the pages of the next token's chunk."""
        end = num_tokens // grain.page_slots
        return range(min(self._chunk_start(num_tokens) // grain.page_slots, end), end)
