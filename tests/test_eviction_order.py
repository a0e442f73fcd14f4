import pytest

from jenga.eviction_order import (
    EVICTION_ORDERS,
    CostAware,
    LeastRecentlyUsed,
    LeastWanted,
    Leaving,
    Prospect,
    ProtectedPrefixes,
)
from tests.machines.geometries import HYBRID, full, geometry, sliding


def rank(order, *, step, prospect=Prospect.ENDED, tokens=64):
    return order.ranks(Leaving(step, prospect, [tokens]))[0]


def tried(order, *, lifetime_steps):
    """The order after pages were evicted that had stayed so long."""
    order.begin(HYBRID)
    order.evicted(rank(order, step=1000), 1000 + lifetime_steps)
    return order


@pytest.mark.parametrize("name", EVICTION_ORDERS)
def test_pages_touched_together_go_from_the_longest_prefix_on(name):
    order = EVICTION_ORDERS[name]()
    order.begin(HYBRID)

    as_range = order.ranks(Leaving(7, Prospect.ENDED, range(16, 80, 16)))
    as_list = order.ranks(Leaving(7, Prospect.ENDED, [16, 32, 48, 64]))

    assert list(as_range) == list(as_list) == sorted(as_list, reverse=True)
    assert isinstance(as_range, range)


@pytest.mark.parametrize("name", EVICTION_ORDERS)
@pytest.mark.parametrize("prospect", Prospect)
def test_pages_of_equal_prospect_go_in_the_order_of_their_last_use(name, prospect):
    order = EVICTION_ORDERS[name]()
    order.begin(HYBRID)

    older, younger = (rank(order, step=step, prospect=prospect) for step in (7, 8))

    assert 0 <= older < younger


def test_least_recently_used_knows_no_prospects():
    order = LeastRecentlyUsed()

    assert len({rank(order, step=3, prospect=prospect) for prospect in Prospect}) == 1


@pytest.mark.parametrize("name", sorted(set(EVICTION_ORDERS) - {"lru"}))
def test_what_windows_passed_goes_before_any_whole_prefix_however_old(name):
    order = EVICTION_ORDERS[name]()
    order.begin(HYBRID)

    passed = rank(order, step=900, prospect=Prospect.PASSED)
    near = rank(order, step=800, prospect=Prospect.NEAR)
    ended = rank(order, step=1, prospect=Prospect.ENDED, tokens=9000)
    branched = rank(order, step=2, prospect=Prospect.BRANCHED)
    held = rank(order, step=1, prospect=Prospect.HELD)

    assert passed < near < ended < branched < held


def test_protected_prefixes_stay_some_lifetimes_longer_than_ends():
    order = tried(ProtectedPrefixes(lifetimes=2), lifetime_steps=50)

    shared = rank(order, step=100, prospect=Prospect.BRANCHED)

    assert rank(order, step=199) < shared < rank(order, step=201)


def test_protected_prefixes_are_not_protected_before_anything_was_evicted():
    order = ProtectedPrefixes()

    assert rank(order, step=5, prospect=Prospect.BRANCHED) < rank(order, step=6)


def test_cost_aware_order_keeps_long_prefixes_longer_where_states_take_bytes():
    order = tried(CostAware(lifetimes=1), lifetime_steps=1000)

    short, long = (rank(order, step=10, tokens=tokens) for tokens in (16, 16_000))

    assert short < long


def test_cost_aware_order_is_as_the_least_wanted_where_all_bytes_are_of_tokens():
    geometry_of_tokens = geometry("tokens", full())
    order = CostAware()
    order.begin(geometry_of_tokens)
    order.evicted(rank(order, step=1000), 1400)

    # Everything is as much later, so the order is the same.
    gap = rank(order, step=10) - rank(LeastWanted(), step=10)

    assert gap == rank(order, step=20, tokens=64) - rank(LeastWanted(), step=20, tokens=64) > 0


def test_cost_aware_order_counts_a_window_as_bytes_that_do_not_grow():
    order = CostAware()
    order.begin(geometry("windowed", full(slot_bytes=48, per_large=2), sliding(slot_bytes=96)))
    order.evicted(rank(order, step=1000), 2000)

    assert rank(order, step=10, tokens=8) < rank(order, step=10, tokens=4000)
