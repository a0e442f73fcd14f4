"""Bounds are no less than what the best cache does, and no more where that is easy to say."""

import random
from itertools import combinations

import pytest

from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.bounds import best_eviction, unlimited
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.workload.generators import articles
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import ChunkedLocal, FullAttention, Layer, ModelSpec, SlidingWindow, State

FULL = FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),))
SLIDING = SlidingWindow(name="sliding", layers=(Layer(name="1", slot_bytes=192),), window_tokens=65)
CHUNKED = ChunkedLocal(name="chunked", layers=(Layer(name="2", slot_bytes=128),), chunk_tokens=96)
STATE = State(name="state", layers=(Layer(name="3", slot_bytes=8192),))

MODELS = {
    "full": (FULL,),
    "full_and_sliding": (FULL, SLIDING),
    "full_and_chunked": (FULL, CHUNKED),
    "full_and_state": (FULL, STATE),
    "sliding_alone": (SLIDING,),
}


def spec_of(name):
    return ModelSpec(name=name, layer_types=MODELS[name])


def request_of(number, *pieces, output_tokens=1):
    prompt = tuple(Piece(content, num_tokens) for content, num_tokens in pieces)
    return Request(name=str(number), prompt=prompt, output_tokens=output_tokens)


def test_unlimited_cache_hits_all_that_was_computed_before():
    requests = [
        request_of(0, ("a", 64), ("b", 64), output_tokens=64),
        request_of(1, ("a", 64), ("c", 64)),
        request_of(2, ("a", 64), ("b", 64)),
        request_of(3, ("a", 40)),
    ]

    bound = unlimited(requests)

    # The last token is always computed, and prefixes are hit in steps of 16 tokens.
    assert bound.prompt_tokens == 128 + 128 + 128 + 40
    assert bound.hit_tokens == 0 + 64 + 112 + 32


def test_unlimited_cache_hits_what_was_generated_and_named():
    turn = Request(name="0", prompt=(Piece("a", 64),), output_tokens=64, output="answer")
    next_turn = request_of(1, ("a", 64), ("answer", 64), ("b", 16))

    assert unlimited([turn, next_turn]).hit_tokens == 128


@pytest.mark.parametrize("name", MODELS)
def test_best_eviction_is_unlimited_in_a_large_arena_and_none_without_room(name):
    requests = list(articles(num_articles=3, num_questions=4, article_tokens=320))

    assert best_eviction(requests, spec_of(name), 1 << 40).hit_tokens == (
        unlimited(requests).hit_tokens
    )
    cyclic = list(articles(num_articles=3, num_questions=4, article_tokens=320, order="cyclic"))
    assert best_eviction(cyclic, spec_of(name), 0).hit_tokens == 0


def test_best_eviction_of_equal_articles_is_what_fits_between_two_questions():
    # Three articles in turn, room for the running one and one more: of the two that are next, one.
    requests = list(
        articles(
            num_articles=3, num_questions=11, article_tokens=160, output_tokens=1, order="cyclic"
        )
    )
    article_bytes = 160 * 64

    bound = best_eviction(requests, spec_of("full"), 192 * 64 + article_bytes)

    # One article can be kept at any time, for two requests each.
    assert bound.hit_tokens == pytest.approx(160 * len(requests) / 2)


def best_by_trying_all(articles_asked, num_kept):
    """Hits of the best choice of articles kept between requests, each held whole or not at all."""
    states = {frozenset(): 0}
    for article in articles_asked:
        following = {}
        for kept, hits in states.items():
            there = kept | {article}
            others = there - {article}
            for size in range(min(num_kept, len(others)) + 1):
                for chosen in combinations(sorted(others), size):
                    state = frozenset((*chosen, article))
                    value = hits + (article in kept)
                    following[state] = max(following.get(state, 0), value)
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(5))
def test_best_eviction_is_no_less_than_the_best_of_all_choices(seed):
    draw = random.Random(seed)
    asked = [draw.randrange(5) for _ in range(24)]
    requests = [
        request_of(n, (f"article {article}", 160), (f"question {n}", 16))
        for n, article in enumerate(asked)
    ]

    for num_kept in (1, 2, 3):
        # A kept article takes 160 slots, the running request 176.
        arena_bytes = (176 + 160 * num_kept) * 64
        bound = best_eviction(requests, spec_of("full"), arena_bytes)
        assert best_by_trying_all(asked, num_kept) * 160 <= bound.hit_tokens
        assert bound.hit_tokens <= unlimited(requests).hit_tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", ["random", "cyclic"])
def test_no_replay_one_by_one_exceeds_the_best_eviction(name, order):
    requests = list(
        articles(num_articles=6, num_questions=5, article_tokens=480, output_tokens=20, order=order)
    )
    model = spec_of(name)

    for arena_bytes in (200_000, 400_000):
        bound = best_eviction(requests, model, arena_bytes)
        for manager in ("jenga", "max"):
            arena = make_arena(manager, model, arena_bytes)
            run = Replay(requests, arena, clock=constant_clock(1.0), max_requests=1)
            for _ in run:
                pass
            assert run.num_refused == 0
            assert run.hit_tokens <= bound.hit_tokens + 1e-6
