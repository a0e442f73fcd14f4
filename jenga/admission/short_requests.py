"""Room in a step for short requests behind a long prompt.

A prompt that is longer than a step uses all tokens that requests before it leave. It does so for
several steps. Requests behind it wait that long, even if nearly all of their tokens are cached. So
a prompt that another step has to continue leaves room for requests behind it: first for running
ones, which came in beside it, then for the first ones of the wait queue. It does so up to the first
request that is long itself. They are computed whole in the same step, which stays full.

The room is small, so a prompt takes at most a fifteenth more steps, however many requests pass it.
"""

from collections.abc import Iterable

SHORT_SHARE = 1 / 16
"""Largest share of a step's tokens that a prompt leaves to short requests."""


def tokens_to_leave(
    rests: Iterable[int | None], step_tokens: int, *, further_tokens: int = 0
) -> int:
    """Return the number of tokens that a prompt should leave to requests behind it in a step.

    Args:
        rests: For each request behind it, in the order in which the step serves them, the number of
            tokens that it would compute. None if it would compute none. Only the first elements are
            read.
        step_tokens: Most tokens that a step computes, of all requests together.
        further_tokens: Tokens of a step that each request takes in addition, for drafts.
    """
    most_tokens = int(SHORT_SHARE * step_tokens)
    num_tokens = 0
    for rest_tokens in rests:
        if rest_tokens is None or num_tokens + rest_tokens + further_tokens > most_tokens:
            break
        num_tokens += rest_tokens + further_tokens
    return num_tokens
