"""Made-up workloads: those of the paper, and some that measure one thing each."""

import random
from collections.abc import Iterator

from jenga.policies import Image
from jenga.sim.workload.draws import MOST_REQUESTS, arrivals_s, check_arguments, wait_s
from jenga.sim.workload.requests import Piece, Request

QUESTION_TOKENS = 32

MMLU_PRO_LOG_MEAN, MMLU_PRO_LOG_DEVIATION = 7.10, 0.28
MMLU_PRO_TOKENS = 775, 3076
"""Fewest and most tokens of an MMLU-Pro prompt with five examples.

Between them, lengths are lognormal with about 1,300 tokens.
"""

MMMU_PRO_IMAGE_TOKENS = 6193
MMMU_PRO_TEXT_TOKENS = 43
"""Average tokens of the image and of the text in an MMMU-Pro request (Jenga paper, section 3.2)."""


def articles(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_articles: int = 24,
    num_questions: int = 8,
    article_tokens: int = 30_000,
    question_tokens: int = QUESTION_TOKENS,
    output_tokens: int = 64,
    arrivals_per_s: float = 0.0,
    order: str = "random",
    seed: int = 0,
) -> Iterator[Request]:
    """Questions on long articles.

    Args:
        num_articles: Number of articles.
        num_questions: Number of questions on each article.
        article_tokens: Tokens of an article, which comes before the question.
        question_tokens: Tokens of a question. All questions differ.
        output_tokens: Tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        order: "random", "rounds" (the first question on every article, then the second, the
            articles in another order each time), or "cyclic" (in the same order each time).
        seed: Seed of the order and the arrivals.

    Raises:
        ValueError: There is no such order, or an argument is out of range.
    """
    check_arguments(
        num_articles=num_articles,
        num_questions=num_questions,
        article_tokens=article_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    if num_articles * num_questions > MOST_REQUESTS:
        msg = (
            f"num_articles times num_questions must be at most {MOST_REQUESTS}, "
            f"got {num_articles} times {num_questions}"
        )
        raise ValueError(msg)
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
    times_s = arrivals_s(draw, arrivals_per_s)
    for number, (question, article) in enumerate(pairs):
        yield Request(
            name=str(number),
            arrival_s=next(times_s),
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
    """Requests with long documents, all of which arrive at the start: the paper's Ministral trace.

    Args:
        num_requests: Number of requests. The paper has 20.
        prompt_tokens: Fewest and most tokens of a prompt. All lengths are equally likely.
        output_tokens: Fewest and most tokens of an output.
        seed: Seed of the lengths.

    Raises:
        ValueError: An argument is out of range.

    Source: Jenga paper, section 7.3.
    """
    check_arguments(
        num_requests=num_requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    draw = random.Random(seed)
    for number in range(num_requests):
        yield Request(
            name=str(number),
            prompt=(Piece(f"document {number}", draw.randint(*prompt_tokens)),),
            output_tokens=draw.randint(*output_tokens),
        )


def static_lengths(
    *,
    num_requests: int = 200,
    prompt_tokens: tuple[int, int] = (1000, 110_000),
    output_tokens: tuple[int, int] = (50, 100),
    seed: int = 0,
) -> Iterator[Request]:
    """Lengths whose distribution does not change: the paper's static trace.

    Args:
        num_requests: Number of requests, all of which arrive at the start.
        prompt_tokens: Fewest and most tokens of a prompt. All lengths are equally likely.
        output_tokens: Fewest and most tokens of an output.
        seed: Seed of the lengths.

    Raises:
        ValueError: An argument is out of range.

    Source: Jenga paper, section 7.3, which does not give the lengths.
    """
    return long_documents(
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seed=seed,
    )


def dynamic_lengths(
    *,
    num_requests: int = 200,
    prompt_tokens: tuple[int, int] = (1000, 110_000),
    spread: float = 0.1,
    output_tokens: tuple[int, int] = (50, 100),
    seed: int = 0,
) -> Iterator[Request]:
    """Lengths whose mean goes evenly from the fewest tokens to the most: the paper's dynamic trace.

    Args:
        num_requests: Number of requests, all of which arrive at the start.
        prompt_tokens: Mean tokens of the first prompt and of the last prompt.
        spread: Largest deviation from the mean, as a share of it. All lengths are equally likely.
        output_tokens: Fewest and most tokens of an output.
        seed: Seed of the lengths.

    Raises:
        ValueError: An argument is out of range.

    Source: Jenga paper, section 7.3, which does not give the lengths.
    """
    check_arguments(
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        spread=spread,
        output_tokens=output_tokens,
    )
    draw = random.Random(seed)
    first, last = prompt_tokens
    for number in range(num_requests):
        mean = first + (last - first) * number / max(1, num_requests - 1)
        num_tokens = max(1, round(mean * draw.uniform(1 - spread, 1 + spread)))
        yield Request(
            name=str(number),
            prompt=(Piece(f"document {number}", num_tokens),),
            output_tokens=draw.randint(*output_tokens),
        )


def mmlu_pro(
    *,
    num_requests: int = 1000,
    output_tokens: tuple[int, int] = (100, 500),
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Requests with the lengths of MMLU-Pro. No two prompts share a prefix.

    Args:
        num_requests: Number of requests.
        output_tokens: Fewest and most tokens of an output.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of lengths and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_requests=num_requests, output_tokens=output_tokens, arrivals_per_s=arrivals_per_s
    )
    draw = random.Random(seed)
    arrival_s = 0.0
    least, most = MMLU_PRO_TOKENS
    for number in range(num_requests):
        drawn = draw.lognormvariate(MMLU_PRO_LOG_MEAN, MMLU_PRO_LOG_DEVIATION)
        yield Request(
            name=str(number),
            arrival_s=arrival_s,
            prompt=(Piece(f"question {number}", min(most, max(least, round(drawn)))),),
            output_tokens=draw.randint(*output_tokens),
        )
        arrival_s += wait_s(draw, arrivals_per_s)


def mmmu_pro(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 200,
    image_tokens: int = MMMU_PRO_IMAGE_TOKENS,
    text_tokens: int = MMMU_PRO_TEXT_TOKENS,
    output_tokens: int = 200,
    image_in_prompt: bool = True,
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Requests with the lengths of MMMU-Pro: one image and a short question each.

    Args:
        num_requests: Number of requests.
        image_tokens: Tokens of an image.
        text_tokens: Average tokens of a question. A question has half to one and a half of them.
        output_tokens: Tokens of an answer.
        image_in_prompt: Whether the image's tokens are tokens of the prompt. False for models that
            read them by cross attention.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of lengths and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_requests=num_requests,
        image_tokens=image_tokens,
        text_tokens=text_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    draw = random.Random(seed)
    arrival_s = 0.0
    for number in range(num_requests):
        text = Piece(f"question {number}", max(1, round(text_tokens * draw.uniform(0.5, 1.5))))
        content = f"image {number}"
        image = Image(start_token=0, num_tokens=image_tokens, content=content.encode())
        yield Request(
            name=str(number),
            arrival_s=arrival_s,
            prompt=(Piece(content, image_tokens), text) if image_in_prompt else (text,),
            output_tokens=output_tokens,
            images=(image,),
        )
        arrival_s += wait_s(draw, arrivals_per_s)


def agentic(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_sessions: int = 64,
    num_turns: int = 12,
    system_tokens: int = 3000,
    turn_tokens: tuple[int, int] = (200, 2000),
    output_tokens: tuple[int, int] = (50, 500),
    arrivals_per_s: float = 0.5,
    think_s: float = 20.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Sessions that go on: every turn reads all turns before it, generated tokens included.

    A turn arrives a random time after the turn before it arrived, even if that has not ended yet.

    Args:
        num_sessions: Number of sessions.
        num_turns: Number of turns in each session.
        system_tokens: Tokens of the head with which all sessions begin.
        turn_tokens: Fewest and most tokens that a turn adds before it generates.
        output_tokens: Fewest and most tokens that a turn generates.
        arrivals_per_s: Sessions that begin in a second, at random; 0 for all at once.
        think_s: Seconds between two turns of a session, on average.
        seed: Seed of lengths and times.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_sessions=num_sessions,
        num_turns=num_turns,
        system_tokens=system_tokens,
        turn_tokens=turn_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
        think_s=think_s,
    )
    draw = random.Random(seed)
    requests: list[Request] = []
    begin_s = 0.0
    for session in range(num_sessions):
        prompt: tuple[Piece, ...] = (Piece("system", system_tokens),)
        arrival_s = begin_s
        for turn in range(num_turns):
            prompt = (*prompt, Piece(f"turn {turn} of {session}", draw.randint(*turn_tokens)))
            output = f"answer {turn} of {session}"
            num_output = draw.randint(*output_tokens)
            requests.append(
                Request(
                    name=f"{session}.{turn}",
                    arrival_s=arrival_s,
                    prompt=prompt,
                    output_tokens=num_output,
                    output=output,
                )
            )
            prompt = (*prompt, Piece(output, num_output))
            arrival_s += wait_s(draw, 1 / think_s if think_s else 0.0)
        begin_s += wait_s(draw, arrivals_per_s)
    return iter(sorted(requests, key=lambda request: request.arrival_s))
