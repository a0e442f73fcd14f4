"""Host memory in the manager: what goes there, in which order it is lost, what is refused."""

import random

import pytest

from jenga.admission.reserve import LEFT_SHARE, default_left_share
from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from jenga.policies import RequestFacts
from jenga.prefix.host_cache import EitherPages
from jenga.tables.found_pages import FoundPages
from jenga.tables.request import MISSING, CopyPath
from tests.machines.geometries import full, geometry, sliding, state
from tests.manager.test_manager import compute, hashes

PLAIN = geometry("plain", full(tokens=16, per_large=1))
SPLIT = geometry("split", full(tokens=16, per_large=4))
WINDOWED = geometry("windowed", full(tokens=16), sliding(tokens=16, window=32))
HYBRID = geometry("hybrid", full(tokens=16, slot_bytes=48, per_large=1), state(slot_bytes=768))


def manager_of(cut, num_large_pages, num_host_large_pages, **options):
    return Manager(
        cut,
        num_large_pages=num_large_pages,
        num_host_large_pages=num_host_large_pages,
        prefix_caching=True,
        **options,
    )


def copies_of(manager, path):
    return [(copy.source, copy.target) for copy in manager.take_copies() if copy.path == path]


def lose(manager, name, num_tokens=64):
    """Let another prompt take the arena."""
    compute(manager, f"taker of {name}", num_tokens, prefix=name, chunk=32)


def test_host_memory_without_prefix_caching_is_refused():
    with pytest.raises(ValueError, match="must be 0 where prefix_caching is off"):
        Manager(PLAIN, num_large_pages=8, num_host_large_pages=8)


def test_host_memory_without_a_large_page_for_each_table_is_refused():
    with pytest.raises(ValueError, match=r"num_host_large_pages must be 0, or at least 3.* got 2"):
        manager_of(WINDOWED, 8, 2)


def test_a_prompt_that_the_arena_lost_is_hit_whole():
    manager = manager_of(PLAIN, 5, 9)
    compute(manager, "a", 64)
    lose(manager, "q")
    stored = copies_of(manager, CopyPath.TO_HOST)

    hit = manager.lookup(hashes(64), max_tokens=63)

    assert hit.num_tokens == 48
    assert set(hit.pages[0]) == {MISSING}
    assert list(hit.host_pages[0]) == list(range(len(hit.pages[0])))
    manager.new_step()
    manager.allocate("b", num_tokens=64, hit=hit)
    copies = manager.take_copies()
    loads = [copy for copy in copies if copy.path == CopyPath.FROM_HOST]
    assert [load.source for load in loads] == list(hit.host_pages[0].values())
    assert [load.target for load in loads] == manager.page_table("b", 0)[:3]
    # What makes room for it goes out first.
    saved = [copy for copy in copies if copy.path == CopyPath.TO_HOST]
    assert copies == saved + loads
    assert {source for source, _ in stored} == {1, 2, 3, 4}
    manager.check()


def test_what_is_there_is_not_copied_there_again():
    manager = manager_of(PLAIN, 5, 13)
    for prompt in ("p", "q", "p", "q", "p"):
        compute(manager, f"{prompt}", 64, prefix=prompt)

    report = manager.host_report()
    assert report.stored_bytes == 8 * PLAIN.large_page_bytes
    assert report.loaded_bytes == 9 * PLAIN.large_page_bytes
    assert report.lost_bytes == 0


def test_what_came_first_or_was_asked_for_longest_ago_is_lost_first():
    # Room for two prompts in host memory beside the one in the arena.
    manager = manager_of(PLAIN, 5, 9)
    for prompt in ("p", "q"):
        compute(manager, prompt, 64, prefix=prompt)
    lose(manager, "r")
    assert compute(manager, "again", 64, prefix="p").num_tokens == 48
    lose(manager, "s")
    lose(manager, "t")

    found = {
        prompt: manager.lookup(hashes(64, name=prompt), max_tokens=63).num_tokens
        for prompt in "pqrst"
    }

    assert found["q"] < 48  # it came after, but was not asked for again
    assert found["t"] == found["s"] == 48
    assert manager.host_report().lost_bytes > 0


@pytest.mark.parametrize("cut", [PLAIN, SPLIT], ids=lambda cut: cut.name)
def test_of_a_prompt_the_end_is_lost_before_the_beginning(cut):
    per_large = cut.page_tables[0].small_pages_per_large_page
    manager = manager_of(cut, 1 + 16 // per_large, 1 + 8 // per_large)
    compute(manager, "a", 256)
    lose(manager, "q", 256)

    hit = manager.lookup(hashes(256), max_tokens=255)

    # Half of it was brought there; its last page was never one to hit.
    assert hit.num_tokens == 8 * 16
    manager.check()


@pytest.mark.parametrize("chunk", [32, 256])
def test_more_than_fits_leaves_what_goes_last(chunk):
    manager = manager_of(PLAIN, 17, 3)
    compute(manager, "a", 256)
    compute(manager, "q", 256, prefix="q", chunk=chunk)

    assert manager.lookup(hashes(256), max_tokens=255).num_tokens == 32
    manager.check()


def test_of_what_was_loaded_the_end_is_lost_before_the_beginning():
    manager = manager_of(PLAIN, 9, 6)
    compute(manager, "a", 64)
    lose(manager, "q", 128)
    manager.new_step()
    hit = manager.lookup(hashes(64), max_tokens=63)
    manager.allocate("b", num_tokens=64, hit=hit)  # three pages of those five
    lose(manager, "r", 64)

    there = [manager.prefix_cache.host._caches[0].get(key) for key in hashes(64)]

    assert [page is not None for page in there] == [True, False, False, False]
    manager.check()


def test_windows_that_nobody_goes_on_from_are_not_brought_there():
    manager = manager_of(WINDOWED, 300, 900)
    for prompt in "pqrst":
        compute(manager, prompt, 2048, prefix=prompt, chunk=64)
    stored = [copy for copy in manager.take_copies() if copy.path == CopyPath.TO_HOST]

    assert manager.lookup(hashes(2048), max_tokens=2047).num_tokens == 2032
    of_all, of_windows = (sum(copy.table_index == table for copy in stored) for table in (0, 1))
    evictions = manager.cache_report().evictions
    assert of_all == evictions[0].num_pages > 2 * 2048 // 16
    # Of each evicted checkpoint two, some of which a request used then: what it passed is lost.
    num_evicted = manager.prefix_cache.tree.num_evicted
    assert of_windows == 2 * num_evicted >= evictions[1].with_checkpoint > 0
    assert evictions[1].own_large + evictions[1].foreign_large > of_windows


def test_states_come_back_to_the_pages_of_who_goes_on_from_them():
    manager = manager_of(HYBRID, 8, 20)
    manager.allocate("a", num_tokens=32)
    manager.commit("a", hashes(32), 32)
    manager.new_step()
    assert manager.keep_state("a", hashes(32)[1], 32)
    manager.free("a")
    manager.check()
    lose(manager, "q", 96)
    manager.take_copies()

    hit = manager.lookup(hashes(64), max_tokens=63)

    assert hit.num_tokens == 32
    assert hit.pages[1][0] == MISSING
    manager.new_step()
    manager.allocate("b", num_tokens=64, hit=hit)
    loads = [copy for copy in manager.take_copies() if copy.path == CopyPath.FROM_HOST]
    (of_state,) = [load for load in loads if load.table_index == 1]
    assert of_state.source == hit.host_pages[1][0]
    assert of_state.target == manager.page_table("b", 1)[0]
    manager.check()


def test_what_a_request_still_uses_of_an_evicted_checkpoint_follows_it_there():
    manager = manager_of(HYBRID, 8, 20)
    keys = hashes(32)
    manager.allocate("a", num_tokens=32)
    manager.commit("a", keys, 32)
    manager.new_step()
    assert manager.keep_state("a", keys[1], 32)
    # The state makes room, but not the keys and values, which "a" uses.
    manager.allocate("b", num_tokens=48)
    manager.check()
    stored = [copy for copy in manager.take_copies() if copy.path == CopyPath.TO_HOST]
    assert [copy.table_index for copy in stored] == [1]

    manager.new_step()
    manager.free("a")
    manager.free("b")
    lose(manager, "q", 96)

    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 32
    manager.check()


def test_what_takes_the_place_of_a_page_of_an_evicted_checkpoint_follows_it_there():
    manager = manager_of(HYBRID, 11, 30)
    keys = hashes(32)
    manager.allocate("a", num_tokens=32)
    manager.commit("a", keys, 32)
    manager.new_step()
    assert manager.keep_state("a", keys[1], 32)
    manager.allocate("b", num_tokens=96)
    manager.new_step()
    manager.free("a")
    manager.free("b")
    # Computes the same again, beside what is still cached of it.
    manager.allocate("c", num_tokens=32)
    manager.commit("c", keys, 32)
    manager.check()
    manager.new_step()
    manager.free("c")
    lose(manager, "q", 144)

    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 32
    manager.check()


def test_a_text_that_comes_back_is_kept_apart_from_one_with_the_same_beginning():
    manager = manager_of(PLAIN, 10, 40)
    kept, back = (hashes(16) + hashes(96, name=name)[1:] for name in "ab")

    def run(name, keys):
        manager.new_step()
        num_tokens = 16 * len(keys)
        hit = manager.lookup(keys, max_tokens=num_tokens - 1)
        manager.allocate(name, num_tokens=num_tokens, hit=hit)
        manager.commit(name, keys, num_tokens)
        manager.free(name)
        return hit

    run("a", back[:5])
    lose(manager, "q", 144)
    # Of what comes back the first page alone is in the arena, in a shorter checkpoint.
    run("b", kept[:3])
    hit = run("c", back)

    assert hit.num_tokens == 80
    assert list(hit.host_pages[0]) == [1, 2, 3, 4]
    table = manager._tables[0]
    assert all(table.pins[table.page_of(key)] for key in back[:-1])
    manager.check()


@pytest.mark.parametrize("in_passing", [False, True])
def test_a_state_that_is_still_to_be_written_is_not_brought_there(in_passing):
    # A null page, two running states, keys and values of both, and a page to keep one state in.
    manager = manager_of(HYBRID, 6, 20)
    for name in ("a", "b"):
        manager.allocate(name, num_tokens=16)
        manager.commit(name, hashes(16, name=name), 16)

    kept = [
        manager.keep_state(name, hashes(16, name=name)[0], 16, in_passing=in_passing)
        for name in ("a", "b")
    ]

    # What layers are about to write leaves its page to nobody.
    assert kept == [True, not in_passing]
    assert len(copies_of(manager, CopyPath.TO_HOST)) == (not in_passing)
    manager.check()
    manager.new_step()
    manager.check()
    assert manager.keep_state("b", b"b0", 16)
    # That of the first one, if it was not there before; it is written by now.
    assert len(copies_of(manager, CopyPath.TO_HOST)) == in_passing
    manager.check()


@pytest.mark.parametrize("in_passing", [False, True])
def test_a_state_that_takes_the_place_of_another_is_not_brought_there_unwritten(in_passing):
    manager = manager_of(HYBRID, 8, 20)
    manager.allocate("a", num_tokens=64, facts=RequestFacts(prompt_tokens=17))
    manager.commit("a", hashes(48), 48)
    assert manager.keep_state("a", hashes(48)[1], 32)
    manager.new_step()
    assert manager.keep_state("a", hashes(48)[2], 48, in_passing=in_passing)
    manager.take_copies()
    if in_passing:
        with pytest.raises(OutOfPagesError):
            manager.allocate("takes the rest", num_tokens=16)
        manager.new_step()
    manager.allocate("takes the rest", num_tokens=16)

    stored = copies_of(manager, CopyPath.TO_HOST)

    assert len(stored) == 1
    assert manager.prefix_cache.host.page_of(manager._tables[1], hashes(48)[2]) is not None
    assert manager.prefix_cache.host.page_of(manager._tables[1], hashes(48)[1]) is None
    manager.check()


def test_a_state_of_an_answer_goes_from_there_when_a_later_one_is_kept():
    manager = manager_of(HYBRID, 12, 20, answer_interval_tokens=16)
    keys = [hashes(96, name=name) for name in "ab"]
    for name, own in zip("ab", keys, strict=True):
        manager.allocate(name, num_tokens=49, facts=RequestFacts(prompt_tokens=17))
        manager.commit(name, own, 48)
    manager.new_step()
    # A page to keep one state in, which the answers of both take from each other.
    assert manager.keep_state("a", keys[0][1], 32)
    assert manager.keep_state("b", keys[1][1], 32)
    state_bytes = HYBRID.page_tables[1].small_page_bytes
    assert manager.host_report().cached_bytes == state_bytes

    assert manager.keep_state("a", keys[0][2], 48)

    report = manager.host_report()
    assert report.stored_bytes == 2 * state_bytes
    assert report.lost_bytes == state_bytes  # that of a after 32 tokens
    assert report.cached_bytes == state_bytes  # that of b
    manager.check()


def test_a_state_of_an_answer_stays_there_where_there_is_no_page_for_a_later_one():
    manager = manager_of(HYBRID, 12, 20, answer_interval_tokens=16)
    keys = [hashes(96, name=name) for name in "ab"]
    for name, own in zip("ab", keys, strict=True):
        manager.allocate(name, num_tokens=49, facts=RequestFacts(prompt_tokens=17))
        manager.commit(name, own, 48)
    manager.new_step()
    assert manager.keep_state("a", keys[0][1], 32)
    assert manager.keep_state("b", keys[1][1], 32)
    manager.allocate("a", num_tokens=65, num_processed_tokens=48)

    assert not manager.keep_state("a", keys[0][2], 48)

    assert manager.prefix_cache.host.page_of(manager._tables[1], keys[0][1]) is not None
    manager.check()


def test_a_state_of_an_answer_that_another_request_has_read_stays_there():
    manager = manager_of(HYBRID, 13, 30, answer_interval_tokens=16)
    keys = hashes(96)
    manager.allocate("a", num_tokens=49, facts=RequestFacts(prompt_tokens=17))
    manager.commit("a", keys, 48)
    assert manager.keep_state("a", keys[1], 32)
    hit = manager.lookup(keys[:4], max_tokens=63)
    assert hit.num_tokens == 32
    manager.allocate("b", num_tokens=49, hit=hit)
    manager.free("b")
    compute(manager, "c", 16 * 6, prefix="c")
    states = manager._tables[1]
    assert manager.prefix_cache.host.page_of(states, keys[1]) is not None

    assert manager.keep_state("a", keys[2], 48)

    assert manager.prefix_cache.host.page_of(states, keys[1]) is not None
    manager.check()


def test_admissions_leave_nothing_to_others_where_it_is_not_lost():
    assert default_left_share(has_host=False) == LEFT_SHARE > 0
    assert default_left_share(has_host=True) == 0


def test_a_refused_admission_leaves_host_memory_as_it_is():
    manager = manager_of(PLAIN, 5, 20)
    compute(manager, "a", 64)
    lose(manager, "q")
    manager.take_copies()
    manager.allocate("runs", num_tokens=32)
    manager.take_copies()
    hit = manager.lookup(hashes(64), max_tokens=63)
    before = manager.host_report()

    with pytest.raises(Exception, match="large pages"):
        manager.allocate("b", num_tokens=64, hit=hit)

    assert manager.take_copies() == []
    assert manager.host_report() == before
    manager.check()


def test_a_hit_of_what_host_memory_lost_is_refused():
    manager = manager_of(PLAIN, 5, 5)
    compute(manager, "a", 64)
    lose(manager, "q")
    hit = manager.lookup(hashes(64), max_tokens=63)
    assert 0 in hit.host_pages[0]
    lose(manager, "r")

    with pytest.raises(ValueError, match="hit must be looked up again"):
        manager.allocate("b", num_tokens=64, hit=hit)
    manager.check()


def test_a_reset_forgets_what_is_there():
    manager = manager_of(PLAIN, 5, 20)
    compute(manager, "a", 64)
    lose(manager, "q")

    assert manager.reset_prefix_cache()

    assert manager.take_copies() == []
    assert manager.host_report().cached_bytes == 0
    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 0
    manager.check()


def test_pages_of_both_memories_are_looked_up_as_one_by_one():
    source = random.Random(3)
    for _ in range(300):
        keys = [b"%d" % number for number in range(source.randrange(1, 200))]
        share = source.choice([0.0, 0.5, 0.95, 1.0])
        here, there = (
            {key: place for place, key in enumerate(keys, 1) if source.random() < share}
            for _ in range(2)
        )
        none = [None] * 300
        either = EitherPages(*(FoundPages(pages, none, range, keys) for pages in (here, there)))
        expected = [here.get(key, there.get(key)) for key in keys]

        start, stop = sorted(source.choices(range(len(keys) + 1), k=2))
        assert either[start:stop] == expected[start:stop]
        assert [either[place] for place in range(len(keys))] == expected
        assert len(either) == len(keys)
        gaps = [place for place in range(start, stop) if expected[place] is None]
        if gaps:
            assert either.index(None, start, stop) == gaps[0]
        else:
            with pytest.raises(ValueError, match=r"no key is without|not in list"):
                either.index(None, start, stop)
