"""Workload of the demo's ending: documents, and several questions on each of them, in turns.

This module needs neither vLLM nor torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_DOCUMENTS = 2
NUM_QUESTIONS = 3
DOCUMENT_TOKENS = 1600
"""Number of tokens of a document. It is more than three windows of the default model."""

OUTPUT_TOKENS = 4
"""Number of tokens of an answer."""

QUESTION_TOKENS = 64
"""Largest number of tokens of a question and its answer together, with any usual tokenizer."""

LEAST_DOCUMENT_TOKENS = 256
"""Smallest number of tokens of a document. A model that reads too few tokens for it is refused."""

_DAYS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An engine's answer to one question.

    Attributes:
        document: Index of the document that the question is on.
        question: Index of the question among those on that document.
        prompt_tokens: Number of tokens of document and question together.
        found_tokens: Number of these tokens that were found in the cache.
        text: Generated text.
    """

    document: int
    question: int
    prompt_tokens: int
    found_tokens: int
    text: str

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of the prompt that were not found in the cache."""
        return self.prompt_tokens - self.found_tokens


def turns() -> list[tuple[int, int]]:
    """Get the indices of document and question of each prompt, in the order of asking.

    The first question is asked on every document before the second one is asked on any.
    """
    return [(doc, question) for question in range(NUM_QUESTIONS) for doc in range(NUM_DOCUMENTS)]


def document_text(document: int) -> str:
    """Get the text of a document. It differs from the other documents from its first line on."""
    lines = [f"This is the ledger of shop {document + 1}."]
    lines += [
        f"Day {day}: {(7 * day + 13 * document) % 23 + 5} boxes of apples came in and "
        f"{(5 * day + 3 * document) % 11 + 2} went out."
        for day in range(1, _DAYS)
    ]
    return "\n".join(lines)


def question_text(question: int) -> str:
    """Get a question of about 35 tokens that differs from the others after a few words.

    If a question had fewer tokens than a block, vLLM's default settings would find all of the
    document.
    """
    return (
        f"\nQuestion: how many boxes of apples came in on day {7 * question + 3} of this ledger, "
        f"and how many of them went out again on that same day?\nAnswer:"
    )


def prompts(
    encode: Callable[[str], Sequence[int]],
    encode_question: Callable[[str], Sequence[int]],
    document_tokens: int,
) -> list[list[int]]:
    """Get the tokens of each prompt, in the order of `turns`.

    Args:
        encode: Function that tokenizes the beginning of a prompt.
        encode_question: Function that tokenizes the rest of a prompt.
        document_tokens: Number of tokens that each document is cut to.

    Raises:
        ValueError: A document has fewer tokens than that, or a question has too many.
    """
    documents = [
        list(encode(document_text(each)))[:document_tokens] for each in range(NUM_DOCUMENTS)
    ]
    questions = [list(encode_question(question_text(each))) for each in range(NUM_QUESTIONS)]
    if min(map(len, documents)) < document_tokens:
        msg = f"documents must have {document_tokens} tokens, got {min(map(len, documents))}"
        raise ValueError(msg)
    most_tokens = QUESTION_TOKENS - OUTPUT_TOKENS
    if max(map(len, questions)) > most_tokens:
        msg = f"questions must have at most {most_tokens} tokens, got {max(map(len, questions))}"
        raise ValueError(msg)
    return [documents[doc] + questions[question] for doc, question in turns()]


def document_tokens_of(position_limit: int) -> int:
    """Get the number of tokens of a document for a model that reads at most `position_limit`.

    Raises:
        ValueError: The model reads too few tokens.
    """
    document_tokens = min(DOCUMENT_TOKENS, position_limit - QUESTION_TOKENS)
    if document_tokens < LEAST_DOCUMENT_TOKENS:
        msg = (
            f"the model reads {position_limit} tokens, and a document with a question has at least "
            f"{LEAST_DOCUMENT_TOKENS + QUESTION_TOKENS}"
        )
        raise ValueError(msg)
    return document_tokens
