"""Prefix hashes are equal exactly where the tokens are."""

import random

import pytest

from jenga.sim.workload.generators import articles
from jenga.sim.workload.requests import MOST_TOKENS, Piece, Request, prefix_hashes


def tokens_of(pieces):
    return tuple((piece.content, i) for piece in pieces for i in range(piece.num_tokens))


@pytest.mark.parametrize("hash_tokens", [1, 4, 16, 80])
def test_prefix_hashes_are_equal_only_where_all_tokens_before_are(hash_tokens):
    draw = random.Random(hash_tokens)
    prefix_of = {}

    for _ in range(400):
        contents = draw.choices("abc", k=draw.randint(1, 4))
        pieces = [Piece(content, draw.choice((1, 5, 16, 33, 160))) for content in contents]
        tokens = tokens_of(pieces)
        hashes = prefix_hashes(pieces, hash_tokens)
        assert len(hashes) == len(tokens) // hash_tokens
        for index, prefix_hash in enumerate(hashes):
            prefix = tokens[: (index + 1) * hash_tokens]
            assert prefix_of.setdefault(prefix_hash, prefix) == prefix


def test_prompts_share_hashes_as_far_as_their_first_piece_goes():
    short = prefix_hashes([Piece("document", 40), Piece("question", 60)], 16)
    long = prefix_hashes([Piece("document", 100)], 16)

    assert short[:2] == long[:2]
    assert not set(short[2:]) & set(long[2:])


def test_long_pieces_are_hashed_as_short_ones_are():
    long = prefix_hashes([Piece("document", 16 * 5000 + 7)], 16)
    short = prefix_hashes([Piece("document", 16 * 10)], 16)

    assert len(set(long)) == 5000
    assert long[:10] == short


def test_content_named_by_a_number_is_not_that_named_by_its_digits():
    assert prefix_hashes([Piece(7, 16)], 16) != prefix_hashes([Piece("7", 16)], 16)


def test_pieces_and_requests_refuse_nothing_at_all():
    with pytest.raises(ValueError, match="num_tokens of a piece must be positive, got 0"):
        Piece("document", 0)
    with pytest.raises(ValueError, match="prompt of request 'a' must have a piece"):
        Request(name="a", prompt=(), output_tokens=1)
    with pytest.raises(ValueError, match="output_tokens of request 'a' must be positive, got 0"):
        Request(name="a", prompt=(Piece("document", 1),), output_tokens=0)


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "name"),
    [(MOST_TOKENS + 1, 1, "prompt_tokens"), (1, MOST_TOKENS + 1, "output_tokens")],
)
def test_requests_refuse_more_tokens_than_any_model_reads(prompt_tokens, output_tokens, name):
    with pytest.raises(ValueError, match=f"{name} of request 'a' must be at most 16777216, got"):
        Request(name="a", prompt=(Piece("document", prompt_tokens),), output_tokens=output_tokens)


@pytest.mark.parametrize("order", ["random", "rounds", "cyclic"])
def test_articles_are_all_asked_every_question_in_any_order(order):
    requests = list(articles(num_articles=3, num_questions=4, article_tokens=100, order=order))

    asked = {(request.prompt[0].content, request.prompt[1].content) for request in requests}
    assert len(asked) == len(requests) == 12
    assert len({article for article, _ in asked}) == 3
    if order != "random":
        first_round = {request.prompt[0].content for request in requests[:3]}
        assert len(first_round) == 3
