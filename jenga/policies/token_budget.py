"""Token budgets: after the prompt, only some of its tokens are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jenga.policies.base import NEVER, Grain, RequestFacts, TokenSlots
from jenga.policies.full_attention import FullAttentionPolicy


def dropped_tokens(prompt_tokens: int, budget_tokens: int, page_slots: int) -> int:
    """Return the number of prompt tokens that a budget drops: whole pages, so maybe a few more.

    Args:
        prompt_tokens: Number of tokens of the prompt.
        budget_tokens: Most tokens of it to keep.
        page_slots: Number of slots of a page.
    """
    return -(-max(0, prompt_tokens - budget_tokens) // page_slots) * page_slots


@dataclass(frozen=True, slots=True)
class TokenBudgetPolicy(TokenSlots):
    """Keeps the whole prompt until it is processed, then its budget, moved to its last slots.

    The end of the prompt decides which tokens stay. They move to the last slots of the prompt, so
    that later tokens keep their slots, and whole pages at the start are given up. The move writes
    over the pages. A prompt beyond the budget therefore leaves no pages for other requests, and
    takes none of theirs.

    Attributes:
        budget_tokens: Returns the most tokens kept of a prompt of that many tokens.
        page_slots: Number of slots of a page.
    """

    budget_tokens: Callable[[int], int]
    page_slots: int

    def _dropped_tokens(self, facts: RequestFacts) -> int:
        budget_tokens = self.budget_tokens(facts.prompt_tokens)
        return dropped_tokens(facts.prompt_tokens, budget_tokens, self.page_slots)

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return all tokens, or after the prompt those behind the dropped ones."""
        if num_processed_tokens < facts.prompt_tokens:
            return range(num_tokens)
        return range(self._dropped_tokens(facts), num_tokens)

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Return the end of the prompt, or `NEVER` after it and if nothing is dropped."""
        if num_processed_tokens < facts.prompt_tokens and self._dropped_tokens(facts):
            return facts.prompt_tokens
        return NEVER

    def peak_slots(self, facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Return the slots of the step that ends the prompt, or of the last step if more.

        A step that begins before the end of the prompt may compute tokens after it.
        """
        before = min(num_tokens, facts.prompt_tokens + max(0, chunk_tokens - 1))
        return max(before, num_tokens - self._dropped_tokens(facts))

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
