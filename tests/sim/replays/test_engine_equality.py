"""A replay schedules what vLLM's own scheduler does, with the plugin's manager and with vLLM's.

Compared step by step are the requests, their tokens and drafts, preemptions and hits, and when each
request has its first token and its last.
"""

import os
import random
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

from jenga.sim.batching.speculation import Speculation
from jenga.sim.replays.session import Machine, Running, Settings, Trace, run_row
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import (
    ChunkedLocal,
    FullAttention,
    Layer,
    ModelSpec,
    SlidingWindow,
    State,
    StatePart,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ARENA_BYTES = 120_000
DRAFTS = Speculation(draft_tokens=2, acceptance=0.6, lookahead_tokens=2, draft_queries=1)
MOST_STEPS = 2000


def layers(*names, slot_bytes=64):
    return tuple(Layer(name=name, slot_bytes=slot_bytes) for name in names)


def states(*names, shape, draft_tokens=0):
    part = StatePart(name="recurrent", shape=shape, dtype="bfloat16")
    return State(
        name="state",
        layers=tuple(Layer(name=name, slot_bytes=part.num_bytes, parts=(part,)) for name in names),
        draft_tokens=draft_tokens,
    )


FULL = FullAttention(name="full", layers=layers("a", "b"))
SLIDING = SlidingWindow(name="sliding", layers=layers("c", "d", "e", "f"), window_tokens=48)
MAMBA1 = (60, 16)
MAMBA2 = (4, 15, 16)

MODELS = {
    "full": (FULL,),
    "latent": (FullAttention(name="latent", layers=layers("a", "b", slot_bytes=144)),),
    "sliding": (SLIDING, FULL),
    "two windows": (
        FULL,
        replace(SLIDING, name="short", layers=layers("g", "h"), window_tokens=20),
        SLIDING,
    ),
    "chunked": (FULL, ChunkedLocal(name="chunked", layers=layers("c", "d"), chunk_tokens=64)),
    "mamba1": (states("s", "t", shape=MAMBA1), FULL),
    "mamba2": (FULL, states("s", "t", shape=MAMBA2)),
    "sliding and states": (FULL, SLIDING, states("s", "t", shape=MAMBA2)),
    "states alone": (states("s", "t", shape=MAMBA1),),
}

NO_STOCK = {"two windows", "states alone", "sliding and states"}
"""Models that vLLM's own planner or manager takes only without prefix caching, or not at all."""

NO_PREEMPTIONS = {("states alone", "jenga"), ("sliding", "jenga"), ("full", "jenga")}
"""Where none is needed: prompts have pages promised, and answers take few or none."""


def requests_of(seed, num_requests=24):
    """Requests with a few shared beginnings, some after others; more than the arena holds."""
    draw = random.Random(seed)
    found, time_s = [], 0.0
    for number in range(num_requests):
        time_s += draw.choice((0, 0, 0.4, 3.0))
        pieces = [Piece(f"document {draw.randrange(4)}", draw.choice((64, 100, 130)))]
        if draw.random() < 0.8:
            pieces.append(Piece(f"question {draw.randrange(8)}", draw.randint(1, 80)))
        first = Request(
            name=f"{number}",
            arrival_s=time_s,
            prompt=tuple(pieces),
            output_tokens=draw.randint(1, 40),
            output=f"answer {number}",
        )
        found.append(first)
        if draw.random() < 0.3:
            answer = Piece(f"answer {number}", first.output_tokens)
            found.append(
                Request(
                    name=f"{number} goes on",
                    arrival_s=time_s,
                    after=(first.name,),
                    think_s=draw.choice((0, 1.5)),
                    prompt=(*first.prompt, answer, Piece(f"turn {number}", draw.randint(1, 60))),
                    output_tokens=draw.randint(1, 20),
                )
            )
    return found


def long_and_short(seed, num_requests=40):
    """Questions on a few long documents, of which some are new: most compute only a few tokens."""
    draw = random.Random(seed)
    found, time_s = [], 0.0
    for number in range(num_requests):
        time_s += draw.choice((0, 0.1, 0.6))
        document = Piece(f"document {draw.randrange(6)}", 500)
        found.append(
            Request(
                name=f"{number}",
                arrival_s=time_s,
                prompt=(document, Piece(f"question {number}", draw.randint(1, 8))),
                output_tokens=draw.randint(1, 12),
                output=f"answer {number}",
            )
        )
    return found


def clock(chunks):
    """A step costs by itself, and by its tokens."""
    return 0.05 + sum(chunk.num_tokens for chunk in chunks) / 512


@dataclass(frozen=True)
class Schedule:
    """What a replay scheduled, and how requests fared."""

    steps: list
    ends: list
    num_preemptions: int
    hit_tokens: int
    num_evicted: int


def step_of(scheduler, batch):
    chunks = [
        (chunk.active.name, chunk.start, chunk.num_tokens, chunk.num_drafted, chunk.generates)
        for chunk in batch.chunks
    ]
    return chunks, scheduler.num_preemptions


def end_of(active):
    return (
        active.name,
        active.hit_tokens,
        active.num_preemptions,
        active.first_token_s,
        active.finished_s,
    )


def schedule_of(model, manager, requests, settings, arena_bytes):
    """Replay requests, by the simulator's scheduler or the one that the settings name."""
    machine = Machine(model=model, arena_bytes=arena_bytes, clock=clock)
    trace = Trace("made", lambda: iter(requests))
    running = Running(run_row(machine, manager, trace, settings), machine, trace, settings)
    replay = running._replay()
    scheduler, steps, ends = replay.scheduler, [], []
    schedule = scheduler.schedule

    def recorded():
        batch = schedule()
        steps.append(step_of(scheduler, batch))
        return batch

    scheduler.schedule = recorded
    replay._on_end = lambda active: ends.append(end_of(active))
    for step in replay:
        assert step.number < MOST_STEPS
        replay.memory()
        replay.arena.check()
    return Schedule(
        steps, ends, scheduler.num_preemptions, replay.hit_tokens, replay.arena.num_evicted
    )


def both(model, manager, requests, settings, arena_bytes=ARENA_BYTES):
    """The schedule of a replay, which must be that of an engine."""
    from jenga.engine_scheduler import make_engine

    ours = schedule_of(model, manager, requests, settings, arena_bytes)
    engine_settings = replace(settings, engine=make_engine)
    theirs = schedule_of(model, manager, requests, engine_settings, arena_bytes)
    for number, (our, their) in enumerate(zip(ours.steps, theirs.steps, strict=False)):
        assert our == their, f"step {number}"
    assert ours == theirs
    return ours


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("manager", ["jenga", "vllm"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_an_engine(name, manager, is_asynchronous):
    if manager == "vllm" and name in NO_STOCK:
        pytest.skip("vLLM's manager does not take such layers")
    model = ModelSpec(name=name, layer_types=MODELS[name])
    settings = Settings(chunk_tokens=96, max_requests=6, is_asynchronous=is_asynchronous)

    found = [both(model, manager, requests_of(seed), settings) for seed in range(3)]

    assert all(each.hit_tokens > 0 for each in found)
    assert all(each.num_evicted > 0 for each in found)
    if (name, manager) not in NO_PREEMPTIONS:
        assert any(each.num_preemptions > 0 for each in found)


HISTORY = (
    StatePart(name="conv", shape=(5, 32), dtype="bfloat16"),
    StatePart(name="recurrent", shape=(4, 16, 16), dtype="bfloat16"),
    StatePart(name="history inputs", shape=(4, 16, 16), dtype="bfloat16"),
    StatePart(name="history projections", shape=(1, 16, 16), dtype="bfloat16"),
    StatePart(name="history steps", shape=(4 * 16 + 4,), dtype="float32"),
)
HISTORY_LAYER = Layer(name="s", slot_bytes=sum(each.num_bytes for each in HISTORY), parts=HISTORY)

DRAFTED = {
    "a state for each draft": states("s", "t", shape=(4, 16, 16), draft_tokens=2),
    "a history": State(name="state", layers=(HISTORY_LAYER,)),
}


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", DRAFTED)
def test_steps_with_drafts_are_those_of_an_engine(name, is_asynchronous):
    model = ModelSpec(name=name, layer_types=(FULL, DRAFTED[name]))
    settings = Settings(
        chunk_tokens=96, max_requests=6, is_asynchronous=is_asynchronous, speculation=DRAFTS
    )

    found = [
        both(model, "jenga", requests_of(seed), settings, arena_bytes=2 * ARENA_BYTES)
        for seed in range(3)
    ]

    assert all(each.hit_tokens > 0 for each in found)
    assert all(each.num_evicted > 0 for each in found)


@pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["sliding", "mamba2"])
def test_prompts_leave_the_room_for_short_requests_that_they_leave_in_an_engine(
    name, is_asynchronous, drafts
):
    model = ModelSpec(name=name, layer_types=MODELS[name])
    settings = Settings(
        chunk_tokens=160, max_requests=6, is_asynchronous=is_asynchronous, speculation=drafts
    )

    found = both(model, "jenga", long_and_short(0), settings, arena_bytes=4 * ARENA_BYTES)

    # A prompt that another step continues uses all that is left of a step, unless it leaves room.
    rooms = [
        chunks for chunks, _ in found.steps if any(not generates for *_, generates in chunks[:-1])
    ]
    assert len(rooms) > 1
    assert all(sum(chunk[2] for chunk in chunks) <= 160 for chunks in rooms)
