"""Factors of the rate by the number of reads: by the likelihood, and what follows from them."""

import random
from math import exp, log

import pytest

from jenga.eviction.read_trend import MOST_EXPONENT, MOST_READS, PRIOR_SPREAD, ReadTrend


def trend_of(observed):
    trend = ReadTrend()
    for num_reads, expected, was_read in observed:
        trend.observe(num_reads, expected, was_read=was_read)
    return trend


def drawn(source, num=60):
    return [
        (source.randint(1, MOST_READS), source.uniform(0.1, 2), source.random() < 0.5)
        for _ in range(num)
    ]


def log_likelihood(slope, mean, observed):
    """Of reads at rates that are multiplied by exp(slope * (n - mean)), apart from a constant.

    The prior lets slopes near zero be more likely.
    """
    total = -PRIOR_SPREAD * slope**2 / 2
    for num_reads, expected, was_read in observed:
        exponent = slope * (num_reads - mean)
        total += exponent * was_read - expected * exp(exponent)
    return total


@pytest.mark.parametrize("seed", range(8))
def test_factors_are_one_step_of_newton_s_method_from_no_trend(seed):
    source = random.Random(seed)
    observed, lasting = drawn(source), [(n, e, False) for n, e, _ in drawn(source, 20)]
    trend = trend_of(observed)

    trend.learn(trend_of(lasting))

    both = observed + lasting
    mean = sum(n * e for n, e, _ in both) / sum(e for _, e, _ in both)
    tiny = 1e-3
    low, middle, high = (log_likelihood(slope, mean, both) for slope in (-tiny, 0, tiny))
    slope = (high - low) / (2 * tiny) / -((high - 2 * middle + low) / tiny**2)
    for n in range(1, MOST_READS + 1):
        assert log(trend.factor(n)) == pytest.approx(slope * (n - mean), rel=1e-3, abs=1e-4)


def test_where_nothing_was_observed_all_factors_are_one():
    trend = ReadTrend()
    trend.learn(ReadTrend())

    assert {trend.factor(n) for n in range(40)} == {1.0}


def test_points_without_reads_have_no_factor():
    trend = trend_of(drawn(random.Random(1)))
    trend.learn(ReadTrend())

    assert trend.factor(0) == 1.0
    assert trend.factor(1) != 1.0


def test_where_what_was_read_often_is_read_again_the_factor_grows():
    trend = trend_of([(n, 1.0, n > 4) for n in range(1, 9)])
    trend.learn(ReadTrend())

    factors = [trend.factor(n) for n in range(1, 9)]
    assert factors == sorted(factors)
    assert factors[0] < 0.6
    assert factors[-1] > 1.5


def test_where_what_was_read_often_has_had_its_readers_the_factor_falls():
    trend = trend_of([(n, 1.0, n < 5) for n in range(1, 9)])
    trend.learn(trend_of([(8, 1.0, False)] * 4))

    factors = [trend.factor(n) for n in range(1, 9)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 1.5
    assert factors[-1] < 0.75


def test_if_all_were_read_equally_often_there_is_no_trend():
    trend = trend_of([(3, 1.0, True)] * 10)
    trend.learn(ReadTrend())

    assert trend.factor(3) == trend.factor(9) == 1.0


def test_points_are_not_told_apart_from_some_number_of_reads_on():
    many, more = (trend_of([(1, 1.0, False), (n, 1.0, True)]) for n in (MOST_READS, 1000))
    for trend in (many, more):
        trend.learn(ReadTrend())

    assert more.factor(5) == many.factor(5)
    assert many.factor(MOST_READS) == many.factor(10**6)


def test_factors_have_bounds():
    # A thousand reads where none were to be expected.
    trend = trend_of([(1, 1e-3, False), *[(16, 1e-3, True)] * 1000])
    trend.learn(ReadTrend())

    assert trend.factor(16) <= exp(MOST_EXPONENT)
    assert trend.factor(1) >= exp(-MOST_EXPONENT)


def test_old_observations_fade():
    trend = trend_of([(n, 1.0, n > 4) for n in range(1, 9)])
    for _ in range(50):
        trend.fade(0.5)
    for n in range(1, 9):
        trend.observe(n, 1.0, was_read=n < 5)
    trend.learn(ReadTrend())

    assert trend.factor(1) > 1 > trend.factor(8)


def test_waits_that_last_count_only_once():
    trend = trend_of([(n, 1.0, n > 4) for n in range(1, 9)])
    trend.learn(ReadTrend())
    before = trend.factor(8)
    trend.learn(trend_of([(8, 5.0, False)] * 9))
    assert trend.factor(8) < before

    trend.learn(ReadTrend())

    assert trend.factor(8) == before
