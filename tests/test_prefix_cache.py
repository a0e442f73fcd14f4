"""Content keys of small pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jenga.errors import InvariantError
from jenga.prefix_cache import PrefixCache


def test_a_key_keeps_the_first_page_entered_under_it():
    cache = PrefixCache(8)
    cache.enter([3, 4], [b"a", b"b"])
    cache.enter([5, 6], [b"a", b"c"])

    assert list(cache.find([b"a", b"b", b"c", b"d"])) == [3, 4, 6, None]
    assert cache.keys[5] is None
    cache.check()


def test_null_pages_and_missing_keys_are_passed_over():
    cache = PrefixCache(8)
    cache.enter([0, 2, 3], [b"a", None, b"b"])

    assert len(cache) == 1
    assert cache.get(b"a") is None


def test_a_forgotten_page_is_not_found_and_its_key_is_free():
    cache = PrefixCache(8)
    cache.enter([3], [b"a"])
    cache.forget([3])
    cache.enter([5], [b"a"])

    assert cache.get(b"a") == 5
    cache.check()


@pytest.mark.parametrize("looked_up", [False, True])
def test_found_pages_answer_alike_before_and_after_all_are_looked_up(looked_up):
    cache = PrefixCache(8)
    cache.enter([3, 4], [b"a", b"c"])
    found = cache.find([b"a", b"b", b"c"])
    if looked_up:
        assert found.index(None) == 1

    assert len(found) == 3
    assert found[0] == 3
    assert found[1] is None
    assert found[1:] == [None, 4]


def test_check_finds_a_page_that_answers_to_no_key():
    cache = PrefixCache(8)
    cache.enter([3], [b"a"])
    cache.keys[4] = b"a"

    with pytest.raises(InvariantError, match="keys lead to pages"):
        cache.check()


@given(
    st.sets(st.integers(0, 299)),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=8),
)
def test_found_pages_are_those_of_their_keys_whatever_was_asked_before(missing, questions):
    cache = PrefixCache(301)
    expected = [None if number in missing else number + 1 for number in range(300)]
    cache.enter([page for page in expected if page], [n for n, page in enumerate(expected) if page])
    found = cache.find(list(range(300)))

    for start, end, asks_for_gap in questions:
        assert found[start:end] == expected[start:end]
        if asks_for_gap and missing:
            assert found.index(None) == min(missing)
        elif asks_for_gap:
            with pytest.raises(ValueError, match="no key"):
                found.index(None)
