"""Models with gated delta nets in the real engine: states in pages, kept for other requests.

vLLM's CPU build runs these layers in bfloat16 only, so what they generate in float32 is compared
with transformers.
"""

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import check_hits, prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import NUM_WORKERS, assert_same_generation
from tests.vllm_plugin.states.test_hybrid_engine import CUTS, JENGA, TURN, check_turns, hits_of

pytestmark = pytest.mark.vllm

PROMPTS = prompts_over_shared_prefixes(4, seed=31)


@pytest.mark.slow
def test_gated_delta_hybrid_generates_what_transformers_generates_and_finds_its_prefixes(
    tiny_model, run_engine
):
    model = tiny_model("qwen3_next")

    theirs = run_engine(model, PROMPTS, turns=[TURN], max_tokens=6, script="reference_process.py")
    ours = run_engine(
        model,
        PROMPTS,
        turns=[TURN],
        max_tokens=6,
        options=CUTS | JENGA,
        fill_arena=True,
        report_manager=True,
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
    )

    assert_same_generation(ours, theirs)
    assert "prefix caching on" in ours["log"]
    assert ours["request_tokens"] == {}
    check_hits(ours)
    check_turns(ours, PROMPTS)
    # Of requests with one prefix, the second leaves a state where it leaves the first.
    assert any(hits_of(ours, 0, len(PROMPTS)))


@pytest.mark.slow
def test_qwen3_5_generates_what_transformers_generates_and_finds_its_prefixes(
    tiny_model, run_engine
):
    model, job = tiny_model("qwen3_5"), {"reads_images": True}  # as vLLM's module of it does

    theirs = run_engine(model, PROMPTS, turns=[TURN], script="reference_process.py", **job)
    ours = run_engine(model, PROMPTS, turns=[TURN], options=CUTS | JENGA, fill_arena=True, **job)

    assert_same_generation(ours, theirs)
    check_turns(ours, PROMPTS)


@pytest.mark.slow
def test_gated_delta_hybrid_preempts_in_a_small_arena_and_goes_on_from_its_states(
    tiny_model, run_engine
):
    model = tiny_model("qwen3_next")
    prompts = prompts_over_shared_prefixes(8, seed=31)
    options = CUTS | {"max_num_seqs": 8}

    theirs = run_engine(model, prompts, max_tokens=60, script="reference_process.py")
    ours = run_engine(
        model,
        prompts,
        max_tokens=60,
        options=options | JENGA | {"kv_cache_memory_bytes": 3 << 18},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, theirs)
    assert ours["preemptions"] > 0
    assert check_hits(ours) > 0  # pages were evicted


@pytest.mark.slow
@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two workers")
def test_two_tensor_parallel_workers_generate_what_transformers_generates(tiny_model, run_engine):
    model = tiny_model("qwen3_next")

    theirs = run_engine(model, PROMPTS, turns=[TURN], max_tokens=6, script="reference_process.py")
    two = run_engine(
        model,
        PROMPTS,
        turns=[TURN],
        max_tokens=6,
        options=CUTS | JENGA | {"tensor_parallel_size": 2},
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )

    assert_same_generation(two, theirs)
    check_turns(two, PROMPTS)  # in their own process requests arrive at other steps
