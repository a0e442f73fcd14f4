"""Token budgets: after the prompt, only some of its tokens are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jenga.policies.base import NEVER, Grain, RequestFacts, TokenSlots
from jenga.policies.full_attention import FullAttentionPolicy


@dataclass(frozen=True, slots=True)
class TokenBudgetPolicy(TokenSlots):
    """Keeps the whole prompt until it is processed, then its budget, moved to the first slots.

    The end of the prompt decides which tokens stay, and their move writes over the pages. A prompt
    beyond the budget therefore leaves no pages for other requests, and takes none of theirs.

    Attributes:
        budget_tokens: Returns the number of tokens kept of a prompt of that many tokens.
    """

    budget_tokens: Callable[[int], int]

    def _dropped_tokens(self, facts: RequestFacts) -> int:
        return facts.prompt_tokens - self.budget_tokens(facts.prompt_tokens)

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return all tokens of the prompt, or later the budget and all tokens after the prompt."""
        if num_processed_tokens < facts.prompt_tokens:
            return range(num_tokens)
        return range(num_tokens - self._dropped_tokens(facts))

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Return the end of the prompt, or `NEVER` after it."""
        return facts.prompt_tokens if num_processed_tokens < facts.prompt_tokens else NEVER

    def max_tokens(self, facts: RequestFacts, num_processed_tokens: int, num_slots: int, /) -> int:
        """Return one token for each slot, plus the dropped tokens."""
        if num_processed_tokens < facts.prompt_tokens:
            return num_slots
        return num_slots + self._dropped_tokens(facts)

    def peak_slots(self, facts: RequestFacts, num_tokens: int, _chunk_tokens: int, /) -> int:
        """Return the tokens of the prompt, or its kept tokens and those after it if more."""
        if num_tokens <= facts.prompt_tokens:
            return num_tokens
        return max(facts.prompt_tokens, num_tokens - self._dropped_tokens(facts))

    def final_pages(self, facts: RequestFacts, num_tokens: int, grain: Grain, /) -> int:
        """Return the number of full pages if none will be written over, else 0."""
        return 0 if self._dropped_tokens(facts) else num_tokens // grain.page_slots

    def get_possible_prefix(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the answer of full attention if no page will be written over, else 0."""
        if self._dropped_tokens(facts):
            return 0
        return FullAttentionPolicy().get_possible_prefix(facts, is_hit, grain, at_most_tokens)
