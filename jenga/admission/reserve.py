"""The reserve: cached content that an admission leaves alone if prompts are read again.

An engine admits what fits, and all cached content counts as room. Under load that empties the
cache. Running requests take all of it, and prefixes that the next requests were about to hit are
computed again. So while other requests run, an admission leaves a share of the arena to cached
content. It waits for a running request to end. The order of admission stays the engine's.

Memory kept from running requests costs throughput, so the reserve is limited in two ways:

- It is scaled by the share of prompt tokens that other requests have in common, among recent
  requests and those of the queue. If prompts are not read again, nothing is left. A conversation
  that continues does not count, because no other request reads its prefix. Nor does a request that
  goes on from the prompt of a running one, as a further sample or an early next turn. It reads what
  is in use.
- It shrinks with the share of prompts in the engine's work. A step reads the weights even if it
  decodes for few requests. That takes as long as some hundred tokens of a prompt, or some thousand
  for a mixture of experts. If decoding takes most of the time, a running request is worth more than
  a prompt that is found.
"""

from collections.abc import Sequence

from jenga.arena.allocator import Allocator
from jenga.arena.small_pages import Sharing
from jenga.checks import check_number

LEFT_SHARE = 0.6
"""Share of the arena left to the cache if all prompts are read again and little is decoded."""

STEP_TOKENS = 256
"""Number of prompt tokens that cost as much as one step of a dense model costs by itself.

By their peaks, an A100 computes 153 tokens in the time in which it reads the weights, an H100 295.
"""

REMEMBERED_REQUESTS = 64
"""Number of admissions after which the weight of an admission has fallen to about a third."""


def default_left_share(*, has_host: bool) -> float:
    """Return the default of `left_share`: 0 if evicted content goes to host memory.

    Loading content again takes a fraction of the time of computing it, while waiting requests could
    run.
    """
    return 0.0 if has_host else LEFT_SHARE


class CacheReserve:
    """Computes how many large pages an admission leaves to the cache.

    Attributes:
        left_share: Largest share of the arena that is left, from 0 to below 1.
    """

    __slots__ = (
        "_asked_tokens",
        "_large_pages",
        "_num_steps",
        "_reread_tokens",
        "_step_tokens",
        "left_share",
    )

    def __init__(
        self,
        allocator: Allocator,
        left_share: float,
        step_tokens: float = STEP_TOKENS,
    ) -> None:
        """Create the rule before any admission.

        Args:
            allocator: Page counts of the arena.
            left_share: Largest share of the arena that is left, from 0 to below 1. Of a shared
                arena it is a share of what the engine has at the time.
            step_tokens: Number of prompt tokens that take as long as the fixed cost of a step.

        Raises:
            ValueError: The share is out of its range, or the tokens are negative or not finite.
        """
        check_number("left_share", left_share, below=1)
        check_number("step_tokens", step_tokens)
        self._large_pages = allocator.large_pages
        self._step_tokens = step_tokens
        self.left_share = left_share
        self._reread_tokens = self._asked_tokens = self._num_steps = 0.0

    def count_step(self) -> None:
        """Count a step that runs while requests wait."""
        self._num_steps += 1

    def count_admission(self, reread_tokens: int, asked_tokens: int) -> None:
        """Count an admitted request.

        Args:
            reread_tokens: Number of its first tokens that an earlier request has in common with it.
            asked_tokens: Number of its tokens that could be in common.
        """
        kept = 1 - 1 / REMEMBERED_REQUESTS
        self._reread_tokens = kept * self._reread_tokens + reread_tokens
        self._asked_tokens = kept * self._asked_tokens + asked_tokens
        self._num_steps *= kept

    @property
    def prompt_share(self) -> float:
        """Share of prompts in the work done while requests wait, as if no prompt had a hit."""
        steps = self._num_steps * self._step_tokens
        return self._asked_tokens / (self._asked_tokens + steps) if self._asked_tokens else 1.0

    def large_pages_to_leave(
        self,
        hits: Sequence[Sharing | None] | None,
        *,
        reread_tokens: int = 0,
        asked_tokens: int = 0,
    ) -> int:
        """Return the number of large pages that an admission leaves, beyond those of its own hit.

        Args:
            hits: For each page table, the cached small pages that the request will share, if any.
            reread_tokens: As in `count_admission`, for all waiting requests together.
            asked_tokens: As in `count_admission`, for all waiting requests together.
        """
        asked = self._asked_tokens + asked_tokens
        if not asked:
            return 0
        num_cached = self._large_pages.reclaimable.num_queued
        if hits is not None:
            num_cached -= sum(sharing.num_revived_large for sharing in hits if sharing is not None)
        reread_share = (self._reread_tokens + reread_tokens) / asked
        # Large pages that other engines have do not count. The null page does.
        most_left = self.left_share * (self._large_pages.num_owned + 1)
        return max(0, min(num_cached, int(most_left * reread_share * self.prompt_share**2)))
