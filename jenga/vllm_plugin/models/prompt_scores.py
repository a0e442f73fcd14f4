"""Whether vLLM asks a model for logits of a prompt, to look up the tokens that the prompt has.

A prompt may have tokens that no model generates, such as that of an image in Llama 3.2 Vision. Such
a token is behind the vocabulary, and would be looked up behind the row of its logits.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_SCORING = ContextVar("is_scoring_prompts", default=False)


@contextmanager
def scoring_prompts() -> Generator[None]:
    """Say within the block that logits are those of prompts."""
    token = _IS_SCORING.set(True)
    try:
        yield
    finally:
        _IS_SCORING.reset(token)


def is_scoring_prompts() -> bool:
    """Whether logits must have a column for each token that a prompt may have."""
    return _IS_SCORING.get()
