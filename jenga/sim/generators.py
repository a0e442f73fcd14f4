"""Workloads made up: the paper's, and what measures one thing each."""

import random
from collections.abc import Iterator

from jenga.sim.workload import Piece, Request

QUESTION_TOKENS = 32


def articles(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_articles: int,
    num_questions: int,
    article_tokens: int,
    question_tokens: int = QUESTION_TOKENS,
    output_tokens: int = 64,
    arrivals_per_s: float = 0.0,
    order: str = "random",
    seed: int = 0,
) -> Iterator[Request]:
    """Questions on long articles.

    Args:
        num_articles: Articles.
        num_questions: On each of them.
        article_tokens: Of an article, which comes before the question.
        question_tokens: Of a question, no two of which are equal.
        output_tokens: Of an answer.
        arrivals_per_s: Requests a second; 0 for all at once.
        order: "random", "rounds" (the first question on every article, then the second, the
            articles in another order each time), or "cyclic" (in the same order each time).
        seed: Of the order.

    Raises:
        ValueError: There is no such order.
    """
    pairs = [(q, a) for q in range(num_questions) for a in range(num_articles)]
    draw = random.Random(seed)
    match order:
        case "random":
            draw.shuffle(pairs)
        case "rounds":
            rounds = [pairs[i : i + num_articles] for i in range(0, len(pairs), num_articles)]
            pairs = [pair for one in rounds for pair in draw.sample(one, len(one))]
        case "cyclic":
            pass
        case _:
            msg = f"order must be random, rounds or cyclic, got {order!r}"
            raise ValueError(msg)
    for number, (question, article) in enumerate(pairs):
        yield Request(
            name=str(number),
            arrival_s=number / arrivals_per_s if arrivals_per_s else 0.0,
            prompt=(
                Piece(f"article {article}", article_tokens),
                Piece(f"question {question} on {article}", question_tokens),
            ),
            output_tokens=output_tokens,
        )


def long_documents(
    *,
    num_requests: int = 20,
    prompt_tokens: tuple[int, int] = (55_000, 110_000),
    output_tokens: tuple[int, int] = (50, 100),
    seed: int = 0,
) -> Iterator[Request]:
    """The paper's trace for Ministral: twenty requests, all there from the start.

    Args:
        num_requests: Requests.
        prompt_tokens: Fewest and most tokens of a prompt, all as likely.
        output_tokens: Fewest and most tokens after it.
        seed: Of the lengths.

    Source: Jenga paper, section 7.3.
    """
    draw = random.Random(seed)
    for number in range(num_requests):
        yield Request(
            name=str(number),
            prompt=(Piece(f"document {number}", draw.randint(*prompt_tokens)),),
            output_tokens=draw.randint(*output_tokens),
        )
