"""Models with recurrent layers in the real engine: states in pages, kept for other requests."""

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import check_hits, prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import NUM_WORKERS, assert_same_generation

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
# A budget that cuts prompts anywhere, the fewer tokens the more others decode.
CUTS = {"max_num_batched_tokens": 37, "max_num_seqs": 3}
NO_ROOM_LEFT = {"JENGA_LEFT_SHARE": "0"}
"""Without it, admissions leave room for the next states, so that hardly anyone is preempted."""
NUM_PROMPTS = 6
TURN = [7, 8, 9, 10, 11]


def hits_of(result, first, last):
    return [output["cached_tokens"] for output in result["outputs"][first:last]]


def check_turns(result, prompts):
    """Check what the second turn of each prompt found: at least the end of its first.

    The state at the end of a prompt is kept at the last 16 tokens before its last token.
    """
    ends = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    hits = hits_of(result, len(prompts), 2 * len(prompts))
    assert all(hit >= end for hit, end in zip(hits, ends, strict=True)), (hits, ends)
    assert all(hit % 16 == 0 for hit in hits)
    assert any(hit % 32 for hit in hits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite_hybrid", "lfm2"])
def test_hybrids_generate_what_stock_vllm_generates_and_find_their_prefixes(
    name, tiny_model, run_engine
):
    model = tiny_model(name)
    prompts = prompts_over_shared_prefixes(NUM_PROMPTS, seed=21)

    stock = run_engine(model, prompts, turns=[TURN], options=CUTS)
    ours = run_engine(
        model, prompts, turns=[TURN], options=CUTS | JENGA, fill_arena=True, report_manager=True
    )

    assert_same_generation(ours, stock)
    assert ours["request_tokens"] == {}
    check_hits(ours)
    check_turns(ours, prompts)
    # Of requests with one prefix, the second leaves a state where it leaves the first.
    assert any(hits_of(ours, 0, NUM_PROMPTS))


@pytest.mark.slow
def test_mamba1_hybrid_generates_what_transformers_generates_and_finds_its_prefixes(
    tiny_model, run_engine
):
    # vLLM's CPU build has no Mamba-1 prompt scan, so stock vLLM cannot run Jamba here.
    model = tiny_model("jamba")
    prompts = prompts_over_shared_prefixes(NUM_PROMPTS, seed=22)

    theirs = run_engine(model, prompts, turns=[TURN], script="reference_process.py")
    ours = run_engine(
        model,
        prompts,
        turns=[TURN],
        options=CUTS | JENGA,
        # The scheduler's orders go to a worker in another process.
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"},
    )

    assert_same_generation(ours, theirs)
    assert "prefix caching on" in ours["log"]
    check_turns(ours, prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arena_bytes"),
    [("granite_hybrid", 5 << 19), ("jamba", 1 << 20), ("mamba", 1 << 20), ("lfm2", 1 << 20)],
)
def test_hybrids_in_an_arena_that_always_evicts_lose_nothing(
    name, arena_bytes, tiny_model, run_engine
):
    prompts = prompts_over_shared_prefixes(24, seed=23)
    options = CUTS | {"max_num_seqs": 4}
    is_mamba1 = name in ("jamba", "mamba")

    theirs = run_engine(
        tiny_model(name),
        prompts,
        turns=[TURN],
        options=options,
        **({"script": "reference_process.py"} if is_mamba1 else {}),
    )
    ours = run_engine(
        tiny_model(name),
        prompts,
        turns=[TURN],
        options=options | JENGA | {"kv_cache_memory_bytes": arena_bytes},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, theirs)
    assert check_hits(ours) > 24


@pytest.mark.slow
def test_hybrid_preempts_in_a_small_arena_and_goes_on_from_its_states(tiny_model, run_engine):
    model = tiny_model("granite_hybrid")
    prompts = prompts_over_shared_prefixes(6, seed=24)
    options = CUTS | {"max_num_seqs": 6}

    stock = run_engine(model, prompts, max_tokens=60, options=options)
    ours = run_engine(
        model,
        prompts,
        max_tokens=60,
        options=options | JENGA | {"kv_cache_memory_bytes": 10 << 18},
        environment=NO_ROOM_LEFT,
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, stock)
    assert ours["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_another_turn_starts_near_the_end_of_a_long_answer(draft_tokens, tiny_model, run_engine):
    model = tiny_model("granite_hybrid")
    prompts = prompts_over_shared_prefixes(2, seed=25)
    options = {**CUTS}
    if draft_tokens:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": draft_tokens,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }

    stock = run_engine(model, prompts, max_tokens=70, turns=[TURN], options=CUTS)
    ours = run_engine(
        model,
        prompts,
        max_tokens=70,
        turns=[TURN],
        options=options | JENGA,
        environment={"JENGA_HISTORY_TOKENS": "0"},  # a state after each drafted token
    )

    assert_same_generation(ours, stock)
    # A state is kept every 64 tokens of an answer; without drafts none is missed.
    hits = hits_of(ours, 2, 4)
    ends = [(len(prompt) + 68) // 64 * 64 for prompt in prompts]
    if draft_tokens:
        ends_of_prompts = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        assert all(hit >= end for hit, end in zip(hits, ends_of_prompts, strict=True))
        assert any(hit == end for hit, end in zip(hits, ends, strict=True)), (hits, ends)
    else:
        assert hits == ends


@pytest.mark.slow
def test_hybrid_without_prefix_caching_generates_what_stock_vllm_generates(tiny_model, run_engine):
    model = tiny_model("granite_hybrid")
    prompts = prompts_over_shared_prefixes(NUM_PROMPTS, seed=21)

    stock = run_engine(model, prompts, turns=[TURN], options=CUTS)
    ours = run_engine(
        model,
        prompts,
        turns=[TURN],
        options=CUTS | {"attention_backend": "JENGA_TRITON"},
        fill_arena=True,
    )

    assert_same_generation(ours, stock)
    assert not any(hits_of(ours, 0, None))


@pytest.mark.slow
@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two workers")
@pytest.mark.parametrize("name", ["granite_hybrid", "lfm2_moe"])
def test_two_tensor_parallel_workers_generate_what_one_does(name, tiny_model, run_engine):
    model = tiny_model(name)
    prompts = prompts_over_shared_prefixes(NUM_PROMPTS, seed=21)
    # A worker's one head is rotated right, two are not: on a CPU, by vLLM's operation.
    rotation = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    options = CUTS | JENGA | rotation

    one = run_engine(
        model, prompts, turns=[TURN], options=options, fill_arena=True, report_manager=True
    )
    two = run_engine(
        model,
        prompts,
        turns=[TURN],
        options=options | {"tensor_parallel_size": 2},
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )

    assert_same_generation(two, one)
    check_turns(two, prompts)  # in their own process requests arrive at other steps
