"""Data parallel engines: each has an arena of its own, and runs empty steps while others work.

vLLM's CPU build has no way to gather what experts on several ranks need, with any backend. The
small Llama 4 counts as a model of experts and has none.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import NUM_WORKERS, V2_RUNNER, assert_same_generation
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.engine.test_serve import free_port
from tests.vllm_plugin.states.test_hybrid_engine import CUTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}


@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two ranks")
@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
def test_a_rank_that_waits_for_another_finds_what_it_cached(runner, tiny_model, run_engine):
    model, prompts = tiny_model("llama4"), prompts_over_shared_prefixes(5, seed=71)
    of_rank = [prompts, prompts[:1]]  # the second waits for most of the time

    stock = run_engine(model, prompts * 2, max_tokens=6, options=CUTS | {"block_size": 32})
    ranks = {
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(free_port()),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        V2_RUNNER: runner,
    }

    def run(rank):
        return run_engine(
            model,
            of_rank[rank] * 2,
            max_tokens=6,
            rounds=2,
            options=CUTS | JENGA,
            environment=ranks | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)},
            report_manager=True,
            by_references=True,
        )

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run, range(2)))

    assert_same_generation(results[0], stock)
    one = [stock["outputs"][0]] * 2
    assert_same_generation(results[1], {"outputs": one})
    for result, own in zip(results, of_rank, strict=True):
        hits = [output["cached_tokens"] for output in result["outputs"][len(own) :]]
        assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in own]


@pytest.mark.parametrize(
    ("name", "arena_bytes", "options"),
    [
        pytest.param("granite_hybrid", 5 << 19, {}, id="states"),
        pytest.param("granite_hybrid", 5 << 19, graphs_of(1, 2, 4), id="states_in_graphs"),
        pytest.param("gpt_oss", 1 << 20, graphs_of(1, 2, 4), id="windows_in_graphs"),
        pytest.param("deepseek_v2", 4 << 20, {}, id="latents"),
    ],
)
def test_empty_steps_leave_what_is_cached_as_it_was(
    name, arena_bytes, options, tiny_model, run_engine
):
    model, prompts = tiny_model(name), prompts_over_shared_prefixes(4, seed=72)

    stock = run_engine(model, prompts, max_tokens=6, options=CUTS)
    ours = run_engine(
        model,
        prompts * 2,
        max_tokens=6,
        rounds=2,
        empty_steps=3,
        captures=bool(options),
        options=CUTS | JENGA | {"kv_cache_memory_bytes": arena_bytes} | options,
        environment={V2_RUNNER: "1"},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    assert sum(output["cached_tokens"] for output in ours["outputs"][len(prompts) :]) > 0
    assert bool(ours["replays"]) == bool(options)
