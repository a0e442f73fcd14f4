"""Pages in a row."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jenga.arena.page_runs import (
    LEAST_RUN,
    LONG_RUN,
    large_runs_of,
    num_equal,
    parts_by_large,
    run_end,
    stretches_of,
)

NUM_PAGES = 400


@st.composite
def some_pages(draw):
    """Draw different pages, most of them in runs."""
    pages = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(1, NUM_PAGES - 1))
        run = list(range(start, min(NUM_PAGES, start + draw(st.integers(1, 100)))))
        pages += run if draw(st.booleans()) else draw(st.permutations(run[:5]))
    return list(dict.fromkeys(pages))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_equal_elements_are_counted_up_to_the_first_that_differ(these, others):
    these, others = these[: len(others)], others[: len(these)]

    number = num_equal(these, others)

    assert these[:number] == others[:number]
    assert number == len(these) or these[number] != others[number]


@settings(deadline=None)
@given(some_pages())
def test_stretches_are_all_pages_in_order_and_runs_are_runs(pages):
    stretches = stretches_of(pages, range_list(0, NUM_PAGES))

    assert [page for start, end, _ in stretches for page in pages[start:end]] == pages
    for start, end, in_run in stretches:
        if in_run:
            assert pages[start:end] == range_list(pages[start], pages[start] + end - start)
            assert end - start >= LEAST_RUN


@settings(deadline=None)
@given(some_pages(), st.integers(2, 40))
def test_parts_are_all_pages_in_order_each_in_one_large_page(pages, pages_per_large):
    num_larges = NUM_PAGES // pages_per_large + 1
    numbers = [
        range_list(large * pages_per_large, (large + 1) * pages_per_large)
        for large in range(num_larges)
    ]

    parts = parts_by_large(pages, pages_per_large, numbers)

    assert [page for _, start, end, _ in parts for page in pages[start:end]] == pages
    for large, start, end, in_run in parts:
        assert {page // pages_per_large for page in pages[start:end]} == {large}
        if in_run:
            assert pages[start:end] == range_list(pages[start], pages[start] + end - start)


@settings(deadline=None)
@given(some_pages(), st.integers(2, 40))
def test_large_runs_are_all_pages_in_order_in_one_large_page_or_of_whole_ones(pages, num_pages):
    numbers = [
        range_list(large * num_pages, (large + 1) * num_pages)
        for large in range(NUM_PAGES // num_pages + 1)
    ]

    stretches = large_runs_of(pages, num_pages, numbers)

    assert [page for start, end, _ in stretches for page in pages[start:end]] == pages
    for start, end, in_run in stretches:
        larges = {page // num_pages for page in pages[start:end]}
        if in_run:
            assert pages[start:end] == range_list(pages[start], pages[start] + end - start)
            assert len(larges) == 1 or end - start == len(larges) * num_pages
        else:
            assert len(larges) == 1 or num_pages < LEAST_RUN


@given(st.integers(0, 90), st.integers(2, 40))
def test_whole_large_pages_in_a_run_are_one_run(num_whole, num_pages):
    numbers = [range_list(large * num_pages, (large + 1) * num_pages) for large in range(100)]
    pages = range_list(num_pages, (1 + num_whole) * num_pages)
    scattered = [95 * num_pages, 93 * num_pages]

    stretches = large_runs_of([*pages, *scattered], num_pages, numbers)

    if len(pages) >= LONG_RUN:
        assert stretches[0] == (0, len(pages), True)


@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 200))
def test_a_run_ends_at_the_first_number_that_differs_or_where_it_is_said_to(steps, most):
    pages = [number + sum(steps[: number + 1]) for number in range(len(steps))]
    end = min(most, len(pages))
    start = min(3, end)

    found = run_end(pages, start, range_list(0, 500), start, end)

    differing = [place for place in range(start, end) if pages[place] != place]
    assert found == (differing[0] if differing else end)


def test_a_whole_large_page_is_one_run():
    pages = [*range(13, 20), *range(40, 60), 7, 30, 5]

    parts = parts_by_large(pages, 20, [range_list(start, start + 20) for start in range(0, 80, 20)])

    assert parts == [
        (0, 0, 7, True),
        (2, 7, 27, True),
        (0, 27, 28, False),
        (1, 28, 29, False),
        (0, 29, 30, False),
    ]


def range_list(start, end):
    return list(range(start, end))
