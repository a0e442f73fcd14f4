"""Layers with windows and states, and drafts, on two ranks beside engines of one rank.

The tests of hybrids, gated delta nets and pipelines have further models. Here are those that no
other test serves: windows, sinks and drafts by tensor-parallel ranks, and Mamba-2 and gated delta
nets by the ranks of a pipeline.
"""

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import NUM_WORKERS, assert_same_generation
from tests.vllm_plugin.drafts.test_speculation import PROMPTS as REPEATING_PROMPTS
from tests.vllm_plugin.drafts.test_speculation import by_draft, by_ngrams, check_drafts
from tests.vllm_plugin.parallel.test_pipeline_engine import PIPELINE
from tests.vllm_plugin.states.test_hybrid_engine import CUTS, JENGA, TURN, check_turns, hits_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two ranks"),
]

PROMPTS = prompts_over_shared_prefixes(4, seed=31)
MAX_TOKENS = 6
TENSOR_PARALLEL = JENGA | {
    "tensor_parallel_size": 2,
    "worker_extension_cls": PIPELINE["worker_extension_cls"],
}


def run_ours(run_engine, model, prompts, options, *, max_tokens=MAX_TOKENS, **job):
    """Run ours over arenas full of NaN, and check that nothing is left of a request."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | job.pop("environment", {})
    result = run_engine(
        model,
        prompts,
        max_tokens=max_tokens,
        options=CUTS | options,
        environment=environment if "worker_extension_cls" in options else {},
        by_references=True,
        fill_arena=True,
        report_manager=True,
        **job,
    )
    assert "error" not in result, result["error"][-4000:]
    assert len(result["arena_bytes"]) == (2 if "worker_extension_cls" in options else 1)
    assert result["request_tokens"] == {}
    return result


def run_turns(run_engine, model, options, **job):
    """Run prompts one after another, each with a further turn, and check what those find."""
    result = run_ours(run_engine, model, PROMPTS, options, turns=[TURN], rounds=len(PROMPTS), **job)
    check_turns(result, PROMPTS)
    assert any(hits_of(result, 0, len(PROMPTS)))
    return result


def check_same(two, one):
    assert_same_generation(two, one)
    found = [[each["cached_tokens"] for each in result["outputs"]] for result in (two, one)]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_windows_on_two_tensor_parallel_ranks_generate_and_find_what_one_does(
    name, tiny_model, run_engine
):
    model = tiny_model(name)

    one = run_turns(run_engine, model, JENGA)
    two = run_turns(run_engine, model, TENSOR_PARALLEL)

    check_same(two, one)


@pytest.mark.parametrize(
    ("name", "partition"), [("nemotron_h", "2,2"), ("qwen3_next", "1,2")], ids=["mamba2", "delta"]
)
def test_states_on_two_ranks_of_a_pipeline_generate_and_find_what_one_does(
    name, partition, tiny_model, run_engine
):
    model, environment = tiny_model(name), {"VLLM_PP_LAYER_PARTITION": partition}

    one = run_turns(run_engine, model, JENGA)
    two = run_turns(run_engine, model, PIPELINE, environment=environment)

    check_same(two, one)


@pytest.mark.parametrize("drafter", ["ngrams", "model"])
def test_drafts_on_two_tensor_parallel_ranks_change_no_token(drafter, tiny_model, run_engine):
    model = tiny_model("gemma2")
    drafts = by_ngrams() if drafter == "ngrams" else by_draft(tiny_model("gemma2_draft"), 4)
    job = {"max_tokens": 16, "rounds": 2}
    prompts = REPEATING_PROMPTS * 2

    one = run_ours(run_engine, model, prompts, JENGA, **job)
    two = run_ours(run_engine, model, prompts, TENSOR_PARALLEL | drafts, **job)

    assert_same_generation(two, one)
    check_drafts(two)
    assert any(each["cached_tokens"] for each in two["outputs"])
