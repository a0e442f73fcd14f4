"""Token budgets: the prompt shrinks to its budget once it is processed, and later outputs too."""

import pytest

from jenga.policies import NEVER, Grain, RequestFacts
from jenga.policies.token_budget import last_choice, next_choice
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
GROWING = TokenBudget(
    name="budget",
    layers=(Layer(name="0", slot_bytes=1),),
    mean_budget_tokens=32,
    recent_tokens=8,
    steepness=1,
    layer_index=0,
    num_layers=1,
    output_tokens=20,
).policy(16)
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


def test_choices_come_at_the_end_of_the_prompt_and_after_each_interval():
    at = [(last_choice(30, n, 20), next_choice(30, n, 20)) for n in (0, 29, 30, 49, 50, 95)]

    assert at == [(0, 30), (0, 30), (30, 50), (30, 50), (50, 70), (90, 110)]
    assert (last_choice(30, 95, None), next_choice(30, 95, None)) == (30, NEVER)


def test_a_short_prompt_shrinks_when_its_output_has_outgrown_the_budget():
    # Choices at 30, 50 and 70 tokens: 18 and 38 are too many, 2 and 3 pages of 16.
    assert GROWING.update_last_access(SHORT, 49, 50) == range(50)
    assert GROWING.update_last_access(SHORT, 50, 51) == range(32, 51)
    assert GROWING.update_last_access(SHORT, 69, 70) == range(32, 70)
    assert GROWING.update_last_access(SHORT, 70, 71) == range(48, 71)
    assert [GROWING.next_release(SHORT, n, 16) for n in (0, 30, 49, 50)] == [30, 50, 50, 70]


def test_a_long_prompt_shrinks_at_its_end_and_again():
    assert GROWING.update_last_access(LONG, 99, 100) == range(100)
    assert GROWING.update_last_access(LONG, 100, 101) == range(80, 101)
    assert GROWING.update_last_access(LONG, 120, 121) == range(96, 121)


@pytest.mark.parametrize("prompt_tokens", [1, 20, 32, 33, 60])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 40])
def test_outputs_hold_the_budget_and_an_interval_at_most(prompt_tokens, chunk_tokens):
    facts = RequestFacts(prompt_tokens=prompt_tokens)
    for num_tokens in range(1, 200):
        peak = GROWING.peak_slots(facts, num_tokens, chunk_tokens)
        steps = [(start, min(start + chunk_tokens, num_tokens)) for start in range(num_tokens)]
        most = max(len(GROWING.update_last_access(facts, *step)) for step in steps)

        assert most <= peak
        assert peak <= max(prompt_tokens, 32 + 20) + chunk_tokens - 1


def test_a_request_that_may_outgrow_the_budget_is_never_cached():
    for facts in (SHORT, LONG):
        assert GROWING.final_pages(facts, 30, GRAIN) == 0
        assert GROWING.get_possible_prefix(facts, [1, 1], GRAIN, 29) == 0
