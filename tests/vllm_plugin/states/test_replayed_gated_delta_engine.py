"""Models with gated delta nets whose steps seldom write a state, in the real engine."""

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import check_hits, prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import (
    NUM_WORKERS,
    V2_RUNNER,
    assert_same_generation,
    tokens_lost_to_a_head,
)
from tests.vllm_plugin.drafts.test_speculation import MTP, by_draft, check_drafts
from tests.vllm_plugin.drafts.test_speculation import PROMPTS as DRAFTED_PROMPTS
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.states.test_gated_delta_engine import PROMPTS
from tests.vllm_plugin.states.test_hybrid_engine import (
    CUTS,
    JENGA,
    NO_ROOM_LEFT,
    TURN,
    check_turns,
)
from tests.vllm_plugin.states.test_replayed_states import ALWAYS, hits_of_answers

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REPLAY = {"JENGA_HISTORY_TOKENS": "8"} | ALWAYS
FLAG = {"use_replayssm": True, "replayssm_buffer_len": 8}
"""The same in vLLM's words."""


def run_replaying(run_engine, model, prompts, *, options, environment=REPLAY, **job):
    """Run ours over an arena full of NaN; check that it keeps histories."""
    result = run_engine(
        model,
        prompts,
        options=JENGA | options,
        fill_arena=True,
        report_manager=True,
        environment={"VLLM_LOGGING_LEVEL": "INFO"} | environment,
        **job,
    )
    assert "error" not in result, result["error"][-4000:]
    assert "layers of the gated delta rule keep the inputs of up to 8 tokens" in result["log"]
    assert result["request_tokens"] == {}
    return result


def ends_of(prompts):
    return [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


@pytest.mark.parametrize("is_second", [False, True], ids=["first_runner", "second_runner_graphs"])
def test_hybrid_generates_what_transformers_generates_and_goes_on_from_its_answers(
    is_second, tiny_model, run_engine
):
    model, prompts = tiny_model("qwen3_next"), prompts_over_shared_prefixes(3, seed=31)
    job = {"max_tokens": 70, "turns": [TURN]}
    options = CUTS | {"max_num_seqs": 2}

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_replaying(
        run_engine,
        model,
        prompts,
        options=options | (FLAG | graphs_of(1, 2) if is_second else {}),
        captures=is_second,
        environment=ALWAYS | {V2_RUNNER: "1"} if is_second else {V2_RUNNER: "0"} | REPLAY,
        **job,
    )

    assert_same_generation(ours, theirs)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(prompts) :]]
    assert hits == hits_of_answers(prompts, 70)
    assert not is_second or sum(ours["replays"].values()) >= 70


def test_hybrid_that_always_evicts_and_preempts_loses_nothing(tiny_model, run_engine):
    model, prompts = tiny_model("qwen3_next"), prompts_over_shared_prefixes(8, seed=31)

    theirs = run_engine(model, prompts, max_tokens=60, script="reference_process.py")
    ours = run_replaying(
        run_engine,
        model,
        prompts,
        max_tokens=60,
        options=CUTS | {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20},
        environment=REPLAY | NO_ROOM_LEFT,
    )

    assert_same_generation(ours, theirs)
    assert ours["preemptions"] > 0
    assert check_hits(ours) > 0  # pages were evicted


def test_what_the_arena_lost_is_found_in_host_memory(tiny_model, run_engine):
    model, prompts = tiny_model("qwen3_next"), prompts_over_shared_prefixes(8, seed=23)

    theirs = run_engine(model, prompts, turns=[TURN], script="reference_process.py")
    ours = run_replaying(
        run_engine,
        model,
        prompts,
        turns=[TURN],
        options=CUTS | {"kv_cache_memory_bytes": 5 << 17, "kv_offloading_size": 1 / 32},
        loads_ahead=True,
    )

    assert_same_generation(ours, theirs)
    assert ours["host"]["loaded_bytes"] > 0


def test_drafts_take_no_states_and_rejected_ones_leave_no_trace_in_graphs(tiny_model, run_engine):
    model, draft = tiny_model("qwen3_next_calm"), tiny_model("qwen3_next_echo")
    prompts, job = DRAFTED_PROMPTS[1:3], {"max_tokens": 24}

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_replaying(
        run_engine,
        model,
        prompts * 2,
        rounds=2,
        options=by_draft(draft, 3) | graphs_of(4, 8),
        captures=True,
        environment=REPLAY | {V2_RUNNER: "1"},
        **job,
    )

    assert_same_generation(ours, theirs | {"outputs": theirs["outputs"] * 2})
    check_drafts(ours)
    assert [output["cached_tokens"] for output in ours["outputs"][2:]] == ends_of(prompts)
    assert ours["replays"]


def test_with_ngrams_another_turn_starts_near_the_end_of_a_long_answer(tiny_model, run_engine):
    model, prompts = tiny_model("qwen3_next_calm"), prompts_over_shared_prefixes(2, seed=25)
    job = {"max_tokens": 70, "turns": [TURN]}
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_replaying(
        run_engine, model, prompts, options=CUTS | {"speculative_config": drafts}, **job
    )

    assert_same_generation(ours, theirs)
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][2:]]
    ends = hits_of_answers(prompts, 70)
    assert all(hit >= end for hit, end in zip(hits, ends_of(prompts), strict=True))
    assert any(hit == end for hit, end in zip(hits, ends, strict=True)), (hits, ends)


@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two workers")
def test_two_tensor_parallel_workers_generate_what_transformers_generates(tiny_model, run_engine):
    model, job = tiny_model("qwen3_next"), {"turns": [TURN], "max_tokens": 20}
    two_workers = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}

    theirs = run_engine(model, PROMPTS, script="reference_process.py", **job)
    two = run_engine(
        model,
        PROMPTS,
        options=CUTS | JENGA | {"tensor_parallel_size": 2},
        environment=REPLAY | {"VLLM_LOGGING_LEVEL": "INFO"} | two_workers,
        **job,
    )

    assert "error" not in two, two["error"][-4000:]
    assert "layers of the gated delta rule keep the inputs of up to 8 tokens" in two["log"]
    assert_same_generation(two, theirs)
    check_turns(two, PROMPTS)  # in their own process requests arrive at other steps


@pytest.mark.parametrize("runner", ["0", "1"], ids=["first_runner", "second_runner"])
@pytest.mark.parametrize("name", ["qwen3_next_mtp", "qwen3_5_mtp"])
def test_layers_that_predict_further_tokens_change_no_token(name, runner, tiny_model, run_engine):
    model, prompts = tiny_model(name), DRAFTED_PROMPTS[:3]
    job = {"max_tokens": 24, "reads_images": name.startswith("qwen3_5")}  # as vLLM's module does

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_replaying(
        run_engine,
        model,
        prompts * 2,
        rounds=2,
        options=CUTS | MTP,
        environment=REPLAY | {V2_RUNNER: runner},
        **job,
    )

    assert_same_generation(ours, theirs | {"outputs": theirs["outputs"] * 2})
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(prompts) :]]
    lost = tokens_lost_to_a_head()
    assert hits == [max(0, end - lost) for end in ends_of(prompts)]
