"""Points of texts: what is remembered of them, for how long, and what an observer is told."""

import random

import pytest

from jenga.eviction.points import (
    LEARN_EVERY,
    NO_POINT,
    REMEMBERED_ARENAS,
    Kind,
    Past,
    RememberedPoints,
    past_of,
)

ARENA_BYTES = 1000
HORIZON_BYTES = int(REMEMBERED_ARENAS * ARENA_BYTES)


class Log:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.waits = []
        self.learnt = []

    def observe(self, point, waited_bytes, *, was_read):
        self.waits.append((point.key, point.kind, point.past, waited_bytes, was_read))

    def learn(self, waiting, time):
        self.learnt.append(([point.key for point in waiting], time))


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def points(log):
    return RememberedPoints(log, arena_bytes=ARENA_BYTES)


def test_time_is_what_requests_compute(points):
    points.record_admission(10)
    points.record_admission(0)
    points.record_admission(2.5)

    assert points.time == 12.5


def test_a_point_waits_from_when_it_was_left(points, log):
    points.record_admission(7)
    point = points.record_point(b"a", 32, Kind.PROMPT_END, Past.KNOWN_TEXT)
    points.record_admission(30)

    points.record_read(point)

    assert log.waits == [(b"a", Kind.PROMPT_END, Past.KNOWN_TEXT, 30, True)]
    assert (point.key, point.num_tokens, point.past) == (b"a", 32, Past.READ)
    assert point.waits_since == 37


def test_a_point_that_was_read_waits_for_the_next_reader_as_one_that_was_read(points, log):
    point = points.record_point(b"a", 32, Kind.PROMPT_END, Past.NEW_TEXT)
    for num_bytes in (5, 11):
        points.record_admission(num_bytes)
        points.record_read(point)

    assert [wait[2:] for wait in log.waits] == [(Past.NEW_TEXT, 5, True), (Past.READ, 11, True)]


def test_a_known_point_that_is_left_again_is_young_but_waits_as_long_as_before(points, log):
    point = points.record_point(b"a", 32, Kind.PROMPT_END, Past.NEW_TEXT)
    points.record_admission(40)

    again = points.record_point(b"a", 32, Kind.ANSWER_END, Past.TURN)

    assert again is point
    assert (point.kind, point.past) == (Kind.PROMPT_END, Past.NEW_TEXT)
    assert (point.waits_since, point.last_kept) == (0, 40)
    assert log.waits == []


def test_a_point_where_texts_are_found_to_part_is_a_branch_from_then_on(points, log):
    point = points.record_point(b"a", 32, Kind.PROMPT_END, Past.TURN)
    points.record_admission(40)

    points.record_point(b"a", 32, Kind.BRANCH, Past.NEW_TEXT)
    points.record_admission(9)
    points.record_point(b"a", 32, Kind.BRANCH, Past.NEW_TEXT)
    points.record_read(point)

    # As the end of a prompt it was not read; as a branch it was.
    assert log.waits == [
        (b"a", Kind.PROMPT_END, Past.TURN, 40, False),
        (b"a", Kind.BRANCH, Past.TURN, 9, True),
    ]


def test_reads_of_a_point_are_counted_and_a_branch_begins_with_the_one_that_made_it(points):
    point = points.record_point(b"a", 32, Kind.PROMPT_END, Past.NEW_TEXT)
    branch = points.record_point(b"b", 64, Kind.BRANCH, Past.READ)
    assert (point.num_reads, branch.num_reads) == (0, 1)

    for _ in range(3):
        points.record_read(point)

    assert point.num_reads == 3


def test_readers_of_a_guess_are_readers_of_the_point_that_it_was_a_guess_of(points):
    guess = points.record_point(b"a", 32, Kind.BEFORE_END, Past.NEW_TEXT)
    branch = points.record_point(b"b", 64, Kind.BRANCH, Past.KNOWN_TEXT)
    points.pass_on_reads(guess, branch)
    assert (branch.num_reads, branch.past) == (0, Past.KNOWN_TEXT)
    for _ in range(2):
        points.record_read(guess)

    for _ in range(2):
        points.pass_on_reads(guess, branch)
        assert (branch.num_reads, branch.past) == (2, Past.READ)

    # A reader that both have counts once.
    for _ in range(3):
        points.record_read(branch)
    points.pass_on_reads(guess, branch)
    assert branch.num_reads == 5


def test_renewing_makes_a_point_young_and_says_nothing_of_its_wait(points, log):
    point = points.record_point(b"a", 32, Kind.PROMPT_END, Past.NEW_TEXT)
    points.record_admission(40)

    points.reset_age(point)

    assert (point.waits_since, point.last_kept) == (0, 40)
    assert log.waits == []


def test_points_on_a_text_come_in_order(points):
    for key in (b"3", b"1", b"x"):
        points.record_point(key, 16, Kind.BRANCH, Past.NEW_TEXT)

    assert [point.key for point in points.path([b"1", b"2", b"3", b"4"])] == [b"1", b"3"]


def test_a_point_is_forgotten_when_it_has_waited_for_as_long_as_is_remembered(points, log):
    points.record_point(b"a", 32, Kind.BEFORE_END, Past.NEW_TEXT)
    points.record_admission(HORIZON_BYTES)
    assert points.get(b"a") is not None

    points.record_admission(1)

    assert points.get(b"a") is None
    assert len(points) == 0
    assert log.waits == [(b"a", Kind.BEFORE_END, Past.NEW_TEXT, HORIZON_BYTES + 1, False)]


def test_nothing_is_learnt_from_a_point_that_was_replaced(points, log):
    point = points.record_point(b"a", 32, Kind.ANSWER_END, Past.NEW_TEXT)

    points.forget(point)
    points.forget(point)
    points.record_admission(2 * HORIZON_BYTES)

    assert points.get(b"a") is None
    assert log.waits == []


def test_a_point_that_is_still_kept_is_remembered_again_when_it_is_read(points):
    point = points.record_point(b"a", 32, Kind.ANSWER_END, Past.NEW_TEXT)
    points.record_admission(HORIZON_BYTES + 1)
    assert points.get(b"a") is None

    points.record_read(point)

    assert points.get(b"a") is point


def test_an_observer_learns_now_and_then_of_those_that_wait(points, log):
    points.record_point(b"a", 32, Kind.BRANCH, Past.NEW_TEXT)
    for number in range(3 * LEARN_EVERY):
        points.record_admission(1)
        if number == LEARN_EVERY:
            points.record_point(b"b", 32, Kind.BRANCH, Past.NEW_TEXT)

    assert log.learnt == [
        ([b"a"], LEARN_EVERY),
        ([b"a", b"b"], 2 * LEARN_EVERY),
        ([b"a", b"b"], 3 * LEARN_EVERY),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_wait_is_told_once_and_those_that_wait_are_in_order(seed):
    source, log = random.Random(seed), Log()
    points = RememberedPoints(log, arena_bytes=ARENA_BYTES)
    since = {}  # key -> when its wait began
    expected = []
    for _ in range(400):
        key, now = source.choice("abcdefghijkl"), points.time
        action, point = source.random(), points.get(key)
        assert (point is None) == (key not in since)
        if action < 0.4:
            kind = source.choice(list(Kind))
            if point is not None and kind == Kind.BRANCH != point.kind:
                expected.append((key, now - since[key], False))
                since[key] = now
            since.setdefault(key, now)
            points.record_point(key, 16, kind, Past.NEW_TEXT)
        elif action < 0.6 and point is not None:
            expected.append((key, now - since[key], True))
            since[key] = now
            points.record_read(point)
        elif action < 0.65 and point is not None:
            del since[key]
            points.forget(point)
        else:
            points.record_admission(source.choice([0, 1, 100, 700]))
            old = sorted(
                (start, each)
                for each, start in since.items()
                if points.time - start > HORIZON_BYTES
            )
            forgotten = log.waits[len(expected) :]
            assert sorted(wait[0] for wait in forgotten) == sorted(each for _, each in old)
            expected += [(wait[0], points.time - since[wait[0]], False) for wait in forgotten]
            for _, each in old:
                del since[each]
        waiting = [point.waits_since for point in points._points.values()]
        assert waiting == sorted(waiting)
        assert len(points) == len(since)

    assert [(wait[0], *wait[3:]) for wait in log.waits] == expected


@pytest.mark.parametrize(
    ("kind", "past"),
    [
        (Kind.PROMPT_END, Past.TURN),
        (Kind.ANSWER_END, Past.TURN),
        (Kind.BEFORE_END, Past.KNOWN_TEXT),
        (Kind.BRANCH, Past.KNOWN_TEXT),
    ],
    ids=lambda each: each.name,
)
def test_what_a_request_leaves_depends_on_where_it_went_on_from(points, kind, past):
    assert past_of(points.record_point(b"a", 16, kind, Past.NEW_TEXT)) == past


def test_a_request_of_an_unknown_text_leaves_points_of_a_new_one():
    assert past_of(None) == Past.NEW_TEXT


def test_what_is_not_kept_has_a_point_of_its_own():
    assert NO_POINT.key is None
    assert NO_POINT.num_tokens == 0
