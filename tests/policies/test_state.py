"""States: one slot, and hits only where one was kept."""

from jenga.policies import NEVER, Grain, RequestFacts
from jenga.policies.state import StatePolicy

FACTS = RequestFacts(prompt_tokens=64)
GRAIN = Grain(page_slots=1, hash_tokens=16)


def test_a_state_takes_one_slot_whatever_the_length():
    policy = StatePolicy()

    assert policy.update_last_access(FACTS, 0, 1) == policy.update_last_access(FACTS, 900, 1000)
    assert policy.max_tokens(FACTS, 0, 1) == NEVER
    assert policy.max_tokens(FACTS, 0, 0) == 0
    assert policy.final_pages(FACTS, 1000, GRAIN) == 0


def test_a_state_takes_a_slot_more_for_each_token_that_may_be_rejected():
    policy = StatePolicy(num_slots=4)

    assert policy.update_last_access(FACTS, 900, 1000) == range(4)
    assert policy.peak_slots(FACTS, 1000, 16) == 4
    assert policy.max_tokens(FACTS, 0, 4) == NEVER
    assert policy.max_tokens(FACTS, 0, 3) == 0


def test_a_state_is_hit_only_where_one_was_kept():
    policy = StatePolicy()
    is_hit = [None, 7, None, 9, None]

    assert policy.get_possible_prefix(FACTS, is_hit, GRAIN, 80) == 64
    assert policy.get_possible_prefix(FACTS, is_hit, GRAIN, 63) == 32
    assert policy.get_possible_prefix(FACTS, is_hit, GRAIN, 31) == 0
    assert list(policy.reused_pages(FACTS, is_hit, GRAIN, 64)) == [3]
    assert list(policy.reused_pages(FACTS, is_hit, GRAIN, 0)) == []
