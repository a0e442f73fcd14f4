"""What an admission leaves alone: part of the cache, if prompts are read again.

An engine admits what fits, and all cached content counts as room. Under load that empties the
cache: running requests take it all, and what the next requests were about to hit is computed again.
So while others run, an admission leaves a share of the arena to cached content and waits for one of
them to end; the order of admission stays the engine's.

Memory kept from running requests costs throughput. So no more is left than prompts, recent ones and
those of the queue, have in common with other requests: without prompts that are read again, nothing
is left. A conversation that goes on does not count: no other request reads what it reads. And the
less of the work prompts are, the less is left: a step reads the weights however few requests it
decodes for, which takes as long as some hundreds of tokens of a prompt, of a model of experts some
thousands; where outputs take most of the time, a request that runs is worth more than a prompt that
is found.
"""

from collections.abc import Sequence

from jenga.arena.allocator import Allocator
from jenga.arena.small_pages import Sharing
from jenga.checks import check_number

LEFT_SHARE = 0.6
"""Of the arena, left to the cache if all that is asked was asked before and little decoded."""

STEP_TOKENS = 256
"""What a step of a dense model costs, in tokens of a prompt: by their peaks an A100 computes 153 of
them in the time in which it reads the weights, an H100 295."""

REMEMBERED_REQUESTS = 64
"""Admissions by which the weight of one falls to a third."""


def default_left_share(*, has_host: bool) -> float:
    """What is left at most where nobody says otherwise: nothing where what is evicted is not lost.

    To load it again takes a fraction of computing it, while those who wait could run.
    """
    return 0.0 if has_host else LEFT_SHARE


class Admission:
    """How many large pages an admission leaves to the cache."""

    __slots__ = (
        "_asked_tokens",
        "_large_pages",
        "_most_left",
        "_num_steps",
        "_reread_tokens",
        "_step_tokens",
    )

    def __init__(
        self,
        allocator: Allocator,
        left_share: float,
        step_tokens: float = STEP_TOKENS,
    ) -> None:
        """Nothing was admitted.

        Args:
            allocator: Books of the arena.
            left_share: Of the arena, left at most.
            step_tokens: Tokens of a prompt that take as long as what a step costs by itself.

        Raises:
            ValueError: The share is none, or the tokens are negative or not finite.
        """
        check_number("left_share", left_share, below=1)
        check_number("step_tokens", step_tokens)
        self._large_pages = allocator.large_pages
        self._step_tokens = step_tokens
        self._most_left = left_share * allocator.large_pages.num_pages
        self._reread_tokens = self._asked_tokens = self._num_steps = 0.0

    def count_step(self) -> None:
        """Note a step while requests wait."""
        self._num_steps += 1

    def note(self, reread_tokens: int, asked_tokens: int) -> None:
        """Count an admitted request.

        Args:
            reread_tokens: Of its tokens, those with which another request begins that came before.
            asked_tokens: Those that could be.
        """
        kept = 1 - 1 / REMEMBERED_REQUESTS
        self._reread_tokens = kept * self._reread_tokens + reread_tokens
        self._asked_tokens = kept * self._asked_tokens + asked_tokens
        self._num_steps *= kept

    @property
    def prompt_share(self) -> float:
        """Of the work while requests wait, that of prompts, if all of them were computed."""
        steps = self._num_steps * self._step_tokens
        return self._asked_tokens / (self._asked_tokens + steps) if self._asked_tokens else 1.0

    def reserve(
        self,
        hits: Sequence[Sharing | None] | None,
        *,
        reread_tokens: int = 0,
        asked_tokens: int = 0,
    ) -> int:
        """Large pages that an admission leaves, beyond those of its own hit.

        Args:
            hits: Per page table, the cached small pages that it will share, if any.
            reread_tokens: As `note` has it, of requests that wait.
            asked_tokens: Likewise.
        """
        asked = self._asked_tokens + asked_tokens
        if not asked:
            return 0
        num_cached = self._large_pages.reclaimable.num_queued
        if hits is not None:
            num_cached -= sum(sharing.num_pinned for sharing in hits if sharing is not None)
        reread_share = (self._reread_tokens + reread_tokens) / asked
        return max(0, min(num_cached, int(self._most_left * reread_share * self.prompt_share**2)))
