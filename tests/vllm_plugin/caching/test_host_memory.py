"""Host memory in the real engine: all that was evicted comes back as it was."""

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import NUM_WORKERS, V2_RUNNER, assert_same_generation
from tests.vllm_plugin.states.test_hybrid_engine import CUTS, TURN

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
ON_V1, ON_V2 = {V2_RUNNER: "0"}, {V2_RUNNER: "1"}


def run_thrice(run_engine, model, prompts, *, options, environment=None, reference=None, **job):
    """Run a model by others, by ours, and by ours with host memory.

    Returns:
        The results of the last two, of which the tokens are those of the first.
    """
    theirs = run_engine(model, prompts, options=CUTS, **job | (reference or {}))
    alone, ours = (
        run_engine(
            model,
            prompts,
            options=CUTS | JENGA | options | host,
            environment=environment or {},
            fill_arena=True,
            report_manager=True,
            loads_ahead=bool(host),
            **job,
        )
        for host in ({}, {"kv_offloading_size": 1 / 32})
    )
    assert_same_generation(alone, theirs)
    assert_same_generation(ours, theirs)
    return alone, ours


def check_host(alone, ours):
    """Check that what the arena lost was found again."""
    assert alone["host"] is None
    assert ours["host"]["loaded_bytes"] > 0
    assert ours["host"]["stored_bytes"] == ours["host"]["cached_bytes"] > 0
    assert ours["loaded_ahead"]
    moved_bytes = ours["host"]["stored_bytes"] + ours["host"]["loaded_bytes"]
    assert 0 < ours["host"]["ahead_bytes"] <= moved_bytes
    assert ours["cache"]["hit_tokens"] > alone["cache"]["hit_tokens"]
    assert ours["request_tokens"] == {}


@pytest.mark.parametrize(
    "loads_ahead",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["loads_at_once", "loads_ahead"],
)
def test_windows_find_in_host_memory_what_the_arena_lost(loads_ahead, tiny_model, run_engine):
    prompts = prompts_over_shared_prefixes(8, seed=11) * 2
    model, options = tiny_model("gpt_oss"), CUTS | JENGA | {"kv_cache_memory_bytes": 1 << 20}

    stock = run_engine(model, prompts, max_tokens=4, options=CUTS)
    ours = run_engine(
        model,
        prompts,
        max_tokens=4,
        options=options | {"kv_offloading_size": 1 / 32},
        fill_arena=True,
        report_manager=True,
        loads_ahead=loads_ahead,
        by_references=not loads_ahead,
    )

    assert_same_generation(ours, stock)
    assert ours["host"]["loaded_bytes"] > 0
    assert bool(ours["loaded_ahead"]) == loads_ahead
    # All that is found of a prompt the first time is found the second, and its own tokens.
    hits = [output["cached_tokens"] for output in ours["outputs"]]
    for prompt, first, second in zip(prompts, hits[:8], hits[8:], strict=False):
        assert second >= max(first, (len(prompt) - 1) // 16 * 16 - 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arena_bytes", "runner"),
    [
        pytest.param("granite_hybrid", 5 << 19, ON_V1, id="mamba2"),
        pytest.param("granite_hybrid", 5 << 19, ON_V2, id="mamba2_on_v2"),
        pytest.param("jamba", 1 << 20, ON_V2, id="mamba1_on_v2"),
        pytest.param("lfm2", 7 << 17, ON_V2, id="short_convolutions_on_v2"),
        pytest.param("gemma3", 7 << 18, ON_V2, id="windows_on_v2"),
    ],
)
def test_models_find_in_host_memory_what_the_arena_lost(
    name, arena_bytes, runner, tiny_model, run_engine
):
    alone, ours = run_thrice(
        run_engine,
        tiny_model(name),
        prompts_over_shared_prefixes(12, seed=23),
        turns=[TURN],
        options={"kv_cache_memory_bytes": arena_bytes},
        environment=runner,
        reference={"script": "reference_process.py"} if name == "jamba" else {},
    )

    check_host(alone, ours)


@pytest.mark.slow
@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two ranks")
@pytest.mark.parametrize(
    ("name", "arena_bytes", "ranks"),
    [
        pytest.param("gemma3", 7 << 17, {"pipeline_parallel_size": 2}, id="pipeline_of_windows"),
        pytest.param("jamba", 5 << 17, {"pipeline_parallel_size": 2}, id="pipeline_of_states"),
        pytest.param("granite_hybrid", 5 << 18, {"tensor_parallel_size": 2}, id="tensor_parallel"),
        pytest.param(
            "granite_hybrid",
            3 << 19,
            {"tensor_parallel_size": 2, "use_replayssm": True, "replayssm_buffer_len": 8},
            id="tensor_parallel_of_states_with_histories",
        ),
    ],
)
def test_ranks_find_in_host_memory_what_their_arenas_lost(
    name, arena_bytes, ranks, tiny_model, run_engine
):
    extension = {
        "worker_extension_cls": "tests.vllm_plugin.parallel.pipeline_worker.RankOfPipeline"
    }
    is_pipeline = "pipeline_parallel_size" in ranks
    prompts = prompts_over_shared_prefixes(12, seed=32)
    reference = {"script": "reference_process.py"} if name == "jamba" else {}

    theirs = run_engine(tiny_model(name), prompts, turns=[TURN], options=CUTS, **reference)
    ours = run_engine(
        tiny_model(name),
        prompts,
        turns=[TURN],
        options=CUTS
        | JENGA
        | ranks
        | (extension if is_pipeline else {})
        | {"kv_cache_memory_bytes": arena_bytes, "kv_offloading_size": 1 / 16},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        | ({"VLLM_PP_LAYER_PARTITION": "3,3"} if name == "jamba" else {})
        | ({"JENGA_HISTORY_REQUESTS": "1"} if "use_replayssm" in ranks else {}),
        fill_arena=is_pipeline,
        report_manager=True,
        loads_ahead=True,
    )

    assert "error" not in ours, ours["error"][-4000:]
    assert_same_generation(ours, theirs)
    assert ours["host"]["loaded_bytes"] > 0
    assert ours["loaded_ahead"]


@pytest.mark.slow
def test_what_an_encoder_made_comes_back_from_host_memory(tiny_model, run_engine):
    prompts = prompts_over_shared_prefixes(4, seed=5) * 3
    seeds = [0, 1, 2, 3] * 3
    whisper = {"skip_tokenizer_init": False, "max_num_batched_tokens": 256, "max_num_seqs": 2}
    job = {"audio_seeds": seeds, "max_tokens": 4, "rounds": 3}

    stock = run_engine(tiny_model("whisper"), prompts, options=whisper, **job)
    ours = run_engine(
        tiny_model("whisper"),
        prompts,
        options=whisper | JENGA | {"kv_cache_memory_bytes": 2 << 20, "kv_offloading_size": 1 / 16},
        fill_arena=True,
        report_manager=True,
        **job,
    )

    assert_same_generation(ours, stock)
    assert ours["host"]["loaded_bytes"] > 0
    assert sum(ours["encoded"]) == 4  # each audio once
