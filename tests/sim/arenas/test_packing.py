"""Pages of requests that come and go stay together, so that large pages can be given away."""

import random

import pytest

from jenga.models import known_model
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.replay import Replay
from jenga.sim.workload.requests import Piece, Request

ARENA_BYTES = 3 << 30
PROMPT_TOKENS = (200, 20_000)


def requests_of(num_requests, seed):
    """Prompts of many lengths that have nothing in common, all there from the start."""
    draw = random.Random(seed)
    shortest, longest = PROMPT_TOKENS
    for number in range(num_requests):
        num_tokens = int(shortest * (longest / shortest) ** draw.random())
        yield Request(
            name=str(number),
            prompt=(Piece(number, num_tokens),),
            output_tokens=draw.randint(20, 400),
        )


@pytest.mark.parametrize("seed", [0, 1])
def test_what_nobody_reads_takes_little_from_those_who_wait(seed):
    # A state takes whole large pages; 98 pages of 16 tokens share one. Taken by age alone the
    # latter's pages are strewn, so that a fifth of the arena and more is cached and of no use.
    arena = make_arena("jenga", known_model("granite-4.0-h-small").spec(), ARENA_BYTES)
    arena.leaves_room = False  # prompts would take a step more, and hold their last pages later
    run = Replay(requests_of(600, seed), arena, clock=lambda _: 0.05)

    shares = []
    for step in run:
        if step.num_waiting and step.number > 200 and step.number % 16 == 0:
            memory = arena.memory(run.scheduler.running)
            shares.append((memory.used_bytes + memory.useless_bytes) / ARENA_BYTES)

    assert sum(shares) / len(shares) > 0.88
    arena.manager.check()
