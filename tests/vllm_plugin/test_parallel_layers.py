"""Layers with windows and states on two ranks, beside engines of one rank.

The tests of hybrids, gated delta nets and pipelines have further models. Here are those that were
served by one kind of ranks only: windows and sinks by tensor-parallel ranks, and Mamba-2 and gated
delta nets by the ranks of a pipeline.
"""

import pytest

from tests.vllm_plugin.conftest import NUM_WORKERS, assert_same_generation
from tests.vllm_plugin.test_hybrid_engine import CUTS, JENGA, TURN, check_turns, hits_of
from tests.vllm_plugin.test_pipeline_engine import PIPELINE
from tests.vllm_plugin.test_prefix_caching import prompts_over_shared_prefixes

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


def check_ranks(ours, theirs):
    """Check what two ranks generated and found, and that nothing is left of a request."""
    assert_same_generation(ours, theirs)
    assert ours["request_tokens"] == {}
    assert len(ours["arena_bytes"]) == 2
    assert any(hits_of(ours, 0, len(PROMPTS)))
    check_turns(ours, PROMPTS)


def run_ranks(run_engine, model, options, **environment):
    """Run ours on two ranks, over arenas full of NaN. Prompts come one after another."""
    return run_engine(
        model,
        PROMPTS,
        turns=[TURN],
        rounds=len(PROMPTS),
        max_tokens=MAX_TOKENS,
        options=CUTS | options,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | environment,
        by_references=True,
        fill_arena=True,
        report_manager=True,
    )


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_windows_on_two_tensor_parallel_ranks_generate_what_stock_vllm_generates(
    name, tiny_model, run_engine
):
    model, job = tiny_model(name), {"turns": [TURN], "max_tokens": MAX_TOKENS}

    stock = run_engine(model, PROMPTS, options=CUTS, **job)
    two = run_ranks(run_engine, model, TENSOR_PARALLEL)

    check_ranks(two, stock)


@pytest.mark.parametrize(
    ("name", "partition"), [("nemotron_h", "2,2"), ("qwen3_next", "1,2")], ids=["mamba2", "delta"]
)
def test_states_on_two_ranks_of_a_pipeline_generate_what_transformers_generates(
    name, partition, tiny_model, run_engine
):
    model, job = tiny_model(name), {"turns": [TURN], "max_tokens": MAX_TOKENS}

    theirs = run_engine(model, PROMPTS, script="reference_process.py", **job)
    two = run_ranks(run_engine, model, PIPELINE, VLLM_PP_LAYER_PARTITION=partition)

    check_ranks(two, theirs)
