"""Speculative decoding in a replay: how many tokens a step drafts, and how many are accepted."""

from dataclasses import dataclass
from math import log
from zlib import crc32

from jenga.sim.batching.arena import Chunk

_DRAWS = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafts for each step of a decoding request.

    Attributes:
        draft_tokens: Number of tokens drafted for a step.
        acceptance: Probability that a drafted token is accepted, given that all before it are.
        lookahead_tokens: Slots beyond the step's own that the drafter writes to: `draft_tokens` if
            a model drafts, 0 for n-grams.
        draft_queries: Tokens of the step's budget that drafting takes for each request, in addition
            to the request's own: 1 if a model drafts, 0 for n-grams.
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
        """Return how many drafted tokens are accepted.

        The answer for a request at a given length is always the same, whatever manager runs it.

        Args:
            name: Name of the request.
            num_tokens: Number of tokens that it has.
            num_drafted: Number of drafted tokens.
        """
        if self.acceptance in (0, 1):
            return round(self.acceptance) * num_drafted
        draw = (crc32(f"{name} {num_tokens}".encode()) + 1) / _DRAWS  # in (0, 1]
        return min(num_drafted, int(log(draw) / log(self.acceptance)))

    def num_right(self, chunk: Chunk) -> int:
        """Return how many tokens drafted for a step are accepted. Padding never is."""
        if chunk.is_padded:
            return 0
        return self.accepted(chunk.active.name, chunk.active.num_tokens, chunk.num_drafted)

    @property
    def mean_tokens(self) -> float:
        """Number of tokens that a step of a decoding request yields on average."""
        p = self.acceptance
        return sum(p**number for number in range(self.draft_tokens + 1))
