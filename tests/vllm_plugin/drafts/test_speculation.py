"""Speculative decoding in the real engine: what is drafted changes when tokens come, not which."""

import json

import pytest

from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation, tokens_lost_to_a_head
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON"}
# Short, page-crossing, longer than windows and chunks of 64 tokens; each repeats how it began.
PROMPTS = [[*prompt, *prompt[:20]] for prompt in prompts_of_lengths((5, 33, 70, 150), seed=0)]
MAX_TOKENS = 24
# The layers that draft are in the target's own checkpoint.
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


def by_ngrams(num_tokens=3):
    config = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    return {"speculative_config": config | {"num_speculative_tokens": num_tokens}}


def by_draft(model, num_tokens=3, method="draft_model"):
    config = {"method": method, "model": str(model)}
    return {"speculative_config": config | {"num_speculative_tokens": num_tokens}}


def run_ours(run_engine, model, prompts, *, max_tokens=MAX_TOKENS, options, **job):
    """Run ours over an arena full of NaN; check its books after every step."""
    return run_engine(
        model,
        prompts,
        max_tokens=max_tokens,
        options=JENGA | options,
        fill_arena=True,
        report_manager=True,
        **job,
    )


def check_drafts(result):
    """Check that tokens were drafted, some accepted and some not."""
    drafted, accepted = (sum(counts) for counts in zip(*result["drafts"], strict=True))
    assert 0 < accepted < drafted
    assert result["request_tokens"] == {}


@pytest.mark.slow
def test_a_draft_model_beside_windows_changes_no_token_and_shares_the_arena(
    tiny_model, run_engine, tmp_path
):
    model, log = tiny_model("gemma2"), tmp_path / "memory.jsonl"

    stock = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS)
    ours = run_ours(
        run_engine,
        model,
        PROMPTS + PROMPTS,
        rounds=2,
        options=by_draft(tiny_model("gemma2_draft"), 4) | {"enable_prefix_caching": True},
        environment={"JENGA_MEMORY_LOG": str(log)},
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    check_drafts(ours)
    assert all(accepted > drafted / 2 for drafted, accepted in ours["drafts"])
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    geometry, *steps = [json.loads(line) for line in log.read_text().splitlines()]
    tables = geometry["geometry"]["page_tables"]
    assert [table["name"] for table in tables] == ["draft_full", "sliding_40", "full"]
    assert [len(table["layer_names"]) for table in tables] == [4, 2, 2]
    busiest = max(steps, key=lambda step: sum(step["tokens"].values()))["memory"]
    assert all(table["used_bytes"] > 0 for table in busiest["tables"])


@pytest.mark.slow
def test_ngrams_are_drafted_and_accepted_as_by_stock_vllm(tiny_model, run_engine):
    model = tiny_model("gemma2")

    plain = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS)
    stock = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS, options=by_ngrams())
    ours = run_ours(run_engine, model, PROMPTS, options=by_ngrams())

    assert_same_generation(ours, plain)
    assert_same_generation(ours, stock)
    assert ours["drafts"] == stock["drafts"]
    assert sum(drafted for drafted, _ in ours["drafts"]) > 0


@pytest.mark.slow
def test_a_draft_model_of_wider_pages_is_accepted_as_by_stock_vllm(tiny_model, run_engine):
    model, options = tiny_model("llama"), by_draft(tiny_model("llama_draft"))

    stock = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS, options=options)
    ours = run_ours(run_engine, model, PROMPTS, options=options)

    assert_same_generation(ours, stock)
    assert ours["drafts"] == stock["drafts"]
    check_drafts(ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "target", "head"),
    [("eagle", "llama_calm", "eagle_head"), ("eagle3", "llama_calmer", "eagle3_head")],
)
def test_an_eagle_head_is_accepted_as_by_stock_vllm_also_after_a_prefix_hit(
    method, target, head, tiny_model, run_engine
):
    model, options = tiny_model(target), by_draft(tiny_model(head), method=method)
    twice = PROMPTS + PROMPTS

    stock = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS, options=options)
    ours = run_ours(
        run_engine, model, twice, rounds=2, options=options | {"enable_prefix_caching": True}
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    assert ours["drafts"] == stock["drafts"] * 2
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    lost = tokens_lost_to_a_head()
    assert hits == [max(0, (len(prompt) - 1) // 16 * 16 - lost) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4_moe_mtp"])
def test_a_layer_that_predicts_further_tokens_is_accepted_as_by_stock_vllm(
    name, tiny_model, run_engine
):
    model, twice = tiny_model(name), PROMPTS + PROMPTS

    stock = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS, options=MTP)
    ours = run_ours(
        run_engine, model, twice, rounds=2, options=MTP | {"enable_prefix_caching": True}
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    assert ours["drafts"] == stock["drafts"] * 2
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    lost = tokens_lost_to_a_head()
    assert hits == [max(0, (len(prompt) - 1) // 16 * 16 - lost) for prompt in PROMPTS]


@pytest.mark.slow
def test_drafts_after_a_prefix_hit_are_accepted_as_by_stock_vllm(tiny_model, run_engine):
    model, twice = tiny_model("gemma2"), PROMPTS + PROMPTS
    options = by_draft(tiny_model("gemma2_draft"), 4) | {"enable_prefix_caching": True}
    job = {"max_tokens": MAX_TOKENS, "rounds": 2}

    # Stock keeps the draft's layers in one group only with one group for all.
    one_group = {"disable_hybrid_kv_cache_manager": True, "block_size": 32}
    stock = run_engine(model, twice, options=options | one_group, **job)
    ours = run_ours(run_engine, model, twice, options=options, **job)

    assert_same_generation(ours, stock)
    assert ours["drafts"] == stock["drafts"]
    check_drafts(ours)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("llama4", {"block_size": 32}), ("gpt_oss", {})])
def test_chunks_and_sinks_read_no_rejected_token(name, options, tiny_model, run_engine):
    model, draft = tiny_model(name), tiny_model("llama_draft")  # which knows nothing of either

    plain = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS, options=options)
    ours = run_ours(run_engine, model, PROMPTS, options=by_draft(draft, 7))

    assert_same_generation(ours, plain)
    assert all(drafted > accepted for drafted, accepted in ours["drafts"])


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_drafting_requests_are_preempted_in_a_small_arena_and_lose_nothing(
    caching, tiny_model, run_engine
):
    model = tiny_model("gemma2")
    prompts = prompts_of_lengths((90, 100, 110, 95, 105, 60), seed=5)
    options = by_draft(tiny_model("gemma2_draft")) | {
        "enable_prefix_caching": caching,
        "kv_cache_memory_bytes": 3 << 20,
    }

    plain = run_engine(model, prompts, max_tokens=60)
    ours = run_ours(run_engine, model, prompts, max_tokens=60, options=options)

    assert_same_generation(ours, plain)
    assert ours["preemptions"] > 0
    check_drafts(ours)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"], ids=["first_runner", "second_runner"])
def test_what_drafts_from_the_targets_keys_and_values_drafts_as_in_stock_vllm(
    runner, tiny_model, run_engine
):
    model, draft = tiny_model("gemma4_repeating"), tiny_model("gemma4_assistant")
    options = by_draft(draft, method="mtp") | {"enable_prefix_caching": True}

    stock = run_engine(model, PROMPTS, max_tokens=MAX_TOKENS, options=options)
    ours = run_ours(
        run_engine,
        model,
        PROMPTS + PROMPTS,
        rounds=2,
        options=options,
        environment={V2_RUNNER: runner},
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    check_drafts(ours)
    assert ours["drafts"] == stock["drafts"] * 2
    # It has no slots that could be made of another token than the one that follows.
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
