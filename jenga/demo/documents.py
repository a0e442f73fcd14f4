"""The ending's workload: documents asked several questions each, in turns.

It needs neither vLLM nor torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_DOCUMENTS = 2
NUM_QUESTIONS = 3
DOCUMENT_TOKENS = 1600
"""Of a document: three windows of the default model and more."""

OUTPUT_TOKENS = 4
"""Of an answer."""

QUESTION_TOKENS = 64
"""No question and answer together has more, in a tokenizer of any usual kind."""

LEAST_DOCUMENT_TOKENS = 256
"""A model that reads no more than this is not asked."""

_DAYS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine made of one question.

    Attributes:
        document: Number of the document that came before it.
        question: Its number among the questions on that document.
        prompt_tokens: Tokens of document and question.
        found_tokens: Those of them found in the cache.
        text: What was generated.
    """

    document: int
    question: int
    prompt_tokens: int
    found_tokens: int
    text: str

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were not found."""
        return self.prompt_tokens - self.found_tokens


def turns() -> list[tuple[int, int]]:
    """Get the numbers of document and question, in the order they are asked.

    The first question on every document comes before the second one on any.
    """
    return [(doc, question) for question in range(NUM_QUESTIONS) for doc in range(NUM_DOCUMENTS)]


def document_text(document: int) -> str:
    """Get a text that differs from the other documents' from its first line on."""
    lines = [f"This is the ledger of shop {document + 1}."]
    lines += [
        f"Day {day}: {(7 * day + 13 * document) % 23 + 5} boxes of apples came in and "
        f"{(5 * day + 3 * document) % 11 + 2} went out."
        for day in range(1, _DAYS)
    ]
    return "\n".join(lines)


def question_text(question: int) -> str:
    """Get a question of some 35 tokens that differs from the others after a few words.

    Where a question has fewer tokens than a block, vLLM's default finds all of the document.
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
        encode: Tokens of a text that begins a prompt.
        encode_question: Tokens of a text that goes on.
        document_tokens: To which documents are cut.

    Raises:
        ValueError: A document or a question has another number of tokens than was counted on.
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
    """Get the tokens of a document for a model that reads so many tokens.

    Raises:
        ValueError: It reads too few.
    """
    document_tokens = min(DOCUMENT_TOKENS, position_limit - QUESTION_TOKENS)
    if document_tokens < LEAST_DOCUMENT_TOKENS:
        msg = (
            f"the model reads {position_limit} tokens, and a document with a question has at least "
            f"{LEAST_DOCUMENT_TOKENS + QUESTION_TOKENS}"
        )
        raise ValueError(msg)
    return document_tokens
