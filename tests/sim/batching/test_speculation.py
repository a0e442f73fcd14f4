"""Replays of speculative decoding: tokens accepted, slots held, time of both models."""

from dataclasses import replace

import pytest

from jenga.models import ReadOptions, known_model
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.batching.speculation import Speculation
from jenga.sim.batching.step_time import StepTime, drafted_time, weights_of
from jenga.sim.hardware.gpus import find_gpu
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State

LAYERS = tuple(Layer(name=str(index), slot_bytes=256) for index in range(3))
MODEL = ModelSpec(
    name="three types",
    layer_types=(
        FullAttention(name="full", layers=LAYERS[:1]),
        SlidingWindow(name="sliding", layers=LAYERS[1:2], window_tokens=64),
        State(name="state", layers=LAYERS[2:], draft_tokens=4),
    ),
)
ARENA_BYTES = 1 << 20


def requests(number=40, output=60):
    for index in range(number):
        yield Request(
            name=f"r{index}",
            arrival_s=0.0,
            prompt=(
                Piece(content="head", num_tokens=64),
                Piece(content=f"own{index}", num_tokens=100),
            ),
            output_tokens=output + index % 7,
        )


def replay(speculation, *, model=MODEL, manager="jenga", check=False, **options):
    ended = []
    arena = make_arena(manager, model, options.pop("arena_bytes", ARENA_BYTES))
    run = Replay(
        requests(**options),
        arena,
        clock=constant_clock(1.0),
        speculation=speculation,
        on_end=ended.append,
    )
    for _ in run:
        if check:
            arena.check()
    return run, ended


def test_acceptance_is_what_it_says_on_average_and_the_same_every_time():
    some = Speculation(draft_tokens=4, acceptance=0.7)
    drawn = [some.accepted(f"r{index}", tokens, 4) for index in range(50) for tokens in range(99)]

    assert drawn == [
        some.accepted(f"r{index}", tokens, 4) for index in range(50) for tokens in range(99)
    ]
    assert set(drawn) == set(range(5))
    assert sum(drawn) / len(drawn) == pytest.approx(some.mean_tokens - 1, rel=0.03)
    assert some.mean_tokens == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert all(Speculation(draft_tokens=4, acceptance=1).accepted("r", n, 3) == 3 for n in range(9))
    assert not any(Speculation(draft_tokens=4, acceptance=0).accepted("r", n, 4) for n in range(9))


@pytest.mark.parametrize(("tokens", "acceptance"), [(0, 0.5), (-1, 0.5), (4, 1.5), (4, -0.1)])
def test_what_is_no_speculation_is_refused(tokens, acceptance):
    with pytest.raises(ValueError, match=r"draft_tokens must be|acceptance must be"):
        Speculation(draft_tokens=tokens, acceptance=acceptance)


@pytest.mark.parametrize("manager", ["jenga", "paged", "static", "vllm"])
def test_requests_end_with_their_tokens_in_fewer_steps(manager):
    state = State(name="state", layers=(Layer(name="2", slot_bytes=1 << 15),), draft_tokens=4)
    model = replace(MODEL, layer_types=(*MODEL.layer_types[:2], state))
    options = {"manager": manager, "model": model, "arena_bytes": 16 * ARENA_BYTES}

    plain, ended = replay(None, **options)
    drafted, ended_drafted = replay(Speculation(draft_tokens=4, acceptance=0.7), **options)

    assert plain.output_tokens == drafted.output_tokens == sum(60 + i % 7 for i in range(40))
    assert sorted(each.name for each in ended) == sorted(each.name for each in ended_drafted)
    assert all(each.num_tokens == each.total_tokens for each in ended_drafted)
    # A prompt, then the other tokens at 2.77 a step.
    assert 60 / 2.77 < drafted.num_steps < 0.6 * plain.num_steps


def test_the_right_drafts_alone_make_steps_few():
    all_right, _ = replay(Speculation(draft_tokens=4, acceptance=1), number=1, output=51)
    none_right, _ = replay(Speculation(draft_tokens=4, acceptance=0), number=1, output=51)
    plain, _ = replay(None, number=1, output=51)

    # The prompt's step gives the first token; 50 more come five at a time.
    assert all_right.num_steps == 1 + 10
    assert none_right.num_steps == plain.num_steps == 51


def test_drafts_are_held_and_lost_with_a_request_that_is_preempted():
    speculation = Speculation(draft_tokens=4, acceptance=0.5, lookahead_tokens=4)

    run, ended = replay(speculation, arena_bytes=160 << 10, check=True, output=120)

    assert run.scheduler.num_preemptions > 0
    assert len(ended) == 40
    assert all(each.num_tokens == each.total_tokens for each in ended)


def test_time_is_that_of_the_target_and_of_every_pass_of_the_draft():
    models = [known_model("llama-3.1-70b"), known_model("llama-3.2-1b")]
    gpu, options = find_gpu("H200"), ReadOptions(draft_tokens=4)
    weights = weights_of(models[0])
    both = drafted_time(models, options, gpu, weights=weights)
    target = StepTime(models[0].spec(options), weights, gpu)
    draft = StepTime(models[1].spec(options), weights_of(models[1]), gpu)
    seconds = []

    def clock(scheduled):
        decoding = [active for active in scheduled if active.num_drafted]
        expected = target(scheduled) + draft(scheduled)
        expected += 3 * draft(decoding, 1) if decoding else 0
        seconds.append((both(scheduled), expected))
        return both(scheduled)

    speculation = Speculation(draft_tokens=4, acceptance=0.7, lookahead_tokens=4)
    run = Replay(
        requests(4, 20),
        make_arena("jenga", MODEL, ARENA_BYTES),
        clock=clock,
        speculation=speculation,
    )
    for _ in run:
        pass
    assert len(seconds) > 5
    assert all(found == pytest.approx(expected) for found, expected in seconds)
