"""What an admission leaves to the cache while other requests run."""

from types import SimpleNamespace

import pytest

from jenga.admission.gate import IDLE_STEPS
from jenga.admission.reserve import REMEMBERED_REQUESTS, CacheReserve
from jenga.admission.wait_queue import LONG_QUEUE, SHORT_QUEUE
from jenga.arena.small_pages import Sharing
from jenga.errors import OutOfPagesError, TooEarlyError
from jenga.manager import Manager
from tests.admission.test_wait_queue import hit_tokens, wait
from tests.machines.geometries import full, geometry, state
from tests.manager.test_manager import compute, hashes

FULL = geometry("full", full(tokens=16, per_large=1))
HYBRID = geometry("hybrid", full(tokens=16, per_large=1), state(slot_bytes=256))


def manager_of(cut, num_large_pages, **options):
    return Manager(cut, num_large_pages=num_large_pages, prefix_caching=True, **options)


def crowded(*, num_steps_alone=0, num_waiting=LONG_QUEUE, **options):
    """Of 14 pages a running request has 5, another 5 are waited for, and most were read before."""
    manager = manager_of(FULL, 1 + 14, **{"left_share": 0.9, "step_tokens": 0} | options)
    for number in range(8):
        compute(manager, f"{number}", 81, prefix="a")
    for _ in range(num_steps_alone):
        manager.new_step()
    wait(manager, "waits", 81, prefix="a")
    lengthen_queue(manager, num_waiting - 1)
    compute(manager, "runs", 80, prefix="b", free=False)
    return manager


def lengthen_queue(manager, num_requests, *, name="waits too"):
    """Announce requests that read nothing."""
    for number in range(num_requests):
        manager.announce(f"{name} {number}", hashes(1, name="a"), num_tokens=1)


def admit(manager, name, num_tokens, *, prefix):
    keys = hashes(num_tokens, name=prefix)
    hit = manager.lookup(keys, max_tokens=num_tokens - 1)
    return manager.allocate(name, num_tokens=num_tokens, hit=hit)


def test_an_admission_leaves_what_is_waited_for_while_another_request_runs():
    manager = crowded()
    before = manager.memory(), hit_tokens(manager, 81, prefix="a")

    with pytest.raises(OutOfPagesError, match="5 more left to others") as refusal:
        admit(manager, "new", 80, prefix="c")
    assert refusal.value.reserved_large_pages == 5

    assert (manager.memory(), hit_tokens(manager, 81, prefix="a")) == before
    manager.check()
    manager.free("runs")
    admit(manager, "new", 80, prefix="c")
    assert hit_tokens(manager, 81, prefix="a") == 80
    manager.check()


def test_who_is_waited_for_comes_in_where_another_would_not():
    manager = crowded()

    admit(manager, "waits", 81, prefix="a")

    assert manager.is_running("waits")
    manager.check()


def test_who_takes_little_beside_what_it_finds_is_not_held_back():
    manager = manager_of(FULL, 1 + 30, left_share=0.9, step_tokens=0)
    for number in range(8):
        compute(manager, f"a{number}", 81, prefix="a")
        compute(manager, f"{number}", 257, prefix="article")
    num_empty = manager.memory().empty_large_bytes // FULL.large_page_bytes
    compute(manager, "runs", 16 * num_empty, prefix="b", free=False)

    # It finds 16 pages. With 5 of its own it waits, and with 2 it does not.
    with pytest.raises(OutOfPagesError, match="more left to others"):
        admit(manager, "new", 256 + 80, prefix="article")
    admit(manager, "new", 256 + 32, prefix="article")

    assert hit_tokens(manager, 81, prefix="a") < 80
    manager.check()


def test_nothing_is_left_where_nobody_runs():
    manager = crowded()
    manager.free("runs")

    admit(manager, "new", 200, prefix="c")

    assert hit_tokens(manager, 81, prefix="a") < 80
    manager.check()


def test_a_running_request_may_have_everything():
    manager = crowded()

    manager.new_step()
    manager.allocate("runs", num_tokens=12 * 16, num_processed_tokens=80)

    # Of the five pages that are waited for, two are left.
    assert hit_tokens(manager, 81, prefix="a") == 32
    manager.check()


@pytest.mark.parametrize("num_waiting", [1, LONG_QUEUE - 1])
def test_nothing_is_left_where_few_requests_wait(num_waiting):
    manager = crowded(num_waiting=num_waiting)

    admit(manager, "new", 80, prefix="c")

    assert hit_tokens(manager, 81, prefix="a") < 80
    lengthen_queue(manager, LONG_QUEUE - num_waiting, name="came later")
    with pytest.raises(OutOfPagesError, match="more left to others"):
        admit(manager, "another", 32, prefix="d")
    manager.check()


def test_a_queue_that_was_long_counts_as_long_until_it_is_short():
    manager = crowded()
    with pytest.raises(OutOfPagesError, match="5 more left to others"):
        admit(manager, "new", 80, prefix="c")

    for number in range(LONG_QUEUE - SHORT_QUEUE):
        manager.withdraw(f"waits too {number}")
    with pytest.raises(OutOfPagesError, match="5 more left to others"):
        admit(manager, "new", 80, prefix="c")

    manager.withdraw(f"waits too {LONG_QUEUE - SHORT_QUEUE}")
    admit(manager, "new", 80, prefix="c")
    manager.check()


def test_with_states_a_queue_is_long_as_soon_as_it_is_not_short():
    manager = manager_of(HYBRID, 1 + 16, left_share=0.9, step_tokens=0)
    for number in range(8):
        compute(manager, f"{number}", 65, prefix="a")
    compute(manager, "runs", 64, prefix="b", free=False)
    lengthen_queue(manager, SHORT_QUEUE - 1)
    admit(manager, "short", 64, prefix="c")
    manager.free("short")

    lengthen_queue(manager, 1, name="one more")
    with pytest.raises(OutOfPagesError, match="more left to others"):
        admit(manager, "new", 128, prefix="d")
    manager.check()


def test_nothing_is_left_if_the_share_is_nothing():
    manager = crowded(left_share=0)

    admit(manager, "new", 80, prefix="c")

    assert hit_tokens(manager, 81, prefix="a") < 80


def test_awaited_states_are_left_only_as_far_as_prompts_are_read_again():
    admitted = {}
    for prefixes in ("aaaaaaaa", "bcdefghi"):
        manager = manager_of(HYBRID, 1 + 16)
        for number, prefix in enumerate(prefixes):
            compute(manager, f"{number}", 64, prefix=prefix)
        manager.reset_prefix_cache()
        keys = hashes(64, name="runs")
        admit(manager, "runs", 64, prefix="runs")
        manager.commit("runs", keys, 48)
        assert manager.keep_state("runs", keys[2], 48)
        manager.take_copies()
        wait(manager, "waits", 64, prefix="runs")
        lengthen_queue(manager, LONG_QUEUE - 1)
        # All but the pages of the running request, its state, the state kept and its own.
        try:
            admit(manager, "new", 16 * (16 - 4 - 1 - 1), prefix="new")
        except OutOfPagesError as refused:
            admitted[prefixes] = refused.reserved_large_pages
        else:
            admitted[prefixes] = True
        manager.check()

    assert admitted == {"aaaaaaaa": 1, "bcdefghi": True}


def test_nothing_is_left_for_conversations_which_no_other_request_reads():
    refused = {}
    for kind in ("turns", "articles"):
        manager = manager_of(FULL, 1 + 14, left_share=0.9, step_tokens=0)
        for number in range(8):
            # A text that begins as others do, or goes on from where one of them ended.
            tokens = 49 if kind == "turns" else 81
            name = f"{kind[0]}{number if kind == 'turns' else 0}"
            compute(manager, f"first {number}", 33, prefix=name)
            compute(manager, f"then {number}", tokens, prefix=name)
        compute(manager, "runs", 80, prefix="b", free=False)
        try:
            admit(manager, "new", 80, prefix="c")
        except OutOfPagesError as error:
            refused[kind] = error.reserved_large_pages
        manager.check()

    assert list(refused) == ["articles"]
    assert refused["articles"] > 0


def test_nothing_is_left_for_requests_that_go_on_from_a_running_one():
    # Samples have the same prompt, and early turns begin with the prompt before them.
    refused = {}
    for kind in ("samples", "early turns", "repeated"):
        manager = manager_of(FULL, 1 + 14, left_share=0.9, step_tokens=0)
        for number in range(4):
            prefix = f"a{number}" if kind != "repeated" else "a"
            lengths = (49, 65, 81) if kind == "early turns" else (81, 81, 81)
            for place, length in enumerate(lengths):
                manager.announce(
                    f"{number} {place}", hashes(length, name=prefix), num_tokens=length
                )
            for _ in range(3):
                manager.new_step()
            for place, length in enumerate(lengths):
                name = f"{number} {place}"
                compute(manager, name, length, prefix=prefix, free=kind == "repeated")
            if kind != "repeated":
                for place in range(3):
                    manager.free(f"{number} {place}")
        compute(manager, "runs", 80, prefix="b", free=False)
        try:
            admit(manager, "new", 80, prefix="c")
        except OutOfPagesError as error:
            refused[kind] = error.reserved_large_pages
        manager.check()

    assert list(refused) == ["repeated"]
    assert refused["repeated"] > 0


# In numbers


def admission_of(num_cached, left_share, *, num_owned=99, **options):
    """Of an arena of a hundred large pages, so many of which hold cached content alone."""
    pages = SimpleNamespace(
        num_pages=100, num_owned=num_owned, reclaimable=SimpleNamespace(num_queued=num_cached)
    )
    return CacheReserve(SimpleNamespace(large_pages=pages), left_share, **options)


@pytest.mark.parametrize(
    ("num_cached", "reread_tokens", "reserve"),
    [(0, 100, 0), (7, 100, 7), (80, 100, 50), (80, 40, 20), (80, 0, 0)],
)
def test_reserve_is_what_is_cached_and_no_more_than_is_read_again(
    num_cached, reread_tokens, reserve
):
    admission = admission_of(num_cached, 0.5)
    assert admission.large_pages_to_leave(None) == 0
    admission.count_admission(reread_tokens, 100)
    assert admission.large_pages_to_leave(None) == reserve


def test_an_engine_that_has_a_part_of_a_shared_arena_leaves_a_share_of_that_part():
    admission = admission_of(40, 0.5, num_owned=39)
    admission.count_admission(1, 1)
    assert admission.large_pages_to_leave(None) == 20
    admission._large_pages.num_owned = 19
    assert admission.large_pages_to_leave(None) == 10


@pytest.mark.parametrize(("num_revived_large", "reserve"), [(4, 6), (10, 0), (14, 0)])
def test_pages_of_the_hit_itself_are_not_left(num_revived_large, reserve):
    admission = admission_of(10, 0.5)
    admission.count_admission(1, 1)
    hit = Sharing(
        pages=[], revived=[], revived_of={}, num_revived_large=num_revived_large, added_spare=0
    )
    assert admission.large_pages_to_leave([hit, None]) == reserve


def test_what_was_long_ago_counts_little():
    admission = admission_of(99, 0.99)
    for _ in range(1000):
        admission.count_admission(100, 100)
    assert admission.large_pages_to_leave(None) == 99
    for _ in range(200):
        admission.count_admission(0, 100)
    assert 0 < admission.large_pages_to_leave(None) < 10


def test_prompts_of_the_queue_count_as_well():
    admission = admission_of(80, 0.5)
    assert admission.large_pages_to_leave(None, reread_tokens=30, asked_tokens=100) == 15
    admission.count_admission(0, 100)
    assert admission.large_pages_to_leave(None, reread_tokens=100, asked_tokens=100) == 25


def test_less_is_left_the_less_of_the_work_prompts_are():
    admission = admission_of(99, 0.8, step_tokens=10)
    for _ in range(30):
        admission.count_step()
    assert admission.prompt_share == 1  # nothing was asked for yet
    admission.count_admission(100, 100)
    share = 100 / (100 + 30 * (1 - 1 / REMEMBERED_REQUESTS) * 10)
    assert admission.prompt_share == pytest.approx(share)
    assert admission.large_pages_to_leave(None) == int(80 * share**2)
    # Prompts of the queue are read again or not, but no work until they come in.
    assert admission.large_pages_to_leave(None, reread_tokens=100, asked_tokens=300) == int(
        40 * share**2
    )


def test_steps_count_while_requests_wait():
    manager = crowded(num_steps_alone=12, step_tokens=20)
    with pytest.raises(OutOfPagesError, match="5 more left to others"):
        admit(manager, "new", 80, prefix="c")

    for _ in range(12):
        manager.new_step()
    admit(manager, "new", 80, prefix="c")

    # Of 14 pages, all that the two leave.
    assert hit_tokens(manager, 81, prefix="a") == 4 * 16
    manager.check()


@pytest.mark.parametrize("step_tokens", [-1, float("inf"), float("nan")])
def test_a_cost_of_steps_that_is_none_is_refused(step_tokens):
    with pytest.raises(ValueError, match="step_tokens must be finite and not negative"):
        manager_of(FULL, 8, step_tokens=step_tokens)


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="left_share must be at least 0 and less than 1"):
        manager_of(FULL, 8, left_share=share)


# States that come with the end of a step


def begin(manager):
    """Compute the first chunk of a prompt of which another request that waits has the most."""
    own, other = [*hashes(128), *hashes(32, name="x")], [*hashes(128), *hashes(32, name="y")]
    manager.announce("runs", own, num_tokens=160)
    manager.announce("waits", other, num_tokens=160)
    for _ in range(2):
        manager.new_step()
    hit = manager.lookup(own, max_tokens=159)
    manager.allocate("runs", num_tokens=64, hit=hit, full_tokens=160)
    manager.commit("runs", own, 64)
    return own, other


def admit_waiting(manager, other):
    hit = manager.lookup(other, max_tokens=159)
    manager.allocate("waits", num_tokens=160, num_processed_tokens=hit.num_tokens, hit=hit)
    return hit.num_tokens


def test_who_would_start_from_a_state_of_this_step_comes_in_after_it():
    manager = manager_of(HYBRID, 64)
    own, other = begin(manager)
    with pytest.raises(TooEarlyError, match=r"'waits' starts from 0 tokens now.*'runs'"):
        admit_waiting(manager, other)
    manager.check()
    assert 64 in manager.checkpoint_tokens("runs")
    assert manager.keep_state("runs", own[3], 64)

    manager.new_step()
    manager.allocate("runs", num_tokens=160, num_processed_tokens=64)
    manager.commit("runs", own, 160)
    with pytest.raises(TooEarlyError, match=r"'waits' starts from 64 tokens now"):
        admit_waiting(manager, other)
    assert 128 in manager.checkpoint_tokens("runs")
    assert manager.keep_state("runs", own[7], 128)

    manager.new_step()
    assert admit_waiting(manager, other) == 128
    manager.check()


def test_nobody_waits_for_a_state_that_was_not_kept():
    manager = manager_of(HYBRID, 64)
    own, other = begin(manager)
    manager.new_step()
    manager.allocate("runs", num_tokens=160, num_processed_tokens=64)
    manager.commit("runs", own, 160)
    manager.new_step()
    manager.allocate("runs", num_tokens=161, num_processed_tokens=160)

    assert admit_waiting(manager, other) == 0
    manager.check()


def test_who_would_start_from_a_state_of_a_later_step_waits_unless_the_request_is_idle():
    manager = manager_of(HYBRID, 64)
    _, other = begin(manager)
    for _ in range(IDLE_STEPS):
        manager.new_step()
        with pytest.raises(TooEarlyError, match="'waits' starts from 0 tokens now"):
            admit_waiting(manager, other)
    manager.new_step()

    assert admit_waiting(manager, other) == 0
    manager.check()


def test_attention_is_read_in_the_step_that_writes_it():
    manager = manager_of(FULL, 64)
    _, other = begin(manager)

    assert admit_waiting(manager, other) == 64
    manager.check()


def test_an_admission_does_not_wait_for_a_session_between_its_turns():
    manager = crowded()
    with pytest.raises(OutOfPagesError, match="5 more left to others"):
        admit(manager, "new", 80, prefix="c")

    for _ in range(IDLE_STEPS + 1):
        manager.new_step()
    admit(manager, "new", 80, prefix="c")

    assert manager.is_running("runs")
    manager.check()


# Room for states


@pytest.mark.parametrize(("num_waiting", "has_room"), [(2, False), (2, True), (1, False)])
def test_a_sample_leaves_the_state_that_other_samples_will_start_from(num_waiting, has_room):
    # A sample that runs takes five pages and a state, and its prompt's state is kept. Another one
    # takes a page and a state.
    manager = manager_of(HYBRID, 1 + 6 + 1 + (2 if has_room else 1))
    run_sample(manager, "runs")
    for number in range(num_waiting):
        wait(manager, f"{number}", 65, prefix="a")

    if num_waiting == 1 or has_room:
        admit(manager, "0", 65, prefix="a")
        assert hit_tokens(manager, 65, prefix="a") == (64 if has_room else 0)
    else:
        with pytest.raises(OutOfPagesError, match="1 more left to others"):
            admit(manager, "0", 65, prefix="a")
        assert hit_tokens(manager, 65, prefix="a") == 64
    manager.check()


def test_a_prompt_leaves_room_for_the_state_that_others_wait_for():
    manager = manager_of(HYBRID, 1 + 2 + 6)
    compute(manager, "runs", 16, prefix="b", free=False)
    for name in ("first", "second"):
        wait(manager, name, 65, prefix="a")

    # Five pages and a state are free. The state at the end of the prompt would find no page.
    with pytest.raises(OutOfPagesError, match="1 more left to others"):
        admit(manager, "first", 65, prefix="a")

    manager.free("runs")
    run_sample(manager, "first")
    assert hit_tokens(manager, 65, prefix="a") == 64
    manager.check()


def test_no_room_is_left_for_states_if_the_share_is_nothing():
    manager = manager_of(HYBRID, 1 + 6 + 1 + 1, left_share=0)
    run_sample(manager, "runs")
    for number in range(2):
        wait(manager, f"{number}", 65, prefix="a")

    admit(manager, "0", 65, prefix="a")

    assert hit_tokens(manager, 65, prefix="a") == 0


def run_sample(manager, name):
    """Let a request compute its prompt, keep the state at its end, and go on running."""
    admit(manager, name, 65, prefix="a")
    keys = hashes(65, name="a")
    assert manager.keep_state(name, keys[3], 64)
    manager.take_copies()
    manager.new_step()
    manager.commit(name, keys, 65)
    manager.check()
