"""What an admission leaves alone: cached content that waiting requests will read.

An engine admits what fits, and all cached content counts as room. Under load that empties the
cache: running requests take it all, and what the queue was about to hit is computed again. So while
others run, an admission leaves what the queue will read where it is and waits for one of them to
end; the order of admission stays the engine's.

Memory kept from running requests costs throughput. So no more is left than prompts, recent ones and
those of the queue, have in common with what came before them: without prompts that are read again,
nothing. And the less of the work prompts are, the less is left: a step reads the weights however
few requests it decodes for, which takes as long as some hundreds of tokens of a prompt, of a model
of experts some thousands; where outputs take most of the time, a request that runs is worth more
than a prompt that is found.
"""

from collections.abc import Sequence

from jenga.allocator import Allocator
from jenga.checks import check_number
from jenga.eviction.tree import CheckpointTree
from jenga.small_pages import Sharing

LEFT_SHARE = 0.6
"""Of the arena, left to what waits if all that is asked was asked before and little decoded."""

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
    """How many large pages an admission leaves to requests that wait."""

    __slots__ = (
        "_asked_tokens",
        "_large_page_bytes",
        "_most_left",
        "_num_steps",
        "_reread_tokens",
        "_step_tokens",
        "_tree",
    )

    def __init__(
        self,
        allocator: Allocator,
        tree: CheckpointTree,
        left_share: float,
        step_tokens: float = STEP_TOKENS,
        *,
        large_page_bytes: int,
    ) -> None:
        """Nothing was admitted.

        Args:
            allocator: Books of the arena.
            tree: Knows what is waited for.
            left_share: Of the arena, left at most.
            step_tokens: Tokens of a prompt that take as long as what a step costs by itself.
            large_page_bytes: Of a large page.

        Raises:
            ValueError: The share is none, or the tokens are negative or not finite.
        """
        check_number("left_share", left_share, below=1)
        check_number("step_tokens", step_tokens)
        self._tree = tree
        self._large_page_bytes = large_page_bytes
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
        if not asked or not self._tree.awaited:
            return 0
        num_wanted = self._tree.awaited_bytes() // self._large_page_bytes
        if hits is not None:
            num_wanted -= sum(sharing.num_pinned for sharing in hits if sharing is not None)
        if num_wanted <= 0:
            return 0
        reread_share = (self._reread_tokens + reread_tokens) / asked
        return min(num_wanted, int(self._most_left * reread_share * self.prompt_share**2))
