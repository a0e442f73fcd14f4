"""Speculative decoding over latents (MLA) in the real engine; see `test_speculation`.

Stock vLLM is the reference without drafts: with them its backend for latents on a CPU, which
decodes single tokens, comes to no end.
"""

import pytest

from tests.vllm_plugin.conftest import (
    ROUNDED_TOLERANCE,
    V2_RUNNER,
    assert_same_generation,
    tokens_lost_to_a_head,
)
from tests.vllm_plugin.drafts.test_speculation import (
    JENGA,
    MTP,
    PROMPTS,
    by_draft,
    by_ngrams,
    check_drafts,
    run_ours,
)
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

TWO = [PROMPTS[1], PROMPTS[3]]  # the longer of three chunks, on a context that is not absorbed
MAX_TOKENS = 16


def run_twice(run_engine, model, options, *, plain=None, **job):
    """Run ours on two prompts and, with prefix caching, on both again; check what it generates."""
    plain = run_engine(model, TWO, max_tokens=MAX_TOKENS, options=plain or {})
    assert "error" not in plain, plain["error"][-4000:]
    options = options | {"enable_prefix_caching": True}
    ours = run_ours(
        run_engine, model, TWO * 2, rounds=2, max_tokens=MAX_TOKENS, options=options, **job
    )
    assert_same_generation(ours, plain | {"outputs": plain["outputs"] * 2})
    assert ours["drafts"][:2] == ours["drafts"][2:]
    return ours


def hits_of(ours):
    return [output["cached_tokens"] for output in ours["outputs"][len(TWO) :]]


@pytest.mark.slow
def test_a_layer_that_predicts_further_tokens_changes_no_token(tiny_model, run_engine):
    model = tiny_model("deepseek_v3_mtp")

    # Stock vLLM has no rows of this width.
    ours = run_twice(run_engine, model, MTP, plain={"attention_backend": "JENGA_TRITON"})

    check_drafts(ours)
    assert all(accepted > drafted / 3 for drafted, accepted in ours["drafts"])
    lost = tokens_lost_to_a_head()
    assert hits_of(ours) == [(len(prompt) - 1) // 16 * 16 - lost for prompt in TWO]


@pytest.mark.slow
def test_ngrams_change_no_token(tiny_model, run_engine):
    model, prompts = tiny_model("deepseek_v2_calm"), [PROMPTS[0] * 4, PROMPTS[2]]

    plain = run_engine(model, prompts, max_tokens=40)
    ours = run_ours(run_engine, model, prompts, max_tokens=40, options=by_ngrams())

    assert_same_generation(ours, plain)
    check_drafts(ours)


@pytest.mark.slow
def test_a_draft_model_of_plain_attention_changes_no_token(tiny_model, run_engine):
    options = by_draft(tiny_model("llama_calmer"))

    ours = run_twice(run_engine, tiny_model("deepseek_v2_calm"), options)

    check_drafts(ours)
    assert hits_of(ours) == [(len(prompt) - 1) // 16 * 16 for prompt in TWO]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "target", "head", "plain"),
    [
        ("eagle", "deepseek_v3_mtp", "latent_eagle_head", {"attention_backend": "JENGA_TRITON"}),
        ("eagle3", "deepseek_v2_calm", "eagle3_head", None),
    ],
    ids=["eagle_of_latents", "eagle3_of_plain_attention"],
)
def test_an_eagle_head_changes_no_token(method, target, head, plain, tiny_model, run_engine):
    options = by_draft(tiny_model(head), method=method)

    ours = run_twice(run_engine, tiny_model(target), options, plain=plain)

    check_drafts(ours)
    lost = tokens_lost_to_a_head()
    assert hits_of(ours) == [(len(prompt) - 1) // 16 * 16 - lost for prompt in TWO]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"], ids=["first_runner", "second_runner"])
def test_a_draft_model_over_latents_changes_no_token(runner, tiny_model, run_engine):
    options = by_draft(tiny_model("deepseek_v2_draft"))

    ours = run_twice(
        run_engine, tiny_model("deepseek_v2"), options, environment={V2_RUNNER: runner}
    )

    check_drafts(ours)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"], ids=["first_runner", "second_runner"])
def test_a_model_that_drafts_for_itself_is_always_right(runner, tiny_model, run_engine):
    model = tiny_model("deepseek_v2")

    ours = run_twice(run_engine, model, by_draft(model), environment={V2_RUNNER: runner})

    assert all(accepted == drafted > 0 for drafted, accepted in ours["drafts"])


@pytest.mark.slow
def test_drafting_requests_are_preempted_in_a_small_arena_and_lose_nothing(tiny_model, run_engine):
    model, prompts = tiny_model("deepseek_v3_mtp"), prompts_of_lengths((90, 100, 60), seed=5)
    small = {"kv_cache_memory_bytes": 1_600_000, "enable_prefix_caching": True}
    options = {"attention_backend": "JENGA_TRITON"}

    plain = run_engine(model, prompts, max_tokens=40, options=options)
    ours = run_ours(run_engine, model, prompts, max_tokens=40, options=MTP | small)

    assert_same_generation(ours, plain)
    assert ours["preemptions"] > 0
    check_drafts(ours)


@pytest.mark.slow
def test_a_layer_that_predicts_further_tokens_over_float8_latents_changes_no_token(
    tiny_model, run_engine
):
    model, float8 = tiny_model("deepseek_v3_mtp"), JENGA | {"kv_cache_dtype": "fp8"}
    job = {"max_tokens": MAX_TOKENS, "rounds_latents": True, "latent_scales": [0.6, 0.05, 0.011]}

    plain = run_engine(model, TWO, options=float8, **job)
    options = float8 | MTP | {"enable_prefix_caching": True}
    ours = run_ours(run_engine, model, TWO * 2, rounds=2, options=options, **job)

    twice = plain | {"outputs": plain["outputs"] * 2}
    assert_same_generation(ours, twice, tolerance=ROUNDED_TOLERANCE)
    check_drafts(ours)
    assert all(hit > 0 for hit in hits_of(ours))
