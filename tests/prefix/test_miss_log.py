"""The record of admissions: tokens found, and for the others what became of them."""

import pytest

from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from jenga.planning.planner import plan
from jenga.prefix.miss_log import LOOSE, Loss, MissedTokens, missed_tokens
from tests.prefix.test_eviction_log import HASH_TOKENS, MODELS, hashes, manager_of, serve


def admit(manager, name, prefix_hashes):
    """Admit a request, commit its tokens, and return the record of its admission."""
    num_tokens = len(prefix_hashes) * HASH_TOKENS
    hit = manager.lookup(prefix_hashes, max_tokens=num_tokens - 1)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    manager.commit(name, prefix_hashes, num_tokens)
    (miss,) = manager.take_misses()
    assert (miss.request, miss.found_tokens) == (name, hit.num_tokens)
    return miss


@pytest.mark.parametrize("name", ["full", "window", "state"])
def test_new_text_was_never_cached(name):
    manager = manager_of(name, 200)
    serve(manager, "first", "book", 800)
    manager.take_misses()

    miss = admit(manager, "second", hashes("book", 400) + hashes("question", 400))

    # Of 800 tokens the last one is computed in any case, and with it the last 16.
    assert miss.asked_tokens == 784
    assert miss.never_tokens == 784 - 400
    # A state is kept 512 tokens before the end of the prompt that can be asked for.
    found = 784 - 512 if name == "state" else 400
    assert (miss.found_tokens, miss.bare_tokens) == (found, 400 - found)
    assert (miss.evicted_tokens, miss.losses) == (0, ())
    assert missed_tokens(miss)["never cached"] == 384


def test_the_cut_end_of_a_text_names_the_request_it_was_cut_for():
    manager = manager_of("full", 150)
    serve(manager, "first", "book", 1600)
    serve(manager, "second", "text", 800)
    manager.take_evictions()
    serve(manager, "third", "other text", 800)
    evictions = manager.take_evictions()
    manager.take_misses()

    miss = admit(manager, "again", [*hashes("book", 1600), b"question"])

    found = evictions[-1].kept_tokens
    assert (miss.asked_tokens, miss.found_tokens, miss.table) == (1600, found, "full")
    assert (miss.never_tokens, miss.evicted_tokens, miss.bare_tokens) == (0, 1600 - found, 0)
    assert miss.losses[0].loss == Loss("end", 1, "first", "third")
    assert miss.losses[0].evicted_tokens == evictions[0].num_tokens - found
    assert sum(each.evicted_tokens for each in miss.losses) == 1600 - found


@pytest.mark.parametrize("name", ["window", "state"])
def test_a_text_whose_checkpoints_were_evicted_names_the_requests_they_went_for(name):
    manager = manager_of(name, 120)
    serve(manager, "first", "book", 800)
    number = 0
    while manager.lookup(hashes("book", 800), max_tokens=799).num_tokens:
        number += 1
        serve(manager, f"later {number}", f"text {number}", 800)
    evictions = manager.take_evictions()
    manager.take_misses()

    miss = admit(manager, "again", hashes("book", 800))

    assert (miss.asked_tokens, miss.found_tokens) == (784, 0)
    assert miss.evicted_tokens + miss.bare_tokens == 784
    assert miss.losses
    of_book = [each for each in evictions if each.left_by == "first"]
    for each in miss.losses:
        assert each.loss.cause in {"checkpoint", LOOSE}
        if each.loss.cause == "checkpoint":
            assert each.loss.for_request in {eviction.for_request for eviction in of_book}
            assert each.loss.left_by == "first"


def test_text_that_a_running_request_has_without_a_state_is_bare():
    manager = manager_of("state", 200)
    manager.new_step()
    first = admit(manager, "first", hashes("book", 800))

    second = admit(manager, "second", hashes("book", 400) + hashes("question", 400))

    assert (first.never_tokens, first.found_tokens) == (784, 0)
    assert (second.table, second.layer_type) == ("state", "state")
    assert (second.found_tokens, second.bare_tokens, second.never_tokens) == (0, 400, 384)
    assert missed_tokens(second) == {"cached, no checkpoint": 400, "never cached": 384}


def test_text_whose_window_went_with_a_guess_is_bare_and_names_the_guess():
    manager = manager_of("window", 400)
    head = hashes("book", 1600)
    for number in range(2):
        manager.new_step()
        admit(manager, f"{number}", head + hashes(f"question {number}", 320))
        manager.new_step()
        manager.free(f"{number}")
    (guess,) = manager.take_evictions()
    assert guess.num_tokens == 1920 - 16 - 512

    miss = admit(manager, "third", head[:88] + hashes("other question", 320))

    assert (miss.asked_tokens, miss.table) == (1712, "window")
    # The window before the one of the guess, of 64 tokens, lies there still.
    assert miss.found_tokens == 1392 - 64
    assert (miss.never_tokens, miss.evicted_tokens, miss.bare_tokens) == (304, 0, 64 + 16)
    assert miss.losses == (MissedTokens(Loss("guess", 0, "0", ""), 0, 64),)
    assert missed_tokens(miss) == {
        "never cached": 304,
        "cached, checkpoint lost: guess": 64,
        "cached, no checkpoint": 16,
    }


def test_pages_that_no_checkpoint_needs_are_lost_one_by_one():
    manager = manager_of("state", 60)
    manager.new_step()
    admit(manager, "first", hashes("book", 400))
    manager.free("first")
    admit(manager, "later", hashes("text", 800))
    manager.free("later")

    miss = admit(manager, "again", hashes("book", 400))

    assert manager.take_evictions() == []
    assert (miss.asked_tokens, miss.found_tokens) == (384, 0)
    assert miss.evicted_tokens > 0
    assert miss.evicted_tokens + miss.bare_tokens == 384
    assert {each.loss for each in miss.losses} == {Loss(LOOSE, 0, "", "later")}


def test_the_oldest_loss_is_forgotten_first_and_counts_as_never_cached():
    manager = manager_of("full", 80)
    manager.prefix_cache.tree.log.misses._most_ghosts = 10
    serve(manager, "first", "book", 800)
    for number in range(4):
        serve(manager, f"later {number}", f"text {number}", 800)
        assert len(manager.prefix_cache.tree.log.misses._content) <= 10
        assert len(manager.prefix_cache.tree.log.misses._checkpoints) <= 10
    manager.take_misses()

    miss = admit(manager, "again", hashes("book", 800))

    assert (miss.found_tokens, miss.never_tokens, miss.evicted_tokens) == (0, 784, 0)


def test_nothing_is_recorded_unless_it_is_asked_for():
    manager = Manager(plan(MODELS["full"]), num_large_pages=80, prefix_caching=True)
    serve(manager, "first", "book", 800)

    assert manager.take_misses() == []


def test_a_cleared_cache_was_never_filled():
    manager = manager_of("full", 80)
    serve(manager, "first", "book", 800)
    serve(manager, "later", "text", 800)
    assert manager.take_evictions()
    assert manager.reset_prefix_cache()
    manager.take_misses()

    miss = admit(manager, "again", hashes("book", 800))

    assert (miss.never_tokens, miss.losses) == (784, ())


def test_a_refused_request_is_not_recorded_until_it_is_admitted():
    manager = manager_of("full", 60)
    manager.new_step()
    admit(manager, "first", hashes("book", 640))
    text = hashes("text", 640)
    hit = manager.lookup(text, max_tokens=639)

    with pytest.raises(OutOfPagesError):
        manager.allocate("second", num_tokens=640, hit=hit)

    assert manager.take_misses() == []
