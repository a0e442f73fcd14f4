"""Speculative decoding with recurrent layers: rejected tokens leave no trace in a state."""

import pytest

from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation, tokens_lost_to_a_head
from tests.vllm_plugin.drafts.test_speculation import (
    MAX_TOKENS,
    MTP,
    PROMPTS,
    by_draft,
    check_drafts,
    run_ours,
)
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

# A budget that cuts prompts anywhere, and does not reach all who decode with drafted tokens.
CUTS = {"max_num_batched_tokens": 37, "max_num_seqs": 4}

# A state after each drafted token, as in layers that keep no history beside a state.
NO_HISTORIES = {"JENGA_HISTORY_TOKENS": "0"}

histories = pytest.mark.parametrize(
    "environment", [{}, NO_HISTORIES], ids=["histories", "no histories"]
)


@pytest.mark.slow
@histories
def test_a_draft_changes_no_token_of_a_hybrid_also_after_a_prefix_hit(
    environment, tiny_model, run_engine
):
    model, draft = tiny_model("granite_calm"), tiny_model("granite_echo")

    plain = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS, options=CUTS)
    ours = run_ours(
        run_engine,
        model,
        PROMPTS + PROMPTS,
        rounds=2,
        options=CUTS | by_draft(draft) | {"enable_prefix_caching": True},
        environment=environment,
    )

    assert_same_generation(ours, plain | {"outputs": plain["outputs"] * 2})
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("jamba", {}),
        ("lfm2", {}),
        ("qwen3_next", {}),
        pytest.param("qwen3_next", NO_HISTORIES, id="qwen3_next without histories"),
    ],
)
def test_a_draft_changes_no_token_of_states_of_other_kinds(
    name, environment, tiny_model, run_engine
):
    model, draft = tiny_model(f"{name}_calm"), tiny_model(f"{name}_echo")
    options = CUTS | {"enable_prefix_caching": True}
    twice = PROMPTS + PROMPTS

    plain = run_engine(
        model, PROMPTS, max_tokens=MAX_TOKENS, options=options, script="reference_process.py"
    )
    ours = run_ours(
        run_engine,
        model,
        twice,
        rounds=2,
        options=options | by_draft(draft, 4),
        environment=environment,
    )

    assert_same_generation(ours, plain | {"outputs": plain["outputs"] * 2})
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_drafting_hybrids_are_preempted_in_a_small_arena_and_lose_nothing(
    caching, tiny_model, run_engine
):
    model, draft = tiny_model("granite_calm"), tiny_model("granite_echo")
    prompts = prompts_of_lengths((40, 50, 45, 55, 35, 60), seed=5)
    options = CUTS | {"max_num_seqs": 6}
    small = {"enable_prefix_caching": caching, "kv_cache_memory_bytes": 16 << 18}

    plain = run_engine(model, prompts, max_tokens=180, options=options)
    ours = run_ours(
        run_engine,
        model,
        prompts,
        max_tokens=180,
        options=options | by_draft(draft) | small,
        environment=NO_HISTORIES,
    )

    assert_same_generation(ours, plain)
    assert ours["preemptions"] > 0
    check_drafts(ours)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"], ids=["first_runner", "second_runner"])
@pytest.mark.parametrize("name", ["nemotron_h_mtp", "qwen3_next_mtp", "qwen3_5_mtp"])
def test_a_layer_that_predicts_further_tokens_of_a_hybrid_changes_no_token(
    name, runner, tiny_model, run_engine
):
    model, twice = tiny_model(name), PROMPTS + PROMPTS
    options = CUTS | {"enable_prefix_caching": True}
    job = {"reads_images": name.startswith("qwen3_5")}  # as vLLM's module of it does

    plain = run_engine(
        model, PROMPTS, max_tokens=MAX_TOKENS, options=options, script="reference_process.py", **job
    )
    ours = run_ours(
        run_engine,
        model,
        twice,
        rounds=2,
        options=options | MTP,
        environment={V2_RUNNER: runner},
        **job,
    )

    assert_same_generation(ours, plain | {"outputs": plain["outputs"] * 2})
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    lost = tokens_lost_to_a_head()
    assert hits == [max(0, (len(prompt) - 1) // 16 * 16 - lost) for prompt in PROMPTS]
