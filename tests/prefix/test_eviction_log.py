"""The record of lost checkpoints: whose they were, for whom they went, and why."""

import pytest

from jenga.eviction.points import Kind
from jenga.manager import Manager
from jenga.planning.planner import plan
from jenga.prefix.eviction_log import EvictionCause
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State

HASH_TOKENS = 16


def layers(count, slot_bytes):
    return tuple(
        Layer(name=f"{slot_bytes}.{index}", slot_bytes=slot_bytes) for index in range(count)
    )


FULL = FullAttention(name="full", layers=layers(2, 512))
WINDOW = SlidingWindow(name="window", layers=layers(4, 256), window_tokens=64)
STATE = State(name="state", layers=layers(4, 4096))
MODELS = {
    "full": ModelSpec(name="full", layer_types=(FULL,)),
    "window": ModelSpec(name="window", layer_types=(FULL, WINDOW)),
    "state": ModelSpec(name="state", layer_types=(FULL, STATE)),
}


def manager_of(name, num_large_pages, **options):
    geometry = plan(MODELS[name])
    manager = Manager(
        geometry,
        num_large_pages=num_large_pages,
        prefix_caching=True,
        hash_tokens=HASH_TOKENS,
        **options,
    )
    manager.record_evictions()
    return manager


def hashes(text, num_tokens):
    return [f"{text} {end}".encode() for end in range(1, num_tokens // HASH_TOKENS + 1)]


def serve(manager, name, text, num_tokens):
    """Let a request read a text and end; the prefix that it found."""
    prefix_hashes = hashes(text, num_tokens)
    manager.new_step()
    hit = manager.lookup(prefix_hashes, max_tokens=num_tokens - 1)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    manager.commit(name, prefix_hashes, num_tokens)
    for tokens in manager.checkpoint_tokens(name):
        manager.keep_state(name, prefix_hashes[tokens // HASH_TOKENS - 1], tokens)
    manager.check()
    manager.new_step()
    manager.free(name)
    manager.check()
    return hit.num_tokens


@pytest.mark.parametrize("name", ["window", "state"])
def test_a_checkpoint_that_another_request_needs_the_memory_of_is_recorded_whole(name):
    manager = manager_of(name, 120)
    serve(manager, "first", "book", 800)
    assert manager.take_evictions() == []

    number = 0
    while not (evictions := manager.take_evictions()):
        number += 1
        serve(manager, f"later {number}", f"text {number}", 800)

    lost = [each for each in evictions if each.cause == EvictionCause.CHECKPOINT]
    assert lost == evictions
    for eviction in lost:
        assert eviction.for_request == f"later {number}"
        assert eviction.left_by in {"first", *(f"later {each}" for each in range(1, number))}
        assert eviction.kind in {Kind.PROMPT_END, Kind.BEFORE_END, Kind.ANSWER_END}
        assert 0 <= eviction.kept_tokens < eviction.num_tokens <= 800
        assert eviction.freed_bytes > 0
        assert eviction.worth is not None
        assert not eviction.was_awaited


def test_what_was_cut_from_the_end_of_a_prefix_is_what_a_later_request_does_not_find():
    manager = manager_of("full", 150)
    serve(manager, "first", "book", 1600)
    serve(manager, "second", "text", 800)
    manager.take_evictions()

    serve(manager, "third", "other text", 800)

    evictions = manager.take_evictions()
    places = [(each.num_tokens, each.kept_tokens) for each in evictions]
    assert {each.cause for each in evictions} == {EvictionCause.END}
    assert {each.left_by for each in evictions} == {"first"}
    assert {each.for_request for each in evictions} == {"third"}
    assert [before for before, _ in places[1:]] == [after for _, after in places[:-1]]
    hit = manager.lookup(hashes("book", 1600), max_tokens=1599)
    assert hit.num_tokens == places[-1][1]


def test_a_guess_that_the_real_branch_replaces_needs_no_memory():
    manager = manager_of("window", 400)
    head = hashes("book", 1600)
    for number in range(2):
        prefix_hashes = head + [f"question {number} {end}".encode() for end in range(20)]
        num_tokens = len(prefix_hashes) * HASH_TOKENS
        manager.new_step()
        hit = manager.lookup(prefix_hashes, max_tokens=num_tokens - 1)
        manager.allocate(f"{number}", num_tokens=num_tokens, hit=hit)
        manager.commit(f"{number}", prefix_hashes, num_tokens)
        manager.new_step()
        manager.free(f"{number}")
        manager.check()

    evictions = manager.take_evictions()

    assert [each.cause for each in evictions] == [EvictionCause.GUESS]
    assert evictions[0].for_request == ""
    assert evictions[0].worth is None


def test_nothing_is_recorded_unless_it_is_asked_for():
    manager = Manager(plan(MODELS["full"]), num_large_pages=80, prefix_caching=True)
    for number in range(6):
        serve(manager, f"{number}", f"text {number}", 800)

    assert manager.take_evictions() == []
    assert manager.prefix_cache.tree.log is None
    assert serve(manager, "again", "text 0", 800) == 0


def test_a_cleared_cache_is_no_loss():
    manager = manager_of("full", 80)
    serve(manager, "first", "book", 800)

    assert manager.reset_prefix_cache()

    assert manager.take_evictions() == []
    assert serve(manager, "again", "book", 800) == 0
