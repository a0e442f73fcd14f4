"""What goes next is copied to host memory a step before it has to go."""

import random

import pytest

from jenga.tables.request import CopyPath
from tests.machines.geometries import full, geometry, sliding
from tests.manager.test_manager import compute, hashes
from tests.prefix.test_host_cache import PLAIN, WINDOWED, manager_of

SPLIT = geometry("split", full(tokens=16, per_large=4))
PASSED = geometry(
    "passed", full(tokens=16), sliding(tokens=16, window=32, slot_bytes=8, per_large=2)
)


def grown(manager, num_large_pages=3):
    """Prompts of a page each, asked one after another until the arena is full and evicts."""
    ahead = []
    for number in range(num_large_pages):
        compute(manager, f"r{number}", 16, prefix=f"p{number}")
        ahead += manager.write_back_pages()
    return ahead


def is_on_host(manager, prompt):
    """Whether content would be found if the arena lost it."""
    (cache,) = manager.prefix_cache.host._caches
    return cache.get(hashes(16, name=prompt)[0]) is not None


def test_nothing_is_saved_while_nothing_goes():
    manager = manager_of(PLAIN, 9, 9)

    assert grown(manager, 8) == []
    assert manager.host_report().stored_bytes == 0


def test_without_host_memory_nothing_is_saved():
    manager = manager_of(PLAIN, 3, 0)

    assert grown(manager, 6) == []


def test_what_goes_next_is_saved_stays_and_is_not_copied_when_it_goes():
    manager = manager_of(PLAIN, 5, 9)
    grown(manager, 5)  # the last one evicts the first
    manager.take_copies()

    # The second goes next, and is copied beside a step while it can be hit where it is.
    assert is_on_host(manager, "p1")
    assert not is_on_host(manager, "p2")
    (page,) = manager.lookup(hashes(32, name="p1"), max_tokens=16).pages[0]
    assert page > 0
    report = manager.host_report()
    assert report.ahead_bytes == PLAIN.large_page_bytes
    assert report.stored_bytes == 2 * PLAIN.large_page_bytes

    compute(manager, "r5", 16, prefix="p5")  # takes its page
    assert manager.take_copies() == []
    assert manager.host_report().stored_bytes == report.stored_bytes
    assert manager.lookup(hashes(32, name="p1"), max_tokens=16).num_tokens == 16
    manager.check()


def test_copies_ahead_are_not_among_those_that_a_step_waits_for():
    manager = manager_of(PLAIN, 5, 9)
    for number in range(4):
        compute(manager, f"r{number}", 16, prefix=f"p{number}")
        assert manager.write_back_pages() == []
    compute(manager, "r4", 16, prefix="p4")

    (waited,) = manager.take_copies()
    (ahead,) = manager.write_back_pages()

    assert waited.path == ahead.path == CopyPath.TO_HOST
    assert waited.source != ahead.source
    assert manager.take_copies() == []
    assert manager.write_back_pages() == []  # it was looked at


def test_as_much_is_saved_as_a_step_took_lately():
    manager = manager_of(PLAIN, 17, 33)
    for number in range(16):
        compute(manager, f"r{number}", 16, prefix=f"p{number}")
        manager.write_back_pages()
    compute(manager, "long", 6 * 16, prefix="long")  # in one step

    assert len(manager.write_back_pages()) == 6
    # What was saved stays so while steps take nothing.
    for _ in range(40):
        manager.new_step()
        assert manager.write_back_pages() == []
    compute(manager, "again", 6 * 16, prefix="again")
    assert manager.host_report().stored_bytes == 12 * PLAIN.large_page_bytes


def test_where_nothing_goes_any_longer_what_lies_there_alone_stays():
    # Room for 9 pages and 8 in the other memory; a prompt takes two, of which one is cached.
    manager = manager_of(PLAIN, 10, 9)
    for number in range(14):
        compute(manager, f"r{number}", 17, prefix=f"p{number}")
        manager.write_back_pages()
    here = [f"p{number}" for number in range(6, 14)]
    gone = [f"p{number}" for number in range(6)]
    assert all(is_on_host(manager, name) for name in gone)
    num_evicted = manager._allocator.large_pages.num_evicted

    rng = random.Random(0)
    for number in range(200):
        compute(manager, f"again{number}", 17, prefix=rng.choice(here))
        manager.write_back_pages()

    assert manager._allocator.large_pages.num_evicted == num_evicted
    assert all(is_on_host(manager, name) for name in gone)


def test_small_pages_that_go_alone_are_saved_too():
    # Each large page keeps a page in use, so that its others are evicted one by one.
    manager = manager_of(SPLIT, 3, 9)
    for number in range(2):
        manager.new_step()
        manager.allocate(f"runs{number}", num_tokens=16)
    for number in range(6):
        compute(manager, f"r{number}", 16, prefix=f"p{number}")
        assert manager.write_back_pages() == []
    compute(manager, "r6", 16, prefix="p6")

    (copy,) = manager.write_back_pages()

    assert copy.path == CopyPath.TO_HOST
    assert is_on_host(manager, "p1")
    manager.check()


@pytest.mark.parametrize(
    ("cut", "num_large_pages"),
    [pytest.param(WINDOWED, 205, id="1"), pytest.param(PASSED, 154, id="2")],
)
def test_what_nobody_is_likely_to_go_on_from_is_not_saved(cut, num_large_pages):
    manager = manager_of(cut, num_large_pages, 40)
    compute(manager, "a", 16 * 100, prefix="a", chunk=16)
    manager.write_back_pages()
    compute(manager, "b", 16 * 4, prefix="b", chunk=16)

    # Windows that were passed go first, and enough of them are left.
    assert sum(each.alone + each.own_large for each in manager.cache_report().evictions) > 0
    assert manager.write_back_pages() == []
    assert manager.host_report().stored_bytes == 0


def test_after_a_reset_nothing_is_taken_for_saved():
    manager = manager_of(PLAIN, 5, 9)
    grown(manager, 6)
    assert manager.reset_prefix_cache()
    manager.write_back_pages()

    grown(manager, 6)

    assert is_on_host(manager, "p2")
    compute(manager, "r9", 16, prefix="p9")
    assert manager.lookup(hashes(32, name="p2"), max_tokens=16).num_tokens == 16
    manager.check()
