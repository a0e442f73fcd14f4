"""Token budgets: after the prompt only some of its tokens are kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.policies.base import NEVER, Grain, RequestFacts, TokenSlots
from jenga.policies.full_attention import FullAttentionPolicy
from jenga.spec import TokenBudget


@dataclass(frozen=True, slots=True)
class TokenBudgetPolicy(TokenSlots):
    """Keeps the whole prompt until it is processed, then its budget, moved to the first slots.

    Which tokens stay depends on the end of the prompt, and their move writes over the pages. So a
    prompt beyond the budget neither leaves pages to others nor takes theirs.

    Attributes:
        spec: The layer type.
    """

    spec: TokenBudget

    def _dropped_tokens(self, facts: RequestFacts) -> int:
        return facts.prompt_tokens - self.spec.budget_tokens(facts.prompt_tokens)

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """All tokens of the prompt, later the budget and all tokens after the prompt."""
        if num_processed_tokens < facts.prompt_tokens:
            return range(num_tokens)
        return range(num_tokens - self._dropped_tokens(facts))

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """The end of the prompt."""
        return facts.prompt_tokens if num_processed_tokens < facts.prompt_tokens else NEVER

    def max_tokens(self, facts: RequestFacts, num_processed_tokens: int, num_slots: int, /) -> int:
        """One token for each slot, and the dropped ones."""
        if num_processed_tokens < facts.prompt_tokens:
            return num_slots
        return num_slots + self._dropped_tokens(facts)

    def peak_slots(self, facts: RequestFacts, num_tokens: int, _chunk_tokens: int, /) -> int:
        """The prompt, or what is kept of it and the tokens after it."""
        if num_tokens <= facts.prompt_tokens:
            return num_tokens
        return max(facts.prompt_tokens, num_tokens - self._dropped_tokens(facts))

    def final_pages(self, facts: RequestFacts, num_tokens: int, grain: Grain, /) -> int:
        """The full pages, if none will be written over."""
        return 0 if self._dropped_tokens(facts) else num_tokens // grain.page_slots

    def get_possible_prefix(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """As full attention, if no page will be written over."""
        if self._dropped_tokens(facts):
            return 0
        return FullAttentionPolicy().get_possible_prefix(facts, is_hit, grain, at_most_tokens)

    def reused_pages(
        self, _facts: RequestFacts, _is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """All pages."""
        return range(num_tokens // grain.page_slots)
