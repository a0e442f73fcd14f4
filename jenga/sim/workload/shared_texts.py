"""Workloads over time whose prompts share texts: chunks, samples, heads, whole prompts, articles.

Requests arrive at random at a given rate, whatever else runs. A shared text is named by its kind
and number. Questions, inputs and answers are all different unless a docstring says otherwise.
"""

import random
from collections.abc import Callable, Iterator

from jenga.sim.workload.draws import Range, arrivals_s, check_arguments, popularity
from jenga.sim.workload.generators import QUESTION_TOKENS, articles
from jenga.sim.workload.requests import Piece, Request


def rag(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 400,
    head_tokens: int = 1024,
    num_chunks: int = 200,
    chunk_tokens: int = 2048,
    num_read: int = 8,
    exponent: float = 0.0,
    question_tokens: int = QUESTION_TOKENS,
    output_tokens: int = 64,
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Retrieval: a head that all prompts share, some of many chunks in any order, then a question.

    Two prompts share the head, and chunks as far as they have the same ones in the same order.

    Args:
        num_requests: Number of requests.
        head_tokens: Tokens of the head with which all prompts begin.
        num_chunks: Number of different chunks.
        chunk_tokens: Tokens of a chunk.
        num_read: Number of chunks in a prompt, all different.
        exponent: Exponent of Zipf's law, by which chunks are chosen; 0 for equally often.
        question_tokens: Tokens of a question.
        output_tokens: Tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of chunks, their order, and arrivals.

    Raises:
        ValueError: An argument is out of range, or `num_read` is more than `num_chunks`.
    """
    check_arguments(
        num_requests=num_requests,
        head_tokens=head_tokens,
        num_chunks=num_chunks,
        chunk_tokens=chunk_tokens,
        num_read=num_read,
        exponent=exponent,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    if num_read > num_chunks:
        msg = f"num_read must be at most the {num_chunks} chunks, got {num_read}"
        raise ValueError(msg)
    draw = random.Random(seed)
    head = Piece("head", head_tokens)
    times_s = arrivals_s(draw, arrivals_per_s)
    for number in range(num_requests):
        # Each chunk draws an exponential wait, with its popularity as the rate. The chunks with the
        # shortest waits are a draw by popularity without replacement.
        waits = [(draw.expovariate(1.0) * (n + 1) ** exponent, n) for n in range(num_chunks)]
        read = [n for _, n in sorted(waits)[:num_read]]
        draw.shuffle(read)
        chunks = (Piece(f"chunk {n}", chunk_tokens) for n in read)
        yield Request(
            name=str(number),
            arrival_s=next(times_s),
            prompt=(head, *chunks, Piece(f"question {number}", question_tokens)),
            output_tokens=output_tokens,
        )


def samples(
    *,
    num_prompts: int = 50,
    num_samples: int = 8,
    prompt_tokens: Range = (2000, 20_000),
    output_tokens: Range = (100, 1000),
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Parallel samples: several requests with the same prompt arrive at once; answers differ.

    Args:
        num_prompts: Number of prompts, which share no prefix.
        num_samples: Number of requests of each prompt, which arrive together.
        prompt_tokens: Fewest and most tokens of a prompt.
        output_tokens: Fewest and most tokens of an answer.
        arrivals_per_s: Prompts a second, at random; 0 for all at once.
        seed: Seed of lengths and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_prompts=num_prompts,
        num_samples=num_samples,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    draw = random.Random(seed)
    times_s = arrivals_s(draw, arrivals_per_s)
    for number in range(num_prompts):
        prompt = (Piece(f"prompt {number}", draw.randint(*prompt_tokens)),)
        arrival_s = next(times_s)
        for sample in range(num_samples):
            yield Request(
                name=f"{number}.{sample}",
                arrival_s=arrival_s,
                prompt=prompt,
                output_tokens=draw.randint(*output_tokens),
            )


def zipf(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 900,
    num_prompts: int = 3000,
    exponent: float = 0.9,
    head_tokens: int = 800,
    prompt_tokens: Range = (1000, 8000),
    output_tokens: Range = (50, 200),
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Whole prompts of very different popularity, behind a head that all prompts share.

    Args:
        num_requests: Number of requests.
        num_prompts: Number of different prompts. A request repeats one of them unchanged.
        exponent: Exponent of Zipf's law, by which prompts are chosen; 0 for equally often.
        head_tokens: Tokens of the head with which all prompts begin.
        prompt_tokens: Fewest and most tokens of a prompt behind the head.
        output_tokens: Fewest and most tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of lengths, prompts and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_requests=num_requests,
        num_prompts=num_prompts,
        exponent=exponent,
        head_tokens=head_tokens,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    draw = random.Random(seed)
    head = Piece("head", head_tokens)
    prompts = [Piece(f"prompt {n}", draw.randint(*prompt_tokens)) for n in range(num_prompts)]
    sums = popularity(num_prompts, exponent)
    times_s = arrivals_s(draw, arrivals_per_s)
    for number in range(num_requests):
        (prompt,) = draw.choices(prompts, cum_weights=sums)
        yield Request(
            name=str(number),
            arrival_s=next(times_s),
            prompt=(head, prompt),
            output_tokens=draw.randint(*output_tokens),
        )


def tools(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 800,
    num_heads: int = 40,
    exponent: float = 0.8,
    head_tokens: Range = (1500, 15_000),
    input_tokens: Range = (100, 2000),
    document_share: float = 0.25,
    document_tokens: Range = (10_000, 40_000),
    output_tokens: Range = (50, 300),
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Tools, and documents that are read once. The prompt of a tool is its head and a new input.

    A tool's head holds its instructions and examples.

    Args:
        num_requests: Number of requests, documents included.
        num_heads: Number of tools. Each has one head.
        exponent: Exponent of Zipf's law, by which tools are chosen; 0 for equally often.
        head_tokens: Fewest and most tokens of a head.
        input_tokens: Fewest and most tokens of an input, which comes after the head.
        document_share: Share of requests that read a document, which no other request reads.
        document_tokens: Fewest and most tokens of a document.
        output_tokens: Fewest and most tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of lengths, tools and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_requests=num_requests,
        num_heads=num_heads,
        exponent=exponent,
        head_tokens=head_tokens,
        input_tokens=input_tokens,
        document_share=document_share,
        document_tokens=document_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    draw = random.Random(seed)
    heads = [Piece(f"head {n}", draw.randint(*head_tokens)) for n in range(num_heads)]
    sums = popularity(num_heads, exponent)
    times_s = arrivals_s(draw, arrivals_per_s)
    for number in range(num_requests):
        if draw.random() < document_share:
            prompt = (Piece(f"document {number}", draw.randint(*document_tokens)),)
        else:
            (head,) = draw.choices(heads, cum_weights=sums)
            prompt = (head, Piece(f"input {number}", draw.randint(*input_tokens)))
        yield Request(
            name=str(number),
            arrival_s=next(times_s),
            prompt=prompt,
            output_tokens=draw.randint(*output_tokens),
        )


def documents(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 300,
    document_questions: Range = (2, 4),
    document_tokens: Range = (2000, 24_000),
    question_tokens: Range = (700, 2500),
    num_between: float = 12.0,
    output_tokens: Range = (30, 250),
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Documents that come and go. Each gets a few long questions, soon one after the other.

    Args:
        num_requests: Number of requests.
        document_questions: Fewest and most questions on a document.
        document_tokens: Fewest and most tokens of a document, which comes before the question.
        question_tokens: Fewest and most tokens of a question.
        num_between: Mean number of requests from the first question on a document to another one.
        output_tokens: Fewest and most tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of lengths, order and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_requests=num_requests,
        document_questions=document_questions,
        document_tokens=document_tokens,
        question_tokens=question_tokens,
        num_between=num_between,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    draw = random.Random(seed)
    asked: list[tuple[float, Piece]] = []
    while len(asked) < num_requests:
        document = Piece(f"document {len(asked)}", draw.randint(*document_tokens))
        place = draw.uniform(0, num_requests)
        for question in range(draw.randint(*document_questions)):
            later = draw.expovariate(1 / num_between) if question and num_between else 0.0
            asked.append((place + later, document))
    asked = sorted(asked[:num_requests], key=lambda each: each[0])
    times_s = arrivals_s(draw, arrivals_per_s)
    for number, (_, document) in enumerate(asked):
        question = Piece(f"question {number}", draw.randint(*question_tokens))
        yield Request(
            name=str(number),
            arrival_s=next(times_s),
            prompt=(document, question),
            output_tokens=draw.randint(*output_tokens),
        )


def loop(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_articles: int = 30,
    num_rounds: int = 8,
    article_tokens: int = 20_000,
    question_tokens: int = QUESTION_TOKENS,
    output_tokens: int = 64,
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Questions on articles in cyclic order: the least recently used article is always read next.

    If the articles are a little larger than the cache, a cache with LRU eviction never hits one.

    Args:
        num_articles: Number of articles.
        num_rounds: Number of questions on each article.
        article_tokens: Tokens of an article, which comes before the question.
        question_tokens: Tokens of a question.
        output_tokens: Tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of the arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(num_rounds=num_rounds)
    return articles(
        num_articles=num_articles,
        num_questions=num_rounds,
        article_tokens=article_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
        order="cyclic",
        seed=seed,
    )


def shift(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 400,
    num_articles: int = 24,
    article_tokens: int = 20_000,
    question_tokens: int = QUESTION_TOKENS,
    output_tokens: int = 64,
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Questions on articles. Other articles replace all of them halfway through.

    Args:
        num_requests: Number of requests. The second half asks about other articles than the first.
        num_articles: Number of articles in each half, all equally likely.
        article_tokens: Tokens of an article, which comes before the question.
        question_tokens: Tokens of a question.
        output_tokens: Tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of articles and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    return _asked(
        lambda number: 2 * number // num_requests,
        num_requests=num_requests,
        num_articles=num_articles,
        article_tokens=article_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
        seed=seed,
    )


def alternate(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 400,
    num_in_turn: int = 48,
    num_articles: int = 24,
    article_tokens: int = 20_000,
    question_tokens: int = QUESTION_TOKENS,
    output_tokens: int = 64,
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Questions on two sets of articles in turns: after a turn, the other set is read.

    If each set alone fits in the cache, a cache that forgets quickly has lost it at every turn.

    Args:
        num_requests: Number of requests.
        num_in_turn: Number of requests that ask about one set before the other set's turn.
        num_articles: Number of articles in each set, all equally likely.
        article_tokens: Tokens of an article, which comes before the question.
        question_tokens: Tokens of a question.
        output_tokens: Tokens of an answer.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of articles and arrivals.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(num_in_turn=num_in_turn)
    return _asked(
        lambda number: number // num_in_turn % 2,
        num_requests=num_requests,
        num_articles=num_articles,
        article_tokens=article_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
        seed=seed,
    )


def _asked(  # noqa: PLR0913  what its callers are asked for
    set_of: Callable[[int], int],
    *,
    num_requests: int,
    num_articles: int,
    article_tokens: int,
    question_tokens: int,
    output_tokens: int,
    arrivals_per_s: float,
    seed: int,
) -> Iterator[Request]:
    """Yield questions on random articles. `set_of` maps a request's number to its set."""
    check_arguments(
        num_requests=num_requests,
        num_articles=num_articles,
        article_tokens=article_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    draw = random.Random(seed)
    times_s = arrivals_s(draw, arrivals_per_s)
    for number in range(num_requests):
        article = f"article {draw.randrange(num_articles)} of set {set_of(number)}"
        yield Request(
            name=str(number),
            arrival_s=next(times_s),
            prompt=(
                Piece(article, article_tokens),
                Piece(f"question {number}", question_tokens),
            ),
            output_tokens=output_tokens,
        )
