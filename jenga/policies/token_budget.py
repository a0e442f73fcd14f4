"""Token budgets: at the end of the prompt, and while outputs grow, only some tokens are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jenga.policies.base import NEVER, Grain, RequestFacts, TokenSlots
from jenga.policies.full_attention import FullAttentionPolicy


def dropped_tokens(num_tokens: int, budget_tokens: int, page_slots: int) -> int:
    """Return the number of tokens that a choice drops: whole pages, so maybe a few more.

    Args:
        num_tokens: Number of tokens of the request at the choice.
        budget_tokens: Most tokens of them to keep.
        page_slots: Number of slots of a page.
    """
    return -(-max(0, num_tokens - budget_tokens) // page_slots) * page_slots


def last_choice(prompt_tokens: int, num_tokens: int, output_tokens: int | None) -> int:
    """Return the number of tokens at which a layer chose last, 0 before the end of the prompt.

    Args:
        prompt_tokens: Number of tokens of the prompt.
        num_tokens: Number of tokens of the request now.
        output_tokens: Tokens after the prompt, and after each choice, at which the layer chooses
            again. None means that it chooses at the end of the prompt only.
    """
    if num_tokens < prompt_tokens:
        return 0
    if output_tokens is None:
        return prompt_tokens
    return num_tokens - (num_tokens - prompt_tokens) % output_tokens


def next_choice(prompt_tokens: int, num_tokens: int, output_tokens: int | None) -> int:
    """Return the number of tokens, above `num_tokens`, at which a layer chooses next, or `NEVER`.

    The arguments are those of `last_choice`.
    """
    if num_tokens < prompt_tokens:
        return prompt_tokens
    if output_tokens is None:
        return NEVER
    return last_choice(prompt_tokens, num_tokens, output_tokens) + output_tokens


@dataclass(frozen=True, slots=True)
class TokenBudgetPolicy(TokenSlots):
    """Keeps the whole prompt until it is processed, then its budget, moved to its last slots.

    The end of the prompt decides which tokens stay. They move to the last slots of the prompt, so
    that later tokens keep their slots, and whole pages at the start are given up. With
    `output_tokens`, the layer chooses again whenever so many tokens have been added. Then all
    tokens that it still has are moved to the last slots of the request.

    The move writes over the pages. A prompt beyond the budget therefore leaves no pages for other
    requests, and takes none of theirs. With `output_tokens`, every request may outgrow its budget,
    so this is true of every prompt.

    Attributes:
        budget_tokens: Returns the most tokens kept of a request of that many tokens. With
            `output_tokens`, all of a short request or a constant number.
        page_slots: Number of slots of a page.
        output_tokens: As in `last_choice`.
    """

    budget_tokens: Callable[[int], int]
    page_slots: int
    output_tokens: int | None = None

    def _dropped_tokens(self, facts: RequestFacts, num_tokens: int) -> int:
        """Return the number of tokens dropped by all choices until `num_tokens` tokens."""
        chosen = last_choice(facts.prompt_tokens, num_tokens, self.output_tokens)
        return dropped_tokens(chosen, self.budget_tokens(chosen), self.page_slots)

    def _is_rewritten(self, facts: RequestFacts) -> bool:
        """Whether the pages of a request may be written over."""
        return self.output_tokens is not None or (
            self._dropped_tokens(facts, facts.prompt_tokens) > 0
        )

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Return all tokens, or after a choice those behind the dropped ones."""
        return range(self._dropped_tokens(facts, num_processed_tokens), num_tokens)

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Return the number of tokens at the next choice.

        It is `NEVER` if there is none, or if the only one drops nothing.
        """
        if not self._is_rewritten(facts):
            return NEVER
        return next_choice(facts.prompt_tokens, num_processed_tokens, self.output_tokens)

    def peak_slots(self, facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Return the slots of the step that ends the prompt, or of a later step if more.

        A step that begins before a choice may compute tokens after it. With `output_tokens`, the
        answer may be a page more than what the largest step touches.
        """
        beyond = max(0, chunk_tokens - 1)
        before = min(num_tokens, facts.prompt_tokens + beyond)
        if self.output_tokens is None:
            dropped = self._dropped_tokens(facts, facts.prompt_tokens)
            return max(before, num_tokens - dropped)
        after = self.budget_tokens(num_tokens) + self.output_tokens + beyond
        return max(before, min(num_tokens, after))

    def final_pages(self, facts: RequestFacts, num_tokens: int, grain: Grain, /) -> int:
        """Return the number of full pages if none will be written over, else 0."""
        return 0 if self._is_rewritten(facts) else num_tokens // grain.page_slots

    def get_possible_prefix(
        self, facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the answer of full attention if no page will be written over, else 0."""
        if self._is_rewritten(facts):
            return 0
        return FullAttentionPolicy().get_possible_prefix(facts, is_hit, grain, at_most_tokens)
