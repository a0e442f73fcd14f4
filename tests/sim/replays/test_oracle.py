"""The eviction policy that knows the trace."""

import pytest

from jenga.eviction.known import EVICTION_POLICIES
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.bounds import unlimited
from jenga.sim.replays.oracle import Oracle
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.workload.sources import open_source
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State


def layers(prefix, count, slot_bytes):
    return tuple(Layer(name=f"{prefix}{i}", slot_bytes=slot_bytes) for i in range(count))


FULL = FullAttention(name="full", layers=layers("f", 2, 512))
MODELS = {
    "full": ModelSpec(name="full", layer_types=(FULL,)),
    "sliding": ModelSpec(
        name="sliding",
        layer_types=(
            FULL,
            SlidingWindow(name="sliding", layers=layers("w", 4, 512), window_tokens=256),
        ),
    ),
    "states": ModelSpec(
        name="states",
        layer_types=(FULL, State(name="state", layers=layers("s", 2, 400_000))),
    ),
}
ARENA_BYTES = {"full": 10_000_000, "sliding": 16_000_000, "states": 22_000_000}
"""About ten texts of a thousand tokens."""

LOOP = "loop:n=14,rounds=6,tokens=1000,question=20,output=4,rate=1"


def replay(model, trace, policy=None, *, check=False):
    """Run requests one after another with a policy; None for the oracle."""
    requests = list(open_source(trace))
    oracle = Oracle(requests) if policy is None else None
    arena = make_arena(
        "jenga",
        MODELS[model],
        ARENA_BYTES[model],
        eviction_policy=(lambda: oracle) if oracle is not None else EVICTION_POLICIES[policy],
    )
    if oracle is not None:
        oracle.attach(arena.manager.prefix_cache.tree)
    run = Replay(requests, arena, clock=constant_clock(0.01))
    for step in run:
        if oracle is not None:
            oracle.look(run.time_s, run.scheduler.running)
        if check and step.number % 8 == 0:
            arena.check()
    return run


@pytest.mark.parametrize("model", MODELS)
def test_the_oracle_hits_texts_read_round_and_round_where_the_least_recently_used_does_not(model):
    oracle, lru = replay(model, LOOP, check=True), replay(model, LOOP, "lru")

    assert oracle.hit_tokens > 0.3 * oracle.prompt_tokens
    assert lru.hit_tokens < 0.5 * oracle.hit_tokens


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "trace",
    [
        "articles:n=20,questions=5,tokens=1000,question=40,output=8,rate=1",
        "zipf:n=120,num_prompts=60,head=64,tokens=200-1500,output=4-8,rate=2",
        (
            "agents:n=8,turns=3-8,head=200,task_tokens=100-900,result_tokens=20-300,output=10-40,"
            "think=5,pause_s=10-40,rate=0.3"
        ),
    ],
    ids=["articles", "prompts_by_popularity", "agents_in_closed_loop"],
)
def test_the_oracle_hits_no_less_than_what_cannot_look_ahead(model, trace):
    hits = {policy: replay(model, trace, policy).hit_tokens for policy in (None, "lru", "learned")}

    best = max(hits["lru"], hits["learned"])
    assert hits[None] >= 0.98 * best
    assert hits[None] <= unlimited(open_source(trace)).hit_tokens


def test_the_oracle_asks_for_its_tree_before_it_ranks():
    requests = list(open_source(LOOP))
    arena = make_arena(
        "jenga", MODELS["full"], ARENA_BYTES["full"], eviction_policy=lambda: Oracle(requests)
    )

    with pytest.raises(ValueError, match="attach must be given the tree"):
        for _ in Replay(requests, arena, clock=constant_clock(0.01)):
            pass
