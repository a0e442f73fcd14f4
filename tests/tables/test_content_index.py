"""Content keys of small pages."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jenga.errors import InvariantError
from jenga.tables.content_index import ContentIndex


def test_a_key_keeps_the_first_page_entered_under_it():
    cache = ContentIndex(8)
    cache.insert([3, 4], [b"a", b"b"])
    cache.insert([5, 6], [b"a", b"c"])

    assert list(cache.find([b"a", b"b", b"c", b"d"])) == [3, 4, 6, None]
    assert cache.keys[5] is None
    cache.check()


def test_null_pages_and_missing_keys_are_passed_over():
    cache = ContentIndex(8)
    cache.insert([0, 2, 3], [b"a", None, b"b"])

    assert len(cache) == 1
    assert cache.get(b"a") is None


def test_a_forgotten_page_is_not_found_and_its_key_is_free():
    cache = ContentIndex(8)
    cache.insert([3], [b"a"])
    cache.forget([3])
    cache.insert([5], [b"a"])

    assert cache.get(b"a") == 5
    cache.check()


@pytest.mark.parametrize("looked_up", [False, True])
def test_found_pages_answer_alike_before_and_after_all_are_looked_up(looked_up):
    cache = ContentIndex(8)
    cache.insert([3, 4], [b"a", b"c"])
    found = cache.find([b"a", b"b", b"c"])
    if looked_up:
        assert found.index(None) == 1

    assert len(found) == 3
    assert found[0] == 3
    assert found[1] is None
    assert found[1:] == [None, 4]


def test_check_finds_a_page_that_answers_to_no_key():
    cache = ContentIndex(8)
    cache.insert([3], [b"a"])
    cache.keys[4] = b"a"

    with pytest.raises(InvariantError, match="keys lead to pages"):
        cache.check()


def test_one_page_is_entered_as_several_are():
    cache = ContentIndex(8)

    assert cache.insert_page(3, b"a")
    assert not cache.insert_page(4, b"a")
    assert not cache.insert_page(0, b"b")
    assert not cache.insert_page(5, None)
    assert list(cache.find([b"a", b"b"])) == [3, None]
    cache.check()


def test_pages_without_a_key_are_not_found_where_a_run_passes_them():
    cache = ContentIndex(300)
    keys = [(b"image", number) for number in range(250)]
    keys[100] = None
    cache.insert(range(1, 251), keys)

    expected = [*range(1, 101), None, *range(102, 251)]
    assert cache.find(keys)[:] == expected


@given(
    st.sets(st.integers(0, 299)),
    st.lists(st.integers(1, 299), max_size=6),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=8),
)
def test_found_pages_are_those_of_their_keys_whatever_was_asked_before(missing, cuts, questions):
    cache = ContentIndex(301)
    edges = sorted({0, 300, *cuts})
    runs = [range(start + 1, end + 1) for start, end in pairwise(edges)]
    pages = [page for run in reversed(runs) for page in run]
    keys = [number.to_bytes(2) for number in range(300)]
    expected = [None if number in missing else page for number, page in enumerate(pages)]
    known = [(page, key) for page, key in zip(expected, keys, strict=True) if page is not None]
    cache.insert([page for page, _ in known], [key for _, key in known])
    found = cache.find(keys)

    for start, end, asks_for_gap in questions:
        assert found[start:end] == expected[start:end]
        if asks_for_gap and missing:
            assert found.index(None) == min(missing)
        elif asks_for_gap:
            with pytest.raises(ValueError, match="no key"):
                found.index(None)
