"""Two ranks of a pipeline in the real engine, each with its own layers of every page.

Stock vLLM runs on one rank: with two, its first model runner stops on a CPU (`pipeline_worker`).
The engine lives in the test's process and the ranks in processes of their own. Of the hybrids that
other tests run, vLLM 0.32 does not make the layers of Granite on two ranks.
"""

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import check_hits, prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import NUM_WORKERS, V2_RUNNER, assert_same_generation
from tests.vllm_plugin.states.test_hybrid_engine import CUTS, NO_ROOM_LEFT, TURN, hits_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two ranks"),
]

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
PIPELINE = JENGA | {
    "pipeline_parallel_size": 2,
    "worker_extension_cls": "tests.vllm_plugin.parallel.pipeline_worker.RankOfPipeline",
}
ON_V1, ON_V2 = {V2_RUNNER: "0"}, {V2_RUNNER: "1"}


@pytest.fixture
def run_pipeline(run_engine):
    """Run ours on two ranks, over arenas full of NaN."""

    def run(model, prompts, *, partition, options, runner=ON_V1, **job):
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_PP_LAYER_PARTITION": partition,
        }
        result = run_engine(
            model,
            prompts,
            options=PIPELINE | options,
            environment=environment | runner,
            fill_arena=True,
            report_manager=True,
            **job,
        )
        assert "error" not in result, result["error"][-4000:]
        assert "geometry of 2 pipeline ranks together" in result["log"]
        assert result["request_tokens"] == {}
        return result

    return run


@pytest.mark.parametrize(
    ("name", "partition", "runner"),
    [
        pytest.param("gemma3", "4,3", ON_V1, id="windows"),
        pytest.param("gemma3", "2,5", ON_V2, id="no_full_layer_on_the_first_rank"),
        pytest.param("jamba", "3,3", ON_V2, id="states"),
        pytest.param("jamba", "1,5", ON_V1, id="only_states_on_the_first_rank"),
        pytest.param("lfm2", "2,3", ON_V2, id="only_short_convolutions_on_the_first_rank"),
    ],
)
def test_two_ranks_generate_and_find_what_one_does(
    name, partition, runner, tiny_model, run_engine, run_pipeline
):
    prompts = prompts_over_shared_prefixes(6, seed=31)
    job = {"turns": [TURN], "rounds": len(prompts), "options": CUTS}

    one = run_engine(
        tiny_model(name), prompts, **job | {"options": CUTS | JENGA}, report_manager=True
    )
    two = run_pipeline(tiny_model(name), prompts, partition=partition, runner=runner, **job)

    assert_same_generation(two, one)
    # Requests of the second turn arrive together, and then wait for others' steps on both ranks.
    first_turn = len(prompts)
    assert hits_of(two, 0, first_turn) == hits_of(one, 0, first_turn)
    assert any(hits_of(two, 0, first_turn))
    ends = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    hits = hits_of(two, first_turn, None)
    assert all(hit >= end for hit, end in zip(hits, ends, strict=True)), (hits, ends)


@pytest.mark.parametrize(
    ("name", "partition", "runner", "arena_bytes"),
    [
        pytest.param("gemma3", "4,3", ON_V1, 7 << 17, id="windows"),
        pytest.param("jamba", "2,4", ON_V2 | NO_ROOM_LEFT, 5 << 17, id="states"),
    ],
)
def test_two_ranks_of_small_arenas_evict_and_preempt_and_lose_nothing(
    name, partition, runner, arena_bytes, tiny_model, run_engine, run_pipeline
):
    prompts = prompts_over_shared_prefixes(16, seed=32)
    options = CUTS | {"max_num_seqs": 6}

    # Stock vLLM's CPU build cannot run Jamba.
    reference = {"script": "reference_process.py"} if name == "jamba" else {}
    theirs = run_engine(tiny_model(name), prompts, max_tokens=40, options=options, **reference)
    ours = run_pipeline(
        tiny_model(name),
        prompts,
        partition=partition,
        runner=runner,
        max_tokens=40,
        options=options | {"kv_cache_memory_bytes": arena_bytes},
    )

    assert_same_generation(ours, theirs)
    assert check_hits(ours) > 16
    assert ours["preemptions"] > 0
    assert len(ours["arena_bytes"]) == 2
    assert arena_bytes * 0.9 < max(ours["arena_bytes"]) <= arena_bytes
