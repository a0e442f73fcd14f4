"""What a step computes: running requests first, in chunks, the youngest preempted, FIFO behind."""

import pytest

from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.batching.scheduler import Scheduler
from jenga.sim.workload.requests import Piece, Request


class SlotArena:
    """So many slots, one a token; hits are given; the log says what was asked."""

    leaves_room = True

    def __init__(self, num_slots, hits=None):
        self.num_slots = num_slots
        self.held = {}
        self.hits = hits or {}
        self.log = []
        self.num_evicted = 0

    def new_step(self):
        self.log.append("step")

    def end_step(self):
        pass

    def waits(self, active, *, first=False):
        self.log.append(("waits", active.name, first))

    def refuse(self, active):
        self.log.append(("refuse", active.name))

    def find(self, active):
        return self.hits.get(active.name, 0)

    def chunk_tokens(self, _active, _start, num_tokens):
        return num_tokens

    def rest_tokens(self, active):
        return active.num_tokens - self.find(active)

    def admit(self, active, _hit_tokens, num_tokens, lookahead_tokens=0):
        # As vLLM, all that is known must fit.
        num_tokens += lookahead_tokens
        if sum(self.held.values()) + active.num_tokens > self.num_slots:
            return False
        self.held[active.name] = num_tokens
        return True

    def grow(self, active, num_tokens, lookahead_tokens=0):
        num_tokens += lookahead_tokens
        others = sum(self.held.values()) - self.held[active.name]
        if others + num_tokens > self.num_slots:
            return False
        self.held[active.name] = num_tokens
        return True

    def settle(self, active, num_tokens, *, ends_prompt=False):
        self.log.append((active.name, num_tokens) + ("prompt",) * ends_prompt)

    def free(self, active):
        del self.held[active.name]


def active_of(name, prompt_tokens, output_tokens):
    return ActiveRequest(
        Request(name=name, prompt=(Piece(name, prompt_tokens),), output_tokens=output_tokens)
    )


def scheduler_of(arena, *requests, **options):
    scheduler = Scheduler(arena, **options)
    scheduler.waiting.extend(requests)
    return scheduler


def computed(batch):
    return [(chunk.active.name, chunk.num_tokens) for chunk in batch.chunks]


def scheduled(scheduler):
    batch = scheduler.schedule()
    return computed(batch), [active.name for active in scheduler.finish(batch, 1.0)]


def test_prompts_are_computed_in_chunks_beside_what_decodes():
    scheduler = scheduler_of(
        SlotArena(1000), active_of("a", 10, 3), active_of("b", 250, 2), chunk_tokens=100
    )

    assert scheduled(scheduler) == ([("a", 10), ("b", 90)], [])
    assert scheduled(scheduler) == ([("a", 1), ("b", 99)], [])
    assert scheduled(scheduler) == ([("a", 1), ("b", 61)], ["a"])
    assert scheduled(scheduler) == ([("b", 1)], ["b"])


def test_first_token_comes_with_the_last_chunk_of_the_prompt():
    request = active_of("a", 150, 1)
    scheduler = scheduler_of(SlotArena(1000), request, chunk_tokens=100)

    assert scheduler.finish(scheduler.schedule(), 1.0) == []
    assert request.first_token_s < 0
    assert scheduler.finish(scheduler.schedule(), 2.0) == [request]
    assert request.first_token_s == request.finished_s == 2.0


def test_no_more_requests_run_than_are_allowed_and_the_first_come_first():
    requests = [active_of(name, 10, 2) for name in "abc"]
    scheduler = scheduler_of(SlotArena(1000), *requests, max_requests=2)

    assert scheduled(scheduler) == ([("a", 10), ("b", 10)], [])
    assert scheduled(scheduler) == ([("a", 1), ("b", 1)], ["a", "b"])
    assert scheduled(scheduler) == ([("c", 10)], [])


def test_a_request_that_does_not_fit_holds_up_those_behind_it():
    scheduler = scheduler_of(
        SlotArena(100), active_of("a", 60, 2), active_of("b", 60, 2), active_of("c", 10, 2)
    )

    assert scheduled(scheduler) == ([("a", 60)], [])
    assert scheduled(scheduler) == ([("a", 1)], ["a"])
    assert scheduled(scheduler) == ([("b", 60), ("c", 10)], [])


def test_the_youngest_is_preempted_and_comes_back_first_with_what_it_generated():
    requests = [active_of(name, 10, 20) for name in "abc"]
    scheduler = scheduler_of(SlotArena(36), *requests, active_of("d", 3, 2))

    assert scheduled(scheduler)[0] == [("a", 10), ("b", 10), ("c", 10), ("d", 3)]
    assert scheduled(scheduler)[0] == [("a", 1), ("b", 1), ("c", 1)]
    assert scheduler.num_preemptions == 1
    # d has its first token, finds no slot for it and waits; then c makes room for a and b.
    assert scheduled(scheduler)[0] == [("a", 1), ("b", 1), ("c", 1)]
    assert scheduled(scheduler)[0] == [("a", 1), ("b", 1)]

    assert [active.name for active in scheduler.waiting] == ["c", "d"]
    assert scheduler.waiting[0].num_tokens == 13
    assert scheduler.waiting[0].facts.prompt_tokens == 13
    assert scheduler.waiting[0].num_computed == 0
    assert scheduler.num_preemptions == 2


def test_nobody_comes_in_during_a_step_that_preempted():
    arena = SlotArena(21)
    scheduler = scheduler_of(arena, active_of("a", 10, 9), active_of("b", 10, 9))
    scheduled(scheduler)
    scheduler.waiting.append(active_of("c", 1, 2))

    assert scheduled(scheduler)[0] == [("a", 1)]
    assert [active.name for active in scheduler.waiting] == ["b", "c"]


def test_a_hit_is_not_computed_again_and_counts_once():
    arena = SlotArena(100, hits={"a": 16})
    request = active_of("a", 20, 3)
    scheduler = scheduler_of(arena, request)

    assert scheduled(scheduler) == ([("a", 4)], [])
    assert arena.log == ["step", ("a", 20, "prompt")]
    assert request.hit_tokens == 16
    arena.free(request)
    scheduler.running.clear()
    request.restart()
    scheduler.waiting.append(request)
    arena.hits["a"] = 0
    assert scheduled(scheduler) == ([("a", 21)], [])
    assert request.hit_tokens == 16


def test_a_chunk_that_its_arena_shortens_to_nothing_waits_for_the_next_step():
    class AlignedArena(SlotArena):
        def chunk_tokens(self, _active, start, num_tokens):
            return (start + num_tokens) // 64 * 64 - start if num_tokens > 1 else num_tokens

    scheduler = scheduler_of(
        AlignedArena(1000), active_of("a", 128, 2), active_of("b", 128, 2), chunk_tokens=100
    )

    assert scheduled(scheduler)[0] == [("a", 64)]
    assert scheduled(scheduler)[0] == [("a", 64)]
    assert scheduled(scheduler)[0] == [("a", 1), ("b", 64)]


def test_a_prompt_leaves_room_for_short_requests_behind_it():
    requests = [active_of("a", 1000, 2), active_of("b", 10, 2), active_of("c", 8, 2)]
    arena = SlotArena(5000, hits={"d": 995})
    scheduler = scheduler_of(arena, *requests, chunk_tokens=320)

    # It comes in with them.
    assert scheduled(scheduler)[0] == [("a", 302), ("b", 10), ("c", 8)]
    assert scheduled(scheduler)[0] == [("a", 318), ("b", 1), ("c", 1)]
    scheduler.arrive(active_of("d", 1000, 2))
    scheduler.arrive(active_of("e", 16, 2))
    # Both would take more than a sixteenth of the step.
    assert scheduled(scheduler)[0] == [("a", 315), ("d", 5)]
    # It ends its prompt, and leaves what it does not need.
    assert scheduled(scheduler)[0] == [("a", 65), ("d", 1), ("e", 16)]


def test_no_room_is_left_for_requests_that_cannot_come_in():
    class FullArena(SlotArena):
        def rest_tokens(self, active):
            return None if active.name == "b" else super().rest_tokens(active)

    requests = [active_of("a", 1000, 2), active_of("b", 10, 2), active_of("c", 8, 2)]

    scheduler = scheduler_of(FullArena(5000), *requests, chunk_tokens=320)
    assert scheduled(scheduler)[0] == [("a", 320)]
    scheduler = scheduler_of(SlotArena(5000), *requests, chunk_tokens=320, max_requests=1)
    assert scheduled(scheduler)[0] == [("a", 320)]
    scheduler = scheduler_of(SlotArena(5000), *requests, chunk_tokens=320, max_requests=2)
    assert scheduled(scheduler)[0] == [("a", 310), ("b", 10)]


def test_no_room_is_left_in_an_arena_whose_engine_leaves_none():
    arena = SlotArena(5000)
    arena.leaves_room = False

    scheduler = scheduler_of(
        arena, active_of("a", 1000, 2), active_of("b", 10, 2), chunk_tokens=320
    )
    assert scheduled(scheduler)[0] == [("a", 320)]


def test_a_prompt_that_waits_is_not_put_off_for_requests_behind_it():
    requests = [active_of("a", 315, 2), active_of("b", 1000, 2), active_of("c", 8, 2)]
    scheduler = scheduler_of(SlotArena(5000), *requests, chunk_tokens=320)

    assert scheduled(scheduler)[0] == [("a", 315), ("b", 5)]
    assert scheduled(scheduler)[0] == [("a", 1), ("b", 311), ("c", 8)]


@pytest.mark.parametrize("field", ["chunk_tokens", "max_requests"])
def test_scheduler_refuses_to_compute_nothing(field):
    with pytest.raises(ValueError, match=f"{field} must be a positive"):
        Scheduler(SlotArena(1), **{field: 0})
