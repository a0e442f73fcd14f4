"""vLLM's second model runner, which its GPU build uses by default, in the real engine.

Without a GPU its own kernels run in Triton's interpreter as ours do (`interpreted_triton`), and its
CUDA graphs are emulated (`emulated_graphs`); the next step is scheduled while one runs, as it is by
default on a GPU. Stock vLLM is on its first runner, without graphs, a step at a time.
`VLLM_USE_V2_MODEL_RUNNER=1` lets all other tests of engines run on the second.
"""

import pytest

from tests.vllm_plugin.caching.test_prefix_caching import check_hits, prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.drafts.test_speculation import MAX_TOKENS, MTP, by_draft, check_drafts
from tests.vllm_plugin.drafts.test_speculation import PROMPTS as DRAFTED_PROMPTS
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.states.test_hybrid_engine import (
    CUTS,
    NUM_PROMPTS,
    TURN,
    check_turns,
    hits_of,
)

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}


def graphs_of(*sizes):
    """Options for CUDA graphs of decode steps of so many tokens."""
    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    compilation |= {"cudagraph_capture_sizes": list(sizes)}
    return {"enforce_eager": False, "compilation_config": compilation}


@pytest.fixture
def run_ours(run_engine):
    """Run ours on the second runner, with prefix caching, over an arena full of NaN."""

    def run(model, prompts, *, options, **job):
        captures = "compilation_config" in options
        result = run_engine(
            model,
            prompts,
            options=JENGA | options,
            captures=captures,
            environment={V2_RUNNER: "1", "VLLM_LOGGING_LEVEL": "INFO"},
            fill_arena=True,
            report_manager=True,
            **job,
        )
        assert "error" not in result, result["error"][-4000:]
        assert "Using V2 Model Runner" in result["log"]
        assert result["request_tokens"] == {}
        assert result["scheduler"] == ("AsyncScheduler" if captures else None)
        return result

    return run


def test_replayed_steps_of_windows_read_what_later_steps_wrote(tiny_model, run_engine, run_ours):
    model, prompts = tiny_model("gpt_oss"), prompts_of_lengths((90, 27), seed=5)

    stock = run_engine(model, prompts, max_tokens=10)
    ours = run_ours(model, prompts, max_tokens=10, options=graphs_of(1, 4))

    assert_same_generation(ours, stock)
    assert sum(ours["replays"].values()) >= 8
    assert max(ours["warm_up"]) == 64  # a prompt as long as a step may be, before any came


@pytest.mark.slow
def test_an_arena_that_evicts_and_preempts(tiny_model, run_engine, run_ours):
    model = tiny_model("gpt_oss")
    prompts = prompts_of_lengths((90, 100, 110, 95, 105, 60), seed=5, shared_tokens=40)

    stock = run_engine(model, prompts, max_tokens=45)
    ours = run_ours(model, prompts, max_tokens=45, options={"kv_cache_memory_bytes": 1 << 20})

    assert_same_generation(ours, stock)
    assert ours["preemptions"] > 0


@pytest.mark.slow
def test_replayed_steps_write_the_states_that_later_requests_start_from(
    tiny_model, run_engine, run_ours
):
    model = tiny_model("granite_hybrid")
    prompts = prompts_over_shared_prefixes(NUM_PROMPTS, seed=21)

    stock = run_engine(model, prompts, turns=[TURN], options=CUTS)
    ours = run_ours(model, prompts, turns=[TURN], options=CUTS | graphs_of(1, 2, 4))

    assert_same_generation(ours, stock)
    check_hits(ours)
    check_turns(ours, prompts)
    assert any(hits_of(ours, 0, NUM_PROMPTS))
    assert len(ours["replays"]) > 1
    assert max(ours["warm_up"]) > 16  # long enough to keep a state on its way


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [{}, graphs_of(4, 8, 16)], ids=["eager", "replayed"])
def test_a_draft_model_beside_windows_changes_no_token(graphs, tiny_model, run_engine, run_ours):
    model, draft = tiny_model("gemma2"), tiny_model("gemma2_draft")
    twice = DRAFTED_PROMPTS + DRAFTED_PROMPTS

    stock = run_engine(model, DRAFTED_PROMPTS, max_tokens=MAX_TOKENS)
    ours = run_ours(
        model, twice, max_tokens=MAX_TOKENS, rounds=2, options=by_draft(draft, 3) | graphs
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    check_drafts(ours)
    hits = hits_of(ours, len(DRAFTED_PROMPTS), 2 * len(DRAFTED_PROMPTS))
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in DRAFTED_PROMPTS]
    assert bool(ours["replays"]) == bool(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "jamba", "qwen3_next", "lfm2"])
def test_replayed_steps_of_drafts_leave_the_states_of_what_is_accepted(
    name, tiny_model, run_engine, run_ours
):
    model, draft = tiny_model(f"{name}_calm"), tiny_model(f"{name}_echo")
    prompts, job = DRAFTED_PROMPTS[1:3], {"max_tokens": 16}

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    options = by_draft(draft, 3) | graphs_of(4, 8)
    ours = run_ours(model, prompts * 2, rounds=2, options=options, **job)

    assert_same_generation(ours, theirs | {"outputs": theirs["outputs"] * 2})
    check_drafts(ours)
    hits = hits_of(ours, len(prompts), 2 * len(prompts))
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert ours["replays"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options", "sizes"),  # the last are of one request and of two
    [
        ("deepseek_v3_mtp", lambda _: MTP, (4, 8)),
        ("qwen3_next_mtp", lambda _: MTP, (4, 8)),
        ("deepseek_v2_calm", lambda model: by_draft(model("llama_calmer"), 4), (5, 10)),
        ("llama_calmer", lambda model: by_draft(model("eagle3_head"), method="eagle3"), (4, 8)),
    ],
    ids=["mtp", "mtp_of_states", "draft_model_of_latents", "eagle3"],
)
def test_replayed_steps_of_drafted_tokens(target, options, sizes, tiny_model, run_engine, run_ours):
    model, prompts = tiny_model(target), DRAFTED_PROMPTS[1:3]
    options, plain = options(tiny_model), {"attention_backend": "JENGA_TRITON"}

    stock = run_engine(model, prompts, max_tokens=16, options=plain)
    ours = run_ours(
        model, prompts * 2, rounds=2, max_tokens=16, options=options | graphs_of(1, 2, *sizes)
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    check_drafts(ours)
    assert set(ours["replays"]) == {str(tokens) for tokens in sizes}


@pytest.mark.slow
def test_replayed_steps_of_latent_attention(tiny_model, run_engine, run_ours):
    model, prompts = tiny_model("deepseek_v2"), prompts_of_lengths((90, 33, 70), seed=5)

    stock = run_engine(model, prompts, max_tokens=24)
    ours = run_ours(model, prompts, max_tokens=24, options=graphs_of(1, 2, 4))

    assert_same_generation(ours, stock)
    assert sum(ours["replays"].values()) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jamba", "qwen3_next", "llama4", "lfm2"])
def test_replayed_steps_generate_what_transformers_generates(
    name, tiny_model, run_engine, run_ours
):
    model = tiny_model(name)
    prompts = prompts_over_shared_prefixes(NUM_PROMPTS, seed=22)

    theirs = run_engine(model, prompts, turns=[TURN], script="reference_process.py")
    ours = run_ours(model, prompts, turns=[TURN], options=CUTS | graphs_of(1, 2, 4))

    assert_same_generation(ours, theirs)
    assert ours["replays"]
