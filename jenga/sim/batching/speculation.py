"""Speculative decoding in a replay: how many tokens a step drafts, and how many are right."""

from dataclasses import dataclass
from math import log
from zlib import crc32

from jenga.sim.batching.arena import Chunk

_DRAWS = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Tokens drafted for each step of a decoding request.

    Attributes:
        draft_tokens: How many.
        acceptance: Probability that a drafted token is what the model says, if those before it are.
        lookahead_tokens: Slots beyond the step's own that whatever drafts writes to: as many as it
            drafts where it is a model, none for n-grams.
        draft_queries: Tokens of the step's budget that drafting takes for each request beside the
            request's own: one where a model drafts, none for n-grams.
    """

    draft_tokens: int
    acceptance: float
    lookahead_tokens: int = 0
    draft_queries: int = 0

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            msg = f"draft_tokens must be at least 1 with an acceptance, got {self.draft_tokens}"
            raise ValueError(msg)
        if not 0 <= self.acceptance <= 1:
            msg = f"acceptance must be a probability, got {self.acceptance:g}"
            raise ValueError(msg)

    def accepted(self, name: str, num_tokens: int, num_drafted: int) -> int:
        """Get how many drafted tokens are right.

        The same request at the same length always has the same answer, whatever manager runs it.

        Args:
            name: Of the request.
            num_tokens: Tokens that it has.
            num_drafted: Tokens drafted.
        """
        if self.acceptance in (0, 1):
            return round(self.acceptance) * num_drafted
        draw = (crc32(f"{name} {num_tokens}".encode()) + 1) / _DRAWS  # in (0, 1]
        return min(num_drafted, int(log(draw) / log(self.acceptance)))

    def num_right(self, chunk: Chunk) -> int:
        """Get how many of the tokens drafted for a step are right; those of padding never are."""
        if chunk.is_padded:
            return 0
        return self.accepted(chunk.active.name, chunk.active.num_tokens, chunk.num_drafted)

    @property
    def mean_tokens(self) -> float:
        """Tokens that a step of a decoding request yields on average."""
        p = self.acceptance
        return sum(p**number for number in range(self.draft_tokens + 1))
