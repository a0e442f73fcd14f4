"""What waiting requests will read is kept: above all the pages of whoever is served first."""

import pytest

from jenga.admission.wait_queue import WAITED_STEPS
from jenga.eviction.known import EVICTION_POLICIES
from jenga.manager import Manager
from jenga.policies import RequestFacts
from tests.machines.geometries import full, geometry, sliding, state
from tests.manager.test_manager import compute, hashes

FULL = geometry("full", full(tokens=16, per_large=1))
WINDOWED = geometry("windowed", full(tokens=16, per_large=1), sliding(tokens=16, window=32))
HYBRID = geometry("hybrid", full(tokens=16, slot_bytes=16, per_large=2), state(slot_bytes=512))


def manager_of(cut, num_large_pages, policy="learned"):
    return Manager(
        cut,
        num_large_pages=num_large_pages,
        prefix_caching=True,
        eviction_policy=EVICTION_POLICIES[policy](),
    )


def wait(manager, name, num_tokens, *, prefix, first=False):
    """Announce a request, and let it wait until it is looked up."""
    manager.announce(name, hashes(num_tokens, name=prefix), num_tokens=num_tokens, first=first)
    for _ in range(WAITED_STEPS):
        manager.new_step()
    manager.check()


def hit_tokens(manager, num_tokens, *, prefix):
    return manager.lookup(hashes(num_tokens, name=prefix), max_tokens=num_tokens - 1).num_tokens


# Of 8 pages the texts take 4 and 3, and a third one of 4 evicts 3.
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize(("waits", "kept"), [(False, (16, 48)), (True, (64, 0))])
def test_what_a_waiting_request_reads_outlives_what_was_used_later(policy, waits, kept):
    manager = manager_of(FULL, 1 + 8, policy)
    compute(manager, "1", 65, prefix="a")
    compute(manager, "2", 49, prefix="b")

    if waits:
        wait(manager, "3", 65, prefix="a")
    compute(manager, "4", 64, prefix="c")

    assert (hit_tokens(manager, 65, prefix="a"), hit_tokens(manager, 49, prefix="b")) == kept


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_what_the_queue_reads_the_last_reader_s_goes_first(first):
    manager = manager_of(FULL, 1 + 8)
    compute(manager, "1", 65, prefix="a")
    compute(manager, "2", 49, prefix="b")

    for prefix in (first, "ab".replace(first, "")):
        wait(manager, f"waits for {prefix}", 64, prefix=prefix)
    compute(manager, "3", 48, prefix="c")

    assert [prefix for prefix in "ab" if hit_tokens(manager, 49, prefix=prefix) == 48] == [first]


def test_a_preempted_request_waits_at_the_head():
    manager = manager_of(FULL, 1 + 8)
    compute(manager, "1", 65, prefix="a")
    compute(manager, "2", 49, prefix="b")

    wait(manager, "3", 49, prefix="a")
    wait(manager, "4", 49, prefix="b", first=True)
    compute(manager, "5", 64, prefix="c")

    assert hit_tokens(manager, 49, prefix="b") == 48
    assert hit_tokens(manager, 49, prefix="a") < 48


@pytest.mark.parametrize("ending", ["withdraw", "admit and free"])
def test_who_no_longer_waits_keeps_nothing(ending):
    manager = manager_of(FULL, 1 + 8)
    compute(manager, "1", 65, prefix="a")
    wait(manager, "2", 65, prefix="a")

    if ending == "withdraw":
        manager.withdraw("2")
    else:
        compute(manager, "2", 65, prefix="a")
    compute(manager, "3", 49, prefix="b")
    compute(manager, "4", 64, prefix="c")

    # Three of its four pages made room.
    assert hit_tokens(manager, 65, prefix="a") == 16
    assert hit_tokens(manager, 49, prefix="b") == 48


def test_a_window_that_a_running_request_passes_is_kept_for_one_that_waits():
    kept_tokens = {}
    for waits in (False, True):
        manager = manager_of(WINDOWED, 1 + 180)
        question = [*hashes(512), *hashes(64, name="question")]
        keys = hashes(2048)
        if waits:
            manager.announce("waits", question, num_tokens=577)
        manager.announce("runs", keys, num_tokens=2048, first=True)
        hit = manager.lookup(keys, max_tokens=2047)
        processed = 0
        for end in range(256, 2049, 256):
            manager.new_step()
            manager.allocate(
                "runs",
                num_tokens=end,
                num_processed_tokens=processed,
                hit=None if processed else hit,
            )
            manager.commit("runs", keys, end)
            manager.check()
            processed = end
        manager.free("runs")
        compute(manager, "other", 400, prefix="other")
        kept_tokens[waits] = manager.lookup(question, max_tokens=576).num_tokens

    assert kept_tokens == {False: 0, True: 512}


def test_a_state_is_kept_where_a_waiting_request_goes_another_way():
    manager = manager_of(HYBRID, 60)
    keys = hashes(100)
    manager.announce("runs", keys, num_tokens=100)
    manager.announce("waits", [*keys[:3], *hashes(64, name="question")], num_tokens=112)
    hit = manager.lookup(keys, max_tokens=99, facts=RequestFacts(prompt_tokens=100))
    manager.allocate("runs", num_tokens=16, hit=hit)
    alone = manager.checkpoint_tokens("runs")

    for _ in range(WAITED_STEPS):
        manager.new_step()

    assert 48 not in alone
    # The end of the step, too: who waits may come in before the branch is reached.
    assert set(manager.checkpoint_tokens("runs")) == {*alone, 16, 48}


def test_no_more_is_looked_up_than_the_arena_could_keep():
    manager = manager_of(FULL, 1 + 4)
    compute(manager, "1", 64, prefix="a")
    for number in range(40):
        manager.announce(f"w{number}", hashes(65, name="a"), num_tokens=65)
        manager.announce(f"x{number}", hashes(65, name=f"x{number}"), num_tokens=65)
    for _ in range(40):
        manager.new_step()
        manager.check()

    compute(manager, "2", 64, prefix="b")
    for number in range(40):
        manager.withdraw(f"w{number}")
        manager.withdraw(f"x{number}")
        manager.check()

    assert manager.reset_prefix_cache()


def test_a_request_is_announced_once_and_not_while_it_runs():
    manager = manager_of(FULL, 1 + 8)
    manager.announce("a", hashes(32), num_tokens=32)

    with pytest.raises(ValueError, match=r"request_id must name .* not announced, got 'a'"):
        manager.announce("a", hashes(32), num_tokens=32)
    compute(manager, "a", 32, free=False)
    with pytest.raises(ValueError, match=r"request_id must not name a running request, got 'a'"):
        manager.announce("a", hashes(32), num_tokens=32)
    manager.free("a")
    manager.announce("a", hashes(32), num_tokens=32)


# Pages computed again


def test_a_page_computed_again_takes_the_place_of_one_that_could_not_be_hit():
    manager = manager_of(FULL, 1 + 12)
    compute(manager, "1", 64, prefix="a")
    # The end of the text goes first: a hole is made by using the end while the start is evicted.
    keys = hashes(64, name="a")
    old = manager.lookup([*keys], max_tokens=64).pages[0]
    table = manager._tables[0]
    table.pages.share_pages([old[0]])
    table.pages.release([old[0]])
    table.cache.forget([old[0]])

    compute(manager, "2", 64, prefix="a", free=False)

    found = manager.lookup(keys, max_tokens=64).pages[0]
    assert found == manager.page_table("2", 0)
    assert not set(found) & set(old[1:])
    assert table.pages.num_evictable == 0
    manager.check()


def test_a_hit_looked_up_before_its_page_was_replaced_is_refused():
    manager = manager_of(FULL, 1 + 12)
    compute(manager, "1", 64, prefix="a")
    keys = hashes(64, name="a")
    manager.allocate("2", num_tokens=64)
    hit = manager.lookup(keys, max_tokens=63)
    manager.commit("2", keys, 64)

    with pytest.raises(ValueError, match="hit must be looked up again"):
        manager.allocate("3", num_tokens=64, hit=hit)
    manager.check()


# Long requests


def test_long_requests_open_large_pages_of_their_own_where_pages_are_cached():
    owners = {}
    for prefix_caching in (True, False):
        cut = geometry("split", full(tokens=16, per_large=4))
        manager = Manager(cut, num_large_pages=200, prefix_caching=prefix_caching)
        for name in ("a", "b"):
            manager.allocate(name, num_tokens=16 * 200)
        for pages in range(201, 213):
            for name in ("a", "b"):
                manager.allocate(name, num_tokens=16 * pages)
        larges = {
            name: {page // 4 for page in manager.page_table(name, 0)[200:]} for name in ("a", "b")
        }
        owners[prefix_caching] = len(larges["a"] & larges["b"])
        manager.check()

    assert owners == {True: 0, False: 6}
