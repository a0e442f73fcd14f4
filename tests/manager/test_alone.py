"""A request that has the arena to itself comes to its end, wherever its small pages lie."""

import random

import pytest

from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from tests.machines.geometries import (
    ATTENTION,
    DRAFTED,
    DRAFTING,
    HYBRID,
    MIXED,
    STATES,
    WINDOWED,
    chunked,
    full,
    geometry,
    sliding,
)

WIDE_WINDOW = geometry(
    "wide window", full(slot_bytes=32, per_large=4), sliding(per_large=8, window=17)
)
MANY_WINDOWS = geometry(
    "many windows",
    full(per_large=16),
    sliding(slot_bytes=128, per_large=2, window=30),
    chunked(slot_bytes=64, per_large=4, chunk=12),
)
GEOMETRIES = (
    WINDOWED,
    HYBRID,
    MIXED,
    DRAFTING,
    ATTENTION,
    STATES,
    DRAFTED,
    WIDE_WINDOW,
    MANY_WINDOWS,
)


def smallest_manager(cut, num_tokens, chunk_tokens, *, prefix_caching):
    """A manager of the fewest large pages that promise to hold a request."""
    num_large_pages = 1 + len(cut.page_tables)
    while True:
        manager = Manager(
            cut, num_large_pages=num_large_pages, prefix_caching=prefix_caching, hash_tokens=4
        )
        if manager.can_ever_fit(num_tokens, chunk_tokens=chunk_tokens):
            return manager
        num_large_pages += 1


def run_alone(manager, *, prompt_tokens, num_tokens, chunk_tokens, needs_room_for_all):
    """Run a request as an engine does that preempts it when it is refused; how often it was."""
    keys = [f"{end}".encode() for end in range(4, num_tokens + 1, 4)]
    processed, known, is_running, num_refused = 0, prompt_tokens, False, 0
    while processed < num_tokens:
        manager.new_step()
        hit = None
        if not is_running:
            most_tokens = 0 if manager.starts_over("alone") else known - 1
            hit = manager.lookup(keys[: known // 4], max_tokens=most_tokens)
            processed = hit.num_tokens
        else:
            manager.commit("alone", keys, processed)
        end = min(known, processed + chunk_tokens)
        try:
            manager.allocate(
                "alone",
                num_tokens=end,
                num_processed_tokens=processed,
                hit=hit,
                full_tokens=known if needs_room_for_all and not is_running else 0,
            )
        except OutOfPagesError:
            num_refused += 1
            assert num_refused < 5
            if is_running:
                manager.free("alone")
            is_running = False
            continue
        finally:
            manager.check()
        is_running, processed = True, end
        known = max(known, min(num_tokens, processed + 1))
    return num_refused


def runs(cut, *, prefix_caching):
    """How often each of many requests was refused, in arenas that promise to hold it."""
    for seed in range(60):
        rng = random.Random(seed)
        num_tokens, chunk_tokens = rng.choice([20, 61, 150]), rng.choice([1, 3, 8, 16, 30])
        manager = smallest_manager(cut, num_tokens, chunk_tokens, prefix_caching=prefix_caching)
        yield run_alone(
            manager,
            prompt_tokens=rng.randint(1, num_tokens),
            num_tokens=num_tokens,
            chunk_tokens=chunk_tokens,
            needs_room_for_all=rng.random() < 0.5,
        )


@pytest.mark.parametrize("cut", GEOMETRIES, ids=lambda cut: cut.name)
def test_a_request_that_can_ever_fit_comes_to_its_end(cut):
    refused = list(runs(cut, prefix_caching=True))

    # Not every geometry spreads them so, but these do.
    assert any(refused) or cut not in (WINDOWED, MIXED)
    assert not any(runs(cut, prefix_caching=False))


def test_who_is_refused_beside_others_comes_in_with_its_hit():
    manager = Manager(WINDOWED, num_large_pages=5, prefix_caching=True, hash_tokens=4)
    manager.allocate("other", num_tokens=4)
    with pytest.raises(OutOfPagesError):
        manager.allocate("new", num_tokens=40)
    assert not manager.starts_over("new")

    manager.free("other")
    with pytest.raises(OutOfPagesError):
        manager.allocate("new", num_tokens=400)
    assert manager.starts_over("new")

    manager.allocate("other", num_tokens=4)
    assert not manager.starts_over("new")
    manager.check()


def test_who_was_refused_is_left_no_room_until_another_request_ends():
    manager = Manager(WINDOWED, num_large_pages=5, prefix_caching=True, hash_tokens=4)
    manager.allocate("other", num_tokens=4)
    manager.allocate("more", num_tokens=4)
    assert manager.rest_tokens("new", [], num_tokens=40) == 40
    with pytest.raises(OutOfPagesError):
        manager.allocate("new", num_tokens=40)

    assert manager.was_refused("new")
    assert manager.rest_tokens("new", [], num_tokens=40) is None
    assert manager.rest_tokens("behind it", [], num_tokens=40) == 40
    manager.free("more")
    assert not manager.was_refused("new")
    assert manager.rest_tokens("new", [], num_tokens=40) == 40


def test_what_is_cached_is_not_left_to_compute():
    manager = Manager(WINDOWED, num_large_pages=16, prefix_caching=True, hash_tokens=4)
    keys = [b"1", b"2", b"3"]
    manager.allocate("first", num_tokens=12)
    manager.commit("first", keys, 12)
    manager.free("first")

    assert manager.rest_tokens("next", keys, num_tokens=13) == 1
    assert manager.rest_tokens("next", [b"1", b"2", b"4"], num_tokens=13) == 5
    assert manager.rest_tokens("next", [b"4"], num_tokens=13) == 13
    with pytest.raises(ValueError, match="num_tokens must be"):
        manager.rest_tokens("next", keys, num_tokens=0)
