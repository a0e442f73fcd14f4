"""Token budgets: the prompt shrinks to its budget once it is processed."""

from jenga.policies import NEVER, Grain, RequestFacts
from jenga.spec import Layer, TokenBudget

SPEC = TokenBudget(
    name="budget",
    layers=(Layer(name="0", slot_bytes=1),),
    mean_budget_tokens=32,
    recent_tokens=8,
    steepness=4,
    layer_index=1,
    num_layers=3,
)
POLICY = SPEC.policy(16)
LONG = RequestFacts(prompt_tokens=100)
SHORT = RequestFacts(prompt_tokens=30)
GRAIN = Grain(page_slots=16, hash_tokens=16)


def test_a_long_prompt_shrinks_to_its_budget_when_it_is_processed():
    budget = SPEC.budget_tokens(100)
    assert budget == 32

    # 68 tokens are too many, and 5 pages of 16 are dropped for them.
    assert POLICY.update_last_access(LONG, 0, 100) == range(100)
    assert POLICY.update_last_access(LONG, 64, 100) == range(100)
    assert POLICY.update_last_access(LONG, 100, 101) == range(80, 101)
    assert POLICY.next_release(LONG, 64, 16) == 100
    assert POLICY.next_release(LONG, 100, 16) == NEVER
    assert POLICY.max_tokens(LONG, 100, 112) == 112


def test_a_step_may_hold_the_prompt_and_the_tokens_after_it():
    assert POLICY.peak_slots(LONG, 60, 16) == 60
    assert POLICY.peak_slots(LONG, 100, 16) == 100
    assert POLICY.peak_slots(LONG, 110, 16) == 110
    assert POLICY.peak_slots(LONG, 200, 16) == 120
    assert POLICY.peak_slots(LONG, 1000, 16) == 920


def test_pages_of_a_request_hold_no_more_than_its_budget():
    for prompt_tokens in range(33, 200):
        facts = RequestFacts(prompt_tokens=prompt_tokens)
        kept = POLICY.update_last_access(facts, prompt_tokens, prompt_tokens)

        assert kept.start % 16 == 0
        assert SPEC.budget_tokens(prompt_tokens) - 16 < len(kept)
        assert len(kept) <= SPEC.budget_tokens(prompt_tokens)


def test_pages_that_will_be_written_over_are_neither_kept_nor_taken():
    assert POLICY.final_pages(LONG, 100, GRAIN) == 0
    assert POLICY.get_possible_prefix(LONG, [1] * 6, GRAIN, 96) == 0


def test_a_prompt_within_the_budget_is_cached_as_full_attention():
    assert POLICY.final_pages(SHORT, 30, GRAIN) == 1
    assert POLICY.get_possible_prefix(SHORT, [1, None], GRAIN, 29) == 16
    assert POLICY.update_last_access(SHORT, 30, 40) == range(40)
