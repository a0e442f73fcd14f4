"""Layers with token budgets in the real engine, against dense models that choose as they do."""

import pytest
import torch

from perf.sweeps.dense_budgets import kept_tokens, num_kept_tokens
from tests.vllm_plugin.attention.dense_budgets import dense_answers
from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON"}
FIXED = {"recent_tokens": 8, "sink_tokens": 2, "pool_tokens": 3}
# Below every budget, just above one, beyond all, longer than three steps of 64 tokens.
PROMPTS = prompts_of_lengths((20, 50, 70, 150, 201), seed=41)
# A budget of tokens that cuts prompts anywhere, the fewer tokens the more others decode.
CUTS = {"max_num_batched_tokens": 37, "max_num_seqs": 3}
LLAMA = FIXED | {"layers": [64, None, 32]}
SMALL_ARENA_BYTES = 1 << 20
"""Room for one request of the greatest length, and for little more."""
GROWING = LLAMA | {"output_tokens": 20}
# With 80 tokens of output, layers choose again at 20, 40 and 60 of them.
GROWING_PROMPTS = prompts_of_lengths((9, 20, 50, 70, 150), seed=43)
GEMMA = FIXED | {"layers": [None, None, 48, None, None, None, 32]}


def with_budgets(budgets, **options):
    return JENGA | {"hf_overrides": {"kv_token_budgets": budgets}} | options


@pytest.fixture(scope="session")
def llama(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="session")
def gemma3(tiny_model):
    return tiny_model("gemma3")


def test_an_engine_keeps_what_a_dense_model_chooses(llama, run_engine):
    ours = run_engine(
        llama,
        PROMPTS,
        max_tokens=24,
        options=with_budgets(LLAMA, **CUTS),
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    expected = dense_answers(llama, LLAMA, ours)
    assert_same_generation(ours, expected)
    assert ours["request_tokens"] == {}
    # Full attention answers only the prompt within all budgets in the same way.
    full = dense_answers(llama, LLAMA | {"layers": [None] * 3}, ours)
    pairs = zip(expected["outputs"], full["outputs"], strict=True)
    is_same = [one["logprobs"] == other["logprobs"] for one, other in pairs]
    assert is_same == [True, False, False, False, False]


@pytest.mark.slow
def test_budgets_above_every_prompt_change_no_token(llama, run_engine):
    above = FIXED | {"layers": [256, 256, 256]}

    ours = run_engine(
        llama, PROMPTS, max_tokens=24, options=with_budgets(above, **CUTS), by_references=True
    )
    full = run_engine(llama, PROMPTS, max_tokens=24, options=JENGA | CUTS, by_references=True)

    assert_same_generation(ours, full, tolerance=1e-5)


@pytest.mark.slow
def test_windows_beside_budgets_keep_what_a_dense_model_chooses(gemma3, run_engine):
    ours = run_engine(
        gemma3,
        PROMPTS,
        max_tokens=24,
        options=with_budgets(GEMMA, **CUTS),
        fill_arena=True,
        by_references=True,
    )

    assert_same_generation(ours, dense_answers(gemma3, GEMMA, ours))


@pytest.mark.slow
def test_an_arena_that_always_preempts_loses_nothing(llama, run_engine):
    prompts = prompts_over_shared_prefixes(16, seed=32, prefix_tokens=(20, 48, 130))

    ours = run_engine(
        llama,
        prompts,
        max_tokens=40,
        options=with_budgets(
            LLAMA,
            max_num_batched_tokens=37,
            max_num_seqs=4,
            kv_cache_memory_bytes=SMALL_ARENA_BYTES,
            enable_prefix_caching=True,
        ),
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, dense_answers(llama, LLAMA, ours))
    assert ours["preemptions"] > 0
    assert ours["request_tokens"] == {}


@pytest.mark.slow
def test_the_dense_model_without_budgets_is_the_model(llama, run_engine):
    none = FIXED | {"layers": [None] * 3}

    full = run_engine(llama, PROMPTS, max_tokens=24, options=JENGA | CUTS, by_references=True)

    assert_same_generation(full, dense_answers(llama, none, full))


@pytest.mark.slow
def test_an_engine_chooses_again_what_a_dense_model_chooses(llama, run_engine):
    ours = run_engine(
        llama,
        GROWING_PROMPTS,
        max_tokens=80,
        options=with_budgets(GROWING, **CUTS),
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    expected = dense_answers(llama, GROWING, ours)
    assert_same_generation(ours, expected)
    assert ours["request_tokens"] == {}
    # No answer is that of layers which choose once, and none that of full attention.
    for other in (LLAMA, GROWING | {"layers": [None] * 3}):
        answers = dense_answers(llama, other, ours)
        pairs = zip(expected["outputs"], answers["outputs"], strict=True)
        assert not any(one["logprobs"] == two["logprobs"] for one, two in pairs)


@pytest.mark.slow
def test_kernels_add_up_the_weights_of_several_steps(llama, run_engine):
    ours = run_engine(
        llama, GROWING_PROMPTS[1:4], max_tokens=64, options=with_budgets(GROWING, **CUTS)
    )

    assert_same_generation(ours, dense_answers(llama, GROWING, ours))


@pytest.mark.slow
def test_windows_beside_budgets_choose_again_what_a_dense_model_chooses(gemma3, run_engine):
    growing = GEMMA | {"output_tokens": 20}

    ours = run_engine(
        gemma3,
        GROWING_PROMPTS,
        max_tokens=80,
        options=with_budgets(growing, **CUTS),
        fill_arena=True,
        by_references=True,
    )

    assert_same_generation(ours, dense_answers(gemma3, growing, ours))


@pytest.mark.slow
def test_budgets_that_no_output_outgrows_change_no_token(llama, run_engine):
    above = FIXED | {"layers": [256, 256, 256], "output_tokens": 20}

    ours = run_engine(
        llama,
        GROWING_PROMPTS,
        max_tokens=80,
        options=with_budgets(above, **CUTS),
        by_references=True,
    )
    full = run_engine(
        llama, GROWING_PROMPTS, max_tokens=80, options=JENGA | CUTS, by_references=True
    )

    assert_same_generation(ours, full, tolerance=1e-5)


@pytest.mark.slow
def test_preempted_requests_choose_again_what_they_chose(llama, run_engine):
    prompts = prompts_over_shared_prefixes(12, seed=32, prefix_tokens=(20, 48, 130))

    ours = run_engine(
        llama,
        prompts,
        max_tokens=70,
        options=with_budgets(
            GROWING,
            max_num_batched_tokens=37,
            max_num_seqs=6,
            kv_cache_memory_bytes=SMALL_ARENA_BYTES,
            enable_prefix_caching=True,
        ),
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, dense_answers(llama, GROWING, ours))
    assert ours["preemptions"] > 0
    assert ours["request_tokens"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("budgets", [LLAMA, GROWING], ids=["once", "again"])
def test_the_second_model_runner_keeps_what_a_dense_model_chooses(budgets, llama, run_engine):
    ours = run_engine(
        llama,
        prompts_of_lengths((20, 80, 70, 75), seed=43, shared_tokens=16),
        max_tokens=45,
        options=with_budgets(
            budgets,
            max_model_len=128,
            max_num_batched_tokens=37,
            max_num_seqs=4,
            kv_cache_memory_bytes=SMALL_ARENA_BYTES // 2,
            enable_prefix_caching=True,
        ),
        environment={V2_RUNNER: "1", "VLLM_LOGGING_LEVEL": "INFO"},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, dense_answers(llama, budgets, ours))
    assert "Using V2 Model Runner" in ours["log"]
    assert ours["preemptions"] > 0
    assert ours["request_tokens"] == {}


def test_dense_choice_is_worked_out_by_hand():
    weights = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.0, 0.25, 0.0, 0.45], [0.0] * 8])

    kept = kept_tokens(weights, 5, recent_tokens=1, sink_tokens=0, pool_tokens=3)

    assert kept == [1, 2, 3, 4, 7]
    assert [num_kept_tokens(tokens, 32) for tokens in (20, 32, 33, 48, 100)] == [20, 32, 17, 32, 20]
