"""Chunked local attention: a token reads itself and the tokens before it in its own chunk."""

from dataclasses import dataclass

from jenga.checks import check_count
from jenga.policies.base import RequestFacts, TokenSlots


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
