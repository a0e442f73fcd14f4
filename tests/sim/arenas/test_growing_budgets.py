"""Replays of a model whose layers choose again as outputs grow: the rule of the engine."""

from jenga.policies.token_budget import next_choice
from jenga.sim.arenas.jenga_arena import ManagedArena
from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.batching.scheduler import Scheduler
from jenga.sim.workload.requests import Piece, Request
from tests.machines.geometries import GROWING_BUDGETS

INTERVAL = 5


def run(num_large_pages, *, prompts, output_tokens):
    """Run requests to their ends, and get the chunks, the preemptions and the most pages held."""
    arena = ManagedArena(GROWING_BUDGETS, num_large_pages * GROWING_BUDGETS.large_page_bytes)
    scheduler = Scheduler(arena, chunk_tokens=16, max_requests=4)
    for number, prompt in enumerate(prompts):
        request = Request(
            name=f"r{number}", prompt=(Piece(f"r{number}", prompt),), output_tokens=output_tokens
        )
        scheduler.waiting.append(ActiveRequest(request))
    chunks, most = [], [0, 0, 0]
    for time_s in range(10_000):
        batch = scheduler.schedule()
        arena.check()
        for chunk in batch.chunks:
            chunks.append((chunk.active.prompt_tokens, chunk.start, chunk.end))
            tables = arena.manager.page_tables(chunk.active.name)
            held = [sum(page > 0 for page in pages) for pages in tables]
            if chunk.start > chunk.active.prompt_tokens:
                most = list(map(max, most, held))
        scheduler.finish(batch, float(time_s))
        if not scheduler.running and not scheduler.waiting:
            break
    assert not scheduler.running
    assert not scheduler.waiting
    return chunks, scheduler.num_preemptions, most


def test_layers_hold_their_budget_and_an_interval_at_most():
    _, num_preemptions, most = run(200, prompts=[3, 6, 30], output_tokens=60)

    assert num_preemptions == 0
    # Budgets of 8 and 17 tokens and 5 more, in pages of 4; full attention holds all 89.
    assert most[0] == 23
    assert most[1] <= 4
    assert most[2] <= 6


def test_preempted_requests_are_read_again_up_to_the_same_choices():
    chunks, num_preemptions, _ = run(16, prompts=[12, 9, 14, 11, 8, 13], output_tokens=40)

    assert num_preemptions > 0
    for prompt_tokens, start, end in chunks:
        assert end <= next_choice(prompt_tokens, start, INTERVAL)
    assert any(start >= prompt and end - start > 1 for prompt, start, end in chunks)
