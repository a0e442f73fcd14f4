"""What an admission reads from host memory is loaded beside the steps before it."""

import pytest

from jenga.errors import NotLoadedError
from jenga.prefix import prefetch
from jenga.prefix.prefetch import STEP_BYTES
from jenga.tables.request import CopyPath
from tests.manager.test_manager import compute, hashes
from tests.prefix.test_host_cache import HYBRID, PLAIN, WINDOWED, copies_of, lose, manager_of

CUTS = [PLAIN, WINDOWED, HYBRID]
PAGE_BYTES = PLAIN.large_page_bytes


def lost_prompt(cut=PLAIN, num_large_pages=17, num_host_large_pages=400, **options):
    """A manager of which host memory has the prompt "a", and in which another request runs."""
    options = {"load_at_once_bytes": 0} | options
    manager = manager_of(cut, num_large_pages, num_host_large_pages, **options)
    ask(manager, "a", 48, prefix="p")
    for number in range(8):
        ask(manager, f"q{number}", 16 * 6, prefix=f"q{number}")
    manager.new_step()
    manager.allocate("runs", num_tokens=16)
    manager.take_copies()
    return manager


def ask(manager, name, num_tokens, *, prefix):
    """Run a prompt that others can go on from."""
    compute(manager, name, num_tokens, prefix=prefix, free=False)
    if any(table.is_state for table in manager.geometry.page_tables):
        assert manager.keep_state(name, hashes(num_tokens, name=prefix)[-1], num_tokens)
    manager.free(name)


def come(manager, name="b", num_tokens=64):
    """Let a request with the prompt come in, in a step of its own."""
    manager.new_step()
    hit = manager.lookup(hashes(num_tokens), max_tokens=num_tokens - 1)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    return hit


def paths(copies):
    return [copy.path for copy in copies]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_what_an_admission_would_load_is_loaded_beside_the_step_before(cut):
    manager = lost_prompt(cut)

    with pytest.raises(NotLoadedError, match=r"'b' reads \d+ bytes from host memory"):
        come(manager)
    assert not manager.is_running("b")
    loads = manager.prefetch_pages(1)
    room = manager.take_copies()
    manager.check()

    assert loads
    assert set(paths(loads)) == {CopyPath.FROM_HOST}
    assert set(paths(room)) <= {CopyPath.TO_HOST}
    page_bytes = [table.small_page_bytes for table in cut.page_tables]
    num_bytes = sum(page_bytes[load.table_index] for load in loads)
    report = manager.host_report()
    assert report.loaded_bytes == num_bytes <= report.ahead_bytes

    hit = come(manager)

    assert hit.num_tokens == 48
    states = [table.index for table in manager._tables if table.policy.is_overwritten]
    for index, pages in enumerate(hit.pages):
        assert index in states or not hit.host_pages[index]
        assert {load.target for load in loads if load.table_index == index} <= set(pages)
    # States go to where the request has its own.
    waited = [copy for copy in manager.take_copies() if copy.path == CopyPath.FROM_HOST]
    assert {copy.table_index for copy in waited} <= set(states)
    assert manager.prefetch_pages(1) == []
    manager.check()


def test_alone_a_request_has_what_it_reads_loaded_at_once():
    manager = lost_prompt()
    manager.free("runs")

    come(manager)

    assert len(copies_of(manager, CopyPath.FROM_HOST)) == 3


@pytest.mark.parametrize(
    ("at_once_bytes", "is_put_off"),
    [
        pytest.param(3 * PAGE_BYTES, False, id="as_much_as_may_be"),
        pytest.param(3 * PAGE_BYTES - 1, True, id="more"),
        pytest.param(STEP_BYTES, False, id="little"),
    ],
)
def test_little_is_loaded_at_once(at_once_bytes, is_put_off):
    manager = lost_prompt(load_at_once_bytes=at_once_bytes)

    if is_put_off:
        with pytest.raises(NotLoadedError):
            come(manager)
    else:
        come(manager)
        assert len(copies_of(manager, CopyPath.FROM_HOST)) == 3


def test_more_than_a_step_has_time_for_is_loaded_beside_several(monkeypatch):
    monkeypatch.setattr(prefetch, "STEP_BYTES", 0)
    manager = lost_prompt()

    # Four tokens are loaded while one is computed: a page in a step of four tokens.
    num_loaded = []
    for _ in range(3):
        with pytest.raises(NotLoadedError):
            come(manager)
        num_loaded.append(len(manager.prefetch_pages(4)))
        manager.take_copies()
    come(manager)

    assert num_loaded == [1, 1, 1]
    assert copies_of(manager, CopyPath.FROM_HOST) == []


def test_the_first_pages_are_loaded_first(monkeypatch):
    monkeypatch.setattr(prefetch, "STEP_BYTES", 2 * PAGE_BYTES)
    manager = lost_prompt()
    with pytest.raises(NotLoadedError):
        come(manager)

    first, second = manager.prefetch_pages(1)

    hit = manager.lookup(hashes(64), max_tokens=63)
    assert hit.pages[0][:2] == [first.target, second.target]
    assert 2 in hit.host_pages[0]


def test_who_gets_no_nearer_is_put_off_once():
    manager = lost_prompt()
    with pytest.raises(NotLoadedError):
        come(manager)

    # Nobody asked for copies in that step.
    come(manager)

    assert len(copies_of(manager, CopyPath.FROM_HOST)) == 3


def test_another_is_put_off_anew_and_so_is_one_that_lost_its_pages_again():
    manager = lost_prompt()
    for name in ("b", "c"):
        with pytest.raises(NotLoadedError):
            come(manager, name)
    come(manager, "c")
    manager.free("c")
    for number in range(4):
        lose(manager, f"again{number}", 16 * 12)
    manager.take_copies()

    with pytest.raises(NotLoadedError):
        come(manager, "c")


def test_nothing_is_loaded_for_whom_there_is_no_room():
    manager = lost_prompt()
    manager.allocate("large", num_tokens=16 * 13)
    report = manager.host_report()

    with pytest.raises(Exception, match="needs") as refused:
        come(manager)

    assert not isinstance(refused.value, NotLoadedError)
    assert manager.prefetch_pages(1) == []
    assert manager.host_report() == report


def test_what_was_put_off_in_an_earlier_step_is_not_loaded():
    manager = lost_prompt()
    with pytest.raises(NotLoadedError):
        come(manager)

    manager.new_step()

    assert manager.prefetch_pages(1) == []


def test_what_is_in_the_arena_by_then_is_not_loaded():
    manager = lost_prompt()
    with pytest.raises(NotLoadedError):
        come(manager)
    manager.allocate("other", num_tokens=32)
    manager.commit("other", hashes(32), 32)

    (load,) = manager.prefetch_pages(1)

    hit = manager.lookup(hashes(64), max_tokens=63)
    assert hit.pages[0][:2] == manager.page_table("other", 0)
    assert hit.pages[0][2] == load.target
    manager.check()


def test_what_host_memory_lost_by_then_is_not_loaded():
    manager = lost_prompt()
    with pytest.raises(NotLoadedError):
        come(manager)
    for table in manager._tables:
        for key in hashes(64)[:2]:
            manager.prefix_cache.host.drop(table, key)

    (load,) = manager.prefetch_pages(1)

    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 0
    assert load.path == CopyPath.FROM_HOST
    manager.check()


def test_what_makes_room_is_saved_before_its_place_is_taken():
    manager = lost_prompt()
    with pytest.raises(NotLoadedError):
        come(manager)

    loads = manager.prefetch_pages(1)
    saved = manager.take_copies()

    # The arena was full of prompts that nobody has copied yet.
    assert {copy.source for copy in saved} <= {load.target for load in loads}
    manager.check()


def test_without_host_memory_nothing_is_loaded():
    manager = manager_of(PLAIN, 9, 0)

    assert manager.prefetch_pages(1000) == []
