"""Rates at which points are read: against sums over all horizons, and what follows from them."""

import random
from dataclasses import dataclass

import pytest

from jenga.eviction.known import DEFAULT_POLICY, EVICTION_POLICIES
from jenga.eviction.learned import (
    AGES_PER_DOUBLING,
    COMMON_WEIGHT,
    KEPT_SHARE,
    NUM_AGES,
    NUM_CLASSES,
    PRIOR,
    YOUNGEST_SHARE,
    LearnedReuse,
)
from jenga.eviction.points import REMEMBERED_ARENAS, Kind, Past, Point
from jenga.eviction.policy import LeastRecentlyUsed

UNIT_BYTES = 1 << 20
ARENA_BYTES = int(UNIT_BYTES / YOUNGEST_SHARE)
"""An arena of which the youngest range of ages is about a unit long."""


@dataclass
class Candidate:
    """What policies see of a checkpoint."""

    point: Point
    heir_of: Point | None = None
    saved_tokens: int = 1
    own_bytes: int = 1


def learner():
    policy = LearnedReuse()
    policy.begin(arena_bytes=ARENA_BYTES)
    return policy


def point_of(kind=Kind.PROMPT_END, past=Past.NEW_TEXT, *, at=0.0):
    return Point(b"", 16, kind, past, at * UNIT_BYTES)


def rate(policy, units, kind=Kind.PROMPT_END, past=Past.NEW_TEXT):
    """Reads for the time of a point of so many units of age."""
    return policy.worth(Candidate(point_of(kind, past)), units * UNIT_BYTES)


def observe(policy, units, *, kind=Kind.PROMPT_END, past=Past.NEW_TEXT, was_read, times=1):
    for _ in range(times):
        policy.observe(point_of(kind, past), units * UNIT_BYTES, was_read=was_read)


def middle(age):
    """A number of units well within a range of ages."""
    return 2 ** ((age - 1.5) / AGES_PER_DOUBLING)


# By the definition


def age_of(units):
    """The first range of ages that ends after so many units, or the last one."""
    age = 0
    while age < NUM_AGES - 1 and units >= 2 ** ((age - 1) / AGES_PER_DOUBLING):
        age += 1
    return age


def width_of(age):
    """Length of a range of ages, in arenas."""
    end, start = (2 ** ((each - 1) / AGES_PER_DOUBLING) for each in (age, age - 1))
    return YOUNGEST_SHARE * (end - start if age else end)


def rates_by_definition(observed, waiting):
    """Rates of each class after one time of learning.

    Args:
        observed: Class, units waited, whether it was read then.
        waiting: Class, units waited so far.
    """
    read, lost = ([[0.0] * NUM_AGES for _ in range(NUM_CLASSES)] for _ in range(2))
    for index, units, was_read in observed:
        (read if was_read else lost)[index][age_of(units)] += 1
    for index, units in waiting:
        lost[index][age_of(units)] += 1
    num_all = max(1, len(observed) + len(waiting))
    rates = []
    for index in range(NUM_CLASSES):
        num_own = sum(read[index]) + sum(lost[index])
        common = COMMON_WEIGHT / (COMMON_WEIGHT + num_own) * COMMON_WEIGHT / num_all
        reads, losses = (
            [
                counts[index][age] + common * sum(each[age] for each in counts) + PRIOR
                for age in range(NUM_AGES)
            ]
            for counts in (read, lost)
        )
        rates.append([best_rate(reads, losses, age) for age in range(NUM_AGES)])
    return rates


def best_rate(reads, losses, age):
    """The most reads for the time, of all horizons."""
    best = 0.0
    for horizon in range(age, NUM_AGES):
        num_read = time = 0.0
        for each in range(age, horizon + 1):
            num_read += reads[each]
            for end in range(each, NUM_AGES):
                time += width_of(each) * (reads[end] + losses[end] + PRIOR)
        best = max(best, num_read / time)
    return best


def class_point(index):
    return point_of(Kind(index // len(Past)), Past(index % len(Past)))


@pytest.mark.parametrize("seed", range(8))
def test_rates_are_those_of_the_best_horizon(seed):
    source = random.Random(seed)
    policy = learner()
    classes = source.sample(range(NUM_CLASSES), source.choice([1, 3, NUM_CLASSES]))

    def draw():
        return source.choice(classes), middle(source.choice(range(NUM_AGES)))

    observed = [(*draw(), source.random() < 0.3) for _ in range(source.choice([0, 5, 300]))]
    waiting = sorted((draw() for _ in range(40)), key=lambda each: -each[1])
    now = 5000 * UNIT_BYTES
    for index, units, was_read in observed:
        policy.observe(class_point(index), units * UNIT_BYTES, was_read=was_read)
    points = []
    for index, units in waiting:
        point = class_point(index)
        point.waits_since = now - units * UNIT_BYTES
        points.append(point)

    policy.learn(points, now)

    expected = rates_by_definition(observed, waiting)
    for index in range(NUM_CLASSES):
        found = [
            policy.worth(Candidate(class_point(index)), middle(age) * UNIT_BYTES)
            for age in range(NUM_AGES)
        ]
        assert found == pytest.approx(expected[index])


@pytest.mark.parametrize("seed", range(4))
def test_what_still_waits_counts_as_a_wait_of_its_age_so_far(seed):
    source = random.Random(seed)
    told, seen = learner(), learner()
    now = 1e4 * UNIT_BYTES
    ages = [0.0, 1.0, 2.0, 4096.0, *(2 ** source.uniform(-4, 12) for _ in range(60))]
    points = [point_of(Kind.BRANCH, Past.READ, at=1e4 - units) for units in ages]
    for units in ages:
        observe(told, units, kind=Kind.BRANCH, past=Past.READ, was_read=False)
    for policy in (told, seen):
        observe(policy, 3, kind=Kind.BRANCH, past=Past.READ, was_read=True)

    told.learn([], now)
    seen.learn(sorted(points, key=lambda point: point.waits_since), now)

    for age in range(NUM_AGES):
        units = middle(age)
        kind_and_past = Kind.BRANCH, Past.READ
        assert rate(seen, units, *kind_and_past) == pytest.approx(rate(told, units, *kind_and_past))


def test_ages_are_ranges_of_which_each_is_longer_by_the_same_factor():
    policy = learner()
    edges = [2 ** (exponent / AGES_PER_DOUBLING) for exponent in range(-1, NUM_AGES - 2)]

    assert [policy._age(0.999 * edge * UNIT_BYTES) for edge in edges] == list(range(NUM_AGES - 1))
    assert [policy._age(1.001 * edge * UNIT_BYTES) for edge in edges] == list(range(1, NUM_AGES))
    assert policy._age(0) == 0
    assert policy._age(1e6 * ARENA_BYTES) == NUM_AGES - 1
    # The last one ends where points are forgotten.
    assert edges[-1] * 2 ** (1 / AGES_PER_DOUBLING) * YOUNGEST_SHARE == pytest.approx(
        REMEMBERED_ARENAS
    )


# What follows


def test_where_nothing_was_observed_all_are_read_alike_and_young_ones_rather_than_old():
    policy = learner()
    rates = {
        tuple(rate(policy, middle(age), kind, past) for age in range(NUM_AGES))
        for kind in Kind
        for past in Past
    }

    (only,) = rates
    # The first range is longer than the second, so that a read there takes more time.
    rates = only[1:-2:4]
    assert list(rates) == sorted(rates, reverse=True)
    assert only[1] > only[0] > 10 * only[-1] > 0


def test_in_a_loop_old_points_are_worth_more_than_young_ones():
    # Every text is asked for again after 300 units, and never before.
    policy = learner()
    observe(policy, 300, was_read=True, times=200)
    policy.learn([], 0)

    rates = [rate(policy, units) for units in (1, 10, 100, 250, 290)]
    assert rates == sorted(rates)
    assert rates[-1] > 3 * rates[0]
    # What was not read by then is not read.
    assert rate(policy, 1000) < rates[0]


def test_where_conversations_go_on_young_points_are_worth_more_than_old_ones():
    policy = learner()
    observe(policy, 4, was_read=True, times=200)
    observe(policy, 3000, was_read=False, times=200)
    policy.learn([], 0)

    assert rate(policy, 1) > 20 * rate(policy, 8)


def test_a_class_that_is_read_is_worth_more_than_one_that_is_not():
    policy = learner()
    observe(policy, 50, kind=Kind.BRANCH, was_read=True, times=50)
    observe(policy, 3000, kind=Kind.PROMPT_END, was_read=False, times=50)
    policy.learn([], 0)

    assert rate(policy, 20, Kind.BRANCH) > 5 * rate(policy, 20, Kind.PROMPT_END)
    # Of classes of which nothing is known it is between: as those of all together.
    assert (
        rate(policy, 20, Kind.BRANCH)
        > rate(policy, 20, Kind.ANSWER_END)
        == rate(policy, 20, Kind.PROMPT_END, Past.READ)
        > rate(policy, 20, Kind.PROMPT_END)
    )


def point_read(num_reads, kind=Kind.BRANCH, *, at=0.0):
    point = point_of(kind, Past.READ, at=at)
    point.num_reads = num_reads
    return point


def worth_by_reads(policy, kind=Kind.BRANCH):
    return [policy.worth(Candidate(point_read(n, kind)), 20 * UNIT_BYTES) for n in range(1, 9)]


def test_points_are_told_apart_by_the_number_of_reads():
    # Each text has eight readers, which come after 50 units each. Then it waits in vain.
    policy = learner()
    for _ in range(12):
        for n in range(1, 8):
            policy.observe(point_read(n), 50 * UNIT_BYTES, was_read=True)
        policy.observe(point_read(8), 400 * UNIT_BYTES, was_read=False)
        policy.learn([], 0)

    worths = worth_by_reads(policy)
    assert worths == sorted(worths, reverse=True)
    assert worths[0] > 2 * worths[-1]
    # Each kind of points learns by itself.
    assert len(set(worth_by_reads(policy, Kind.PROMPT_END))) == 1


def test_what_many_read_is_worth_more_if_few_texts_are_read_by_many():
    policy = learner()
    for _ in range(12):
        for n in range(1, 9):
            policy.observe(point_read(n), 50 * UNIT_BYTES, was_read=n > 4)
        policy.learn([], 0)

    worths = worth_by_reads(policy)
    assert worths == sorted(worths)
    assert worths[-1] > 3 * worths[0]


def test_points_that_were_read_often_and_wait_in_vain_lower_the_worth_of_such_points():
    worths = []
    for num_waiting in (0, 30):
        policy = learner()
        for _ in range(6):
            for n in range(1, 9):
                policy.observe(point_read(n), 50 * UNIT_BYTES, was_read=True)
            policy.learn([point_read(8) for _ in range(num_waiting)], 1000 * UNIT_BYTES)
        worth = worth_by_reads(policy)
        worths.append(worth[-1] / worth[0])

    assert worths[1] < worths[0] / 3


def test_points_that_wait_in_vain_lower_their_class_before_they_are_forgotten():
    rates = []
    for num_waiting in (0, 100):
        policy = learner()
        observe(policy, 50, was_read=True, times=20)
        observe(policy, 50, kind=Kind.BRANCH, was_read=True, times=20)
        policy.learn([point_of() for _ in range(num_waiting)], 1000 * UNIT_BYTES)
        rates.append(rate(policy, 20))

    assert rates[1] < rates[0] / 3


def test_what_was_long_ago_counts_less():
    policy = learner()
    observe(policy, 50, was_read=True, times=100)
    policy.learn([], 0)
    at_first = rate(policy, 20)
    for _ in range(200):
        observe(policy, 3000, was_read=False)
        policy.learn([], 0)

    assert rate(policy, 20) < at_first / 20
    assert sum(policy._num_read[Kind.PROMPT_END * len(Past)]) == pytest.approx(
        100 * KEPT_SHARE**201
    )


def test_worth_is_tokens_saved_for_the_bytes():
    policy = learner()
    point = point_of()

    one = policy.worth(Candidate(point, saved_tokens=100, own_bytes=1000), UNIT_BYTES)

    assert policy.worth(Candidate(point, saved_tokens=300, own_bytes=1000), UNIT_BYTES) == (
        pytest.approx(3 * one)
    )
    assert policy.worth(Candidate(point, saved_tokens=100, own_bytes=4000), UNIT_BYTES) == (
        pytest.approx(one / 4)
    )
    assert policy.worth(Candidate(point, saved_tokens=1, own_bytes=0), UNIT_BYTES) > 0


def test_age_is_since_a_point_was_kept_or_read_last():
    policy = learner()
    point = point_of()
    point.last_kept = 90 * UNIT_BYTES

    assert policy.worth(Candidate(point), 91 * UNIT_BYTES) == rate(policy, 1)


def heirs():
    """Points, read often and seldom, and a policy that knows it."""
    policy = learner()
    observe(policy, 50, kind=Kind.BRANCH, was_read=True, times=50)
    observe(policy, 3000, kind=Kind.PROMPT_END, was_read=False, times=50)
    policy.learn([], 0)
    return policy, point_of(Kind.BRANCH), point_of(Kind.PROMPT_END)


def test_a_checkpoint_is_worth_what_those_are_that_it_stands_in_for():
    policy, often, seldom = heirs()
    worth = {
        name: policy.worth(candidate, 20 * UNIT_BYTES)
        for name, candidate in {
            "often": Candidate(often),
            "seldom": Candidate(seldom),
            "seldom for often": Candidate(seldom, heir_of=often),
            "often for seldom": Candidate(often, heir_of=seldom),
        }.items()
    }

    assert worth["often"] > worth["seldom"]
    assert worth["seldom for often"] == worth["often for seldom"] == worth["often"]


def test_an_heir_stands_in_for_the_point_that_is_read_most():
    policy, often, seldom = heirs()
    other = point_of(Kind.PROMPT_END)
    now = 20 * UNIT_BYTES

    assert policy.heir_of(Candidate(often), Candidate(seldom), now) is often
    assert policy.heir_of(Candidate(seldom), Candidate(other, heir_of=often), now) is often
    assert policy.heir_of(Candidate(seldom, heir_of=often), Candidate(other), now) is often
    assert policy.heir_of(Candidate(seldom), Candidate(often), now) is seldom


# The other policy, and all by name


def test_least_recently_used_is_worth_by_the_time_of_its_last_use_alone():
    policy = LeastRecentlyUsed()
    policy.begin(arena_bytes=ARENA_BYTES)
    old, young = point_of(Kind.BRANCH, Past.READ, at=1), point_of(at=2)

    assert policy.worth(Candidate(old, saved_tokens=9999), 9e9) < policy.worth(
        Candidate(young, own_bytes=9999), 9e9
    )
    assert policy.heir_of(Candidate(old), Candidate(young), 9e9) is None
    policy.observe(old, 1, was_read=True)
    policy.learn([old], 1)


def test_policies_go_by_name():
    assert isinstance(EVICTION_POLICIES[DEFAULT_POLICY](), LearnedReuse)
    assert isinstance(EVICTION_POLICIES["lru"](), LeastRecentlyUsed)
