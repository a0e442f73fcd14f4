"""A step's work for layers with token budgets, against the policy of one request."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jenga.errors import InvariantError
from jenga.policies import RequestFacts
from jenga.policies.token_budget import TokenBudgetPolicy, next_choice

pytestmark = pytest.mark.vllm

RECENT_TOKENS = 8


def spec_of(budget_tokens, output_tokens):
    from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec

    return TokenBudgetSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.float32,
        budget_tokens=budget_tokens,
        recent_tokens=RECENT_TOKENS,
        sink_tokens=2,
        pool_tokens=3,
        output_tokens=output_tokens,
    )


def rows_of(steps, spec):
    """Get the rows of steps (prompt tokens, tokens before, tokens after)."""
    from jenga.vllm_plugin.layers.attention.budget_steps import rows_of_step

    prompts, starts, ends = np.array(steps).T
    common = SimpleNamespace(
        num_reqs=len(steps) + 2,
        seq_lens_cpu_upper_bound=torch.tensor([*ends, 0, 0], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, *np.cumsum(ends - starts)], dtype=torch.int32),
    )
    return rows_of_step(common, prompts, spec)


@pytest.mark.parametrize("output_tokens", [8, 20, 33])
@pytest.mark.parametrize("budget_tokens", [32, 64])
def test_rows_follow_the_policy(budget_tokens, output_tokens):
    source = random.Random(7)
    policy = TokenBudgetPolicy(lambda n: min(n, budget_tokens), 16, output_tokens)
    steps = []
    for _ in range(400):
        prompt, begin = source.randrange(1, 120), source.randrange(200)
        choice = next_choice(prompt, begin, output_tokens)
        end = source.choice([begin + 1, choice, source.randint(begin + 1, choice)])
        steps.append((prompt, begin, end))

    rows = rows_of(steps, spec_of(budget_tokens, output_tokens))

    for index, (prompt, begin, end) in enumerate(steps):
        facts, choice = (
            RequestFacts(prompt_tokens=prompt),
            next_choice(prompt, begin, output_tokens),
        )
        dropped = policy.update_last_access(facts, begin, end).start
        dropped_then = policy.update_last_access(facts, choice, choice).start
        choosing = range(choice - RECENT_TOKENS, choice) if dropped_then > dropped else range(0)
        is_continued = begin > choosing.start and end > choosing.start and len(choosing)
        assert rows.num_dropped[index] == dropped
        assert rows.num_held[index] == end - dropped
        assert rows.num_queries[index] == len({*choosing} & {*range(begin, end)})
        assert rows.num_earlier[index] == (begin - dropped if is_continued else 0)
        assert rows.num_kept[index] == (end - dropped_then if choosing and end == choice else 0)


def test_steps_of_prompts_without_words_must_have_all_queries_that_choose():
    spec = spec_of(32, None)

    whole = rows_of([(60, 52, 60), (60, 60, 61), (30, 29, 30)], spec)

    assert whole.num_queries.tolist() == [RECENT_TOKENS, 0, 0]
    assert whole.num_kept.tolist() == [28, 0, 0]
    with pytest.raises(InvariantError, match="lack some of the 8 queries that choose"):
        rows_of([(60, 53, 60)], spec)


def test_weights_of_single_steps_add_up_to_those_of_one():
    from jenga.vllm_plugin.layers.attention.budget_steps import scorings
    from jenga.vllm_plugin.layers.attention.token_budgets import _add_up

    spec, page_table = spec_of(32, 20), torch.tensor([[3, 1, 4, 2], [5, 6, 7, 8]]).int()
    words = torch.full((9, 16, 2), torch.nan)
    weights = torch.rand((8, 2, 2, 64), generator=torch.Generator().manual_seed(5))
    sums = torch.zeros(2, 2, 64)
    # The first request chooses at 50 tokens, the second at 58, each by its 8 last queries. The
    # second one has dropped a page before.
    for number, end in enumerate(range(43, 51)):
        rows = rows_of([(30, end - 1, end), (38, end + 7, end + 8)], spec)
        (scoring,) = scorings(page_table, rows, 16, torch.device("cpu"))
        scores = weights[number, :, :, : scoring.max_tokens].clone()
        for row, num_held in enumerate(rows.num_held):
            scores[row, :, num_held:] = 0
        sums[:, :, : scoring.max_tokens] += scores
        _add_up(scores, words, scoring.sums)

    assert scoring.packing.rows is None
    assert scoring.packing.num_kept.tolist() == [18, 26]
    assert torch.allclose(scores, sums[:, :, : scoring.max_tokens])
    assert words[[3, 1, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_slot_has_a_word_beside_the_key_and_value_of_each_head(dtype):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from jenga.vllm_plugin.layers.cache_views import split_pages
    from jenga.vllm_plugin.specs.token_budgets import LayerBudget, budget_spec

    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=dtype)
    fields = {"tokens": 64, "recent_tokens": 8, "sink_tokens": 2, "pool_tokens": 3}
    once, again = (
        budget_spec(full, LayerBudget(**fields, output_tokens=number)) for number in (None, 20)
    )
    assert once.page_size_bytes == full.page_size_bytes
    assert again.page_size_bytes == full.page_size_bytes + 16 * 2 * 4

    # Two layers lie in a page, as in the arena.
    elements = again.state_content_size_bytes // dtype.itemsize
    layer = torch.zeros(3, 2, 2, 16, elements, dtype=dtype)[:, 1]
    rows, (words,) = split_pages(layer, num_words=1)
    rows.fill_(1)
    words.fill_(2)

    assert rows.shape == (3, 16, 2, 128)
    assert words.shape == (3, 16, 2)
    assert (rows == 1).all()
    assert layer.ne(0).sum() == rows.numel() + words.numel()
