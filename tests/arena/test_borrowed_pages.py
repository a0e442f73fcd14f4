"""Large pages that come and go, under random requests of several engines on one arena."""

import math
from itertools import count

import pytest

from jenga.arena.borrowed_pages import SURPLUS_STEPS, News
from jenga.broker.books import Books
from jenga.broker.broker import Broker
from jenga.broker.direct import DirectBroker
from jenga.errors import InvariantError
from jenga.eviction.policy import LeastRecentlyUsed
from jenga.manager import Manager
from tests.broker.shared_engines import FakeEngine, assert_no_page_has_two_owners
from tests.machines.geometries import (
    BUDGETED,
    CACHED,
    GROWING_BUDGETS,
    OUTSIDE,
    full,
    geometry,
)

STEPS = 90
SMALL = geometry("small", full(per_large=2))


def make_direct(tmp_path, num_pages):
    books = Books.create(tmp_path / "books", large_page_bytes=4096, num_pages=num_pages)
    times = count()
    return DirectBroker(Broker(books), lambda: float(next(times)))


@pytest.mark.parametrize(
    "seed",
    [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))],
)
def test_engines_that_share_an_arena_find_their_content_whole(tmp_path, seed):
    direct = make_direct(tmp_path, 41)
    broker, books = direct.broker, direct.broker.books
    models, engines = [], []
    for number, name in enumerate("abc"):
        lender = direct.join(name, guarantee_pages=8, limit_pages=30 + number)
        cut = CACHED[(seed + number) % len(CACHED)]
        engines.append(FakeEngine(name, cut, lender, models, seed))
    most = dict.fromkeys("abc", 0)
    for step in range(STEPS):
        # Load moves from one engine to the next.
        busy = step * 5 // STEPS % 3
        for number, engine in enumerate(engines):
            if number == busy or engine.runs:
                engine.step(load=8 if number == busy else 0)
            else:
                engine.rest()
            broker.check()
            assert_no_page_has_two_owners(engines, books)
            most[engine.name] = max(most[engine.name], broker.num_held(engine.lender.row))

    assert min(most.values()) > 12, "large pages hardly moved"
    # These find little or nothing of their content again.
    rare = {BUDGETED.name, GROWING_BUDGETS.name, OUTSIDE.name}
    if {engine.manager.geometry.name for engine in engines} - rare:
        assert any(engine.num_hit_tokens for engine in engines)
    # One engine ends as by a kill. The others may have all that it had, and no more.
    dead = engines.pop(0)
    dead.die()
    direct.leave(dead.lender)
    for _ in range(STEPS // 5):
        for engine in engines:
            engine.step(load=8)
            broker.check()
            assert_no_page_has_two_owners(engines, books)
    for engine in engines:
        engine.finish()
        for _ in range(3):
            engine.rest()
        # It keeps what is cached, and two batches of empty pages, a page each here.
        assert engine.manager._allocator.large_pages.num_empty <= 2
    dead_row = dead.lender.row + 1
    assert not len(books.pages_of(dead_row))


class FakeLender:
    """A lender whose answers a test writes."""

    num_pages, guarantee_pages, limit_pages = 33, 4, 32

    def __init__(self):
        self.free = list(range(5, 33))
        self.news_next = News(granted=[])
        self.returned, self.asks = [], []
        self.time_s = 0.0

    @property
    def has_free(self):
        return bool(self.free)

    def now_s(self):
        return self.time_s

    def first_pages(self):
        return [1, 2, 3, 4]

    def take_free(self, num_pages):
        taken, self.free = self.free[:num_pages], self.free[num_pages:]
        return taken

    def ask(self, num_pages, older_than_s, *, is_needed=False):
        self.asks.append((num_pages, older_than_s, is_needed))

    def give_back(self, pages):
        self.returned += pages

    def news(self):
        news, self.news_next = self.news_next, News(granted=[])
        return news

    def tell(self, num_empty, num_evictable, oldest_s):
        self.told = num_empty, num_evictable, oldest_s


def make(lender, **options):
    return Manager(
        SMALL, num_large_pages=33, prefix_caching=True, hash_tokens=4, lender=lender, **options
    )


def run(manager, name, num_tokens):
    """Compute a prompt and end it, so that all of it is cached."""
    hashes = [f"{name} {i}".encode() for i in range(num_tokens // 4)]
    manager.allocate(name, num_tokens=num_tokens)
    manager.commit(name, hashes, 0)
    manager.commit(name, hashes, num_tokens)
    manager.free(name)


def found_tokens(manager, name, num_tokens):
    hashes = [f"{name} {i}".encode() for i in range(num_tokens // 4)]
    return manager.lookup(hashes, max_tokens=num_tokens).num_tokens


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_large_page_leaves_only_when_the_last_step_that_used_it_is_processed(steps_in_flight):
    lender = FakeLender()
    manager = make(lender, steps_in_flight=steps_in_flight)
    manager.new_step()
    manager.allocate("long", num_tokens=8 * 16)
    manager.new_step()
    manager.free("long")
    lender.news_next = News(granted=[], called=6, older_than_s=math.inf)
    for _ in range(steps_in_flight):
        manager.new_step()
        assert lender.returned == []
        manager.check()
    manager.new_step()
    assert len(lender.returned) == 6


def test_only_content_older_than_the_asker_s_is_evicted_and_the_oldest_first():
    lender = FakeLender()
    manager = make(lender)
    for time, name in enumerate(("old", "middle", "young")):
        lender.time_s = float(time)
        manager.new_step()
        run(manager, name, 8 * 4)
    manager.borrowed._batch_pages = 1
    lender.free = []
    lender.news_next = News(granted=[], called=20, older_than_s=1.5)
    lender.time_s = 9.0
    manager.borrowed.rest()

    # The first two prompts are older than 1.5 seconds. The third is kept, though more was called.
    assert found_tokens(manager, "old", 32) == found_tokens(manager, "middle", 32) == 0
    assert found_tokens(manager, "young", 32) == 32
    assert len(lender.returned) >= 8
    manager.check()


class YoungestFirst(LeastRecentlyUsed):
    """A policy that evicts the youngest checkpoint."""

    def worth(self, candidate, time):
        return time - candidate.point.last_kept


def test_what_counts_is_the_checkpoint_evicted_next_and_not_the_oldest():
    lender = FakeLender()
    manager = make(lender, eviction_policy=YoungestFirst())
    manager.new_step()
    for time, name in enumerate(("old", "middle", "young")):
        manager.borrowed._times.note(float(time))
        run(manager, name, 8 * 4)
    manager.borrowed._batch_pages = 1
    lender.free = []
    lender.time_s = 9.0
    manager.new_step()
    assert lender.told[2] == 2.0

    lender.news_next = News(granted=[], called=20, older_than_s=1.5)
    manager.new_step()
    assert all(found_tokens(manager, name, 32) == 32 for name in ("old", "middle", "young"))

    lender.news_next = News(granted=[], called=20, older_than_s=math.inf)
    manager.new_step()
    # All but the guarantee goes, which holds one prompt.
    assert [found_tokens(manager, name, 32) for name in ("old", "middle", "young")] == [32, 0, 0]
    manager.check()


def test_large_pages_emptied_just_now_are_kept_unless_the_next_checkpoint_is_older():
    returned = []
    for older_than_s in (2.0, 4.0):
        lender = FakeLender()
        manager = make(lender)
        lender.time_s = 3.0
        manager.new_step()
        run(manager, "cached", 8 * 4)
        manager.allocate("short", num_tokens=8 * 4)
        lender.free = []
        manager.free("short")
        assert manager._allocator.large_pages.num_empty
        lender.news_next = News(granted=[], called=2, older_than_s=older_than_s)
        for _ in range(2):
            manager.new_step()
        returned.append(len(lender.returned))
        manager.check()
    assert returned == [0, 2]


def test_large_pages_that_stay_empty_are_returned_in_time_without_a_call():
    lender = FakeLender()
    manager = make(lender)
    manager.new_step()
    manager.allocate("large", num_tokens=8 * 20)
    manager.free("large")
    for _ in range(3 * SURPLUS_STEPS):
        manager.new_step()
        manager.check()
    assert manager.num_large_pages == 5
    assert len({*lender.returned, *lender.free}) == 28


def test_an_engine_keeps_its_guarantee_whatever_it_is_called_to_return():
    lender = FakeLender()
    manager = make(lender)
    manager.new_step()
    run(manager, "all", 8 * 20)
    lender.news_next = News(granted=[], called=1000, older_than_s=math.inf)
    lender.free = []
    manager.borrowed.rest()

    assert manager.num_large_pages == 5
    assert manager.large_page_counts().free + manager.large_page_counts().cached == 4
    manager.check()


def test_free_large_pages_are_borrowed_before_own_content_is_evicted():
    lender = FakeLender()
    manager = make(lender)
    manager.new_step()
    run(manager, "cached", 8 * 4)
    manager.allocate("second", num_tokens=8 * 10)

    assert found_tokens(manager, "cached", 32) == 32
    assert manager.borrowed.num_asks > 0
    manager.check()


def test_an_engine_without_room_asks_for_what_it_lacks_once():
    lender = FakeLender()
    lender.free = []
    manager = make(lender)
    manager.new_step()
    for _ in range(3):
        with pytest.raises(Exception, match="needs"):
            manager.allocate("large", num_tokens=8 * 10)
    assert lender.asks == [(6, 0.0, True)]

    lender.news_next = News(granted=[10, 11, 12, 13, 14, 15])
    manager.new_step()
    manager.allocate("large", num_tokens=8 * 10)
    manager.check()


def test_an_engine_without_room_asks_for_a_batch_at_least():
    lender = FakeLender()
    lender.free = []
    manager = make(lender)
    manager.borrowed._batch_pages = 9
    manager.new_step()
    for _ in range(3):
        with pytest.raises(Exception, match="needs"):
            manager.allocate("large", num_tokens=8 * 10)
    assert [num_pages for num_pages, _, is_needed in lender.asks if is_needed] == [9]
    manager.check()


@pytest.mark.parametrize(("older_than_s", "may_ask"), [(0.5, True), (math.inf, False)])
def test_a_called_engine_asks_for_itself_if_it_has_nothing_to_return(older_than_s, may_ask):
    lender = FakeLender()
    manager = make(lender)
    lender.time_s = 1.0
    manager.new_step()
    run(manager, "cached", 8 * 8)
    assert not manager.large_page_counts().free
    lender.free = []
    lender.news_next = News(granted=[], called=3, older_than_s=older_than_s)
    manager.new_step()
    assert bool([ask for ask in lender.asks if ask[0] and ask[1] is not None]) == may_ask
    manager.check()


def test_a_large_page_that_is_here_already_cannot_be_lent_again():
    manager = make(FakeLender())
    with pytest.raises(InvariantError, match=r"\[3\] are added"):
        manager._allocator.large_pages.add([3])
    with pytest.raises(InvariantError, match="added"):
        manager._allocator.large_pages.add([0])
    manager.check()


def test_a_manager_refuses_a_lender_of_another_arena_or_host_memory_beside_it():
    with pytest.raises(ValueError, match="num_large_pages must be 33"):
        Manager(SMALL, num_large_pages=34, lender=FakeLender())
    with pytest.raises(ValueError, match="num_host_large_pages must be 0"):
        make(FakeLender(), num_host_large_pages=20)
    lender = FakeLender()
    lender.guarantee_pages = 0
    with pytest.raises(ValueError, match="must guarantee at least 1"):
        make(lender)
