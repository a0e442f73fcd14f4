"""Full, sliding-window and chunked-local attention, against their definition token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jenga.policies import ALL_PAGES, NEVER, Grain, RequestFacts
from jenga.policies.chunked_local import ChunkedLocalPolicy
from jenga.policies.full_attention import FullAttentionPolicy
from jenga.policies.sliding_window import SlidingWindowPolicy

FACTS = RequestFacts(prompt_tokens=64)

policies = st.one_of(
    st.just((FullAttentionPolicy(), lambda _query, _token: True)),
    st.integers(1, 20).map(
        lambda window: (SlidingWindowPolicy(window), lambda query, token: query - token < window)
    ),
    st.integers(1, 20).map(
        lambda chunk: (
            ChunkedLocalPolicy(chunk),
            lambda query, token: query // chunk == token // chunk,
        )
    ),
)


def read_by(reads, query):
    return [token for token in range(query + 1) if reads(query, token)]


@given(policies, st.integers(0, 60), st.integers(1, 20))
def test_touched_slots_are_those_that_any_query_from_there_on_reads(case, processed, chunk):
    policy, reads = case
    touched = policy.update_last_access(FACTS, processed, processed + chunk)

    needed = [t for query in range(processed, 90) for t in read_by(reads, query)]
    written = range(processed, processed + chunk)
    assert touched.stop == processed + chunk
    assert touched.start == min([*needed, *written])


@given(policies, st.integers(0, 60), st.sampled_from([1, 2, 4, 16]))
def test_a_page_is_released_no_sooner_and_no_later_than_said(case, processed, page_slots):
    policy, _ = case

    def first_page(at):
        return policy.update_last_access(FACTS, at, at + 1).start // page_slots

    release = policy.next_release(FACTS, processed, page_slots)

    expected = next(
        (at for at in range(processed + 1, 200) if first_page(at) > first_page(processed)), NEVER
    )
    assert release == expected


@given(policies, st.lists(st.booleans(), max_size=14), st.sampled_from([1, 2, 4]))
def test_possible_prefixes_are_those_whose_next_query_finds_all_it_reads(case, hits, page_slots):
    policy, reads = case
    grain = Grain(page_slots=page_slots, hash_tokens=page_slots)
    is_hit = [1 if hit else None for hit in hits]

    possible = []
    at_most = len(hits) * page_slots
    while True:
        prefix = policy.get_possible_prefix(FACTS, is_hit, grain, at_most)
        possible.append(prefix)
        if prefix == 0:
            break
        at_most = prefix - 1

    expected = [
        prefix
        for prefix in range(len(hits) * page_slots, -1, -page_slots)
        if all(hits[token // page_slots] for token in read_by(reads, prefix) if token < prefix)
    ]
    assert possible == expected


@given(policies, st.lists(st.booleans(), min_size=1, max_size=14), st.sampled_from([1, 2, 4]))
def test_a_prefix_reuses_the_pages_its_next_query_reads(case, hits, page_slots):
    policy, reads = case
    grain = Grain(page_slots=page_slots, hash_tokens=page_slots)
    is_hit = [1 if hit else None for hit in hits]
    prefix = policy.get_possible_prefix(FACTS, is_hit, grain, len(hits) * page_slots)

    reused = policy.reused_pages(FACTS, is_hit, grain, prefix)

    read = {token // page_slots for token in read_by(reads, prefix) if token < prefix}
    assert read == set(reused)
    assert all(is_hit[page] for page in reused)


@given(policies, st.integers(1, 60), st.integers(1, 30))
def test_no_step_touches_more_slots_than_the_peak_and_one_touches_as_many(case, num_tokens, chunk):
    policy, _ = case

    touched = [
        len(policy.update_last_access(FACTS, start, min(num_tokens, start + chunk)))
        for start in range(num_tokens)
    ]

    assert policy.peak_slots(FACTS, num_tokens, chunk) >= max(touched)
    if not isinstance(policy, ChunkedLocalPolicy):
        assert policy.peak_slots(FACTS, num_tokens, chunk) == max(touched)


def test_a_scan_of_a_long_window_finds_a_missing_page_anywhere():
    policy = SlidingWindowPolicy(16 * 300)
    grain = Grain(page_slots=16, hash_tokens=16)
    for missing in (0, 1, 63, 64, 65, 199, 299):
        is_hit = [None if page == missing else 1 for page in range(300)]
        assert policy.get_possible_prefix(FACTS, is_hit, grain, 16 * 300) == 16 * missing


@pytest.mark.parametrize(
    ("page_slots", "hash_tokens", "expected"),
    [
        (16, 16, [b"h0", b"h1", b"h2", b"h3"]),
        (32, 16, [b"h1", b"h3"]),
        (8, 16, [(h, i) for h in (b"h0", b"h1", b"h2", b"h3") for i in range(2)]),
    ],
)
def test_content_keys_name_all_tokens_up_to_the_end_of_a_page(page_slots, hash_tokens, expected):
    grain = Grain(page_slots=page_slots, hash_tokens=hash_tokens)
    hashes = [b"h0", b"h1", b"h2", b"h3"]
    policy = FullAttentionPolicy()

    assert list(policy.content_keys(FACTS, hashes, grain, ALL_PAGES)) == expected
    assert list(policy.content_keys(FACTS, hashes, grain, range(1, 2))) == expected[1:2]
