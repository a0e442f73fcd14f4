"""Multi-head latent attention in the real engine, by tiny models of DeepSeek's two designs.

Steps of at most 64 tokens mix decoded tokens, prompts short enough to be absorbed and chunks that
are not, with and without tokens computed before them.
"""

import pytest

from tests.vllm_plugin.attention.test_attention_features import JENGA, PROMPTS, run_twice, twice
from tests.vllm_plugin.conftest import BOTH_WAYS, ROUNDED_TOLERANCE, assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm


@BOTH_WAYS
def test_latent_attention_generates_what_transformers_generates(
    by_references, tiny_model, run_engine
):
    model = tiny_model("deepseek_v3")

    theirs = run_engine(model, PROMPTS, script="reference_process.py")
    ours = run_twice(run_engine, model, by_references=by_references)

    assert_same_generation(ours, twice(theirs))
    hits = sum(output["cached_tokens"] for output in ours["outputs"])
    assert ours["cache"]["hit_tokens"] == hits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rounds_latents"),
    [
        # Queries of a long chunk read its own tokens before they are stored.
        pytest.param({}, True, id="long_chunks_of_rounded_latents"),
        pytest.param({"kv_cache_dtype_skip_layers": ["0"]}, True, id="but_for_a_layer"),
        pytest.param({"max_num_batched_tokens": 32}, False, id="all_absorbed"),
    ],
)
def test_float8_latents_generate_what_transformers_generates_from_rounded_ones(
    tiny_model, run_engine, options, rounds_latents
):
    # Of the last layer some values saturate.
    model, scales = tiny_model("deepseek_v3"), {"latent_scales": [0.6, 0.05, 0.011]}

    theirs = run_engine(model, PROMPTS, script="reference_process.py", **scales)
    ours = run_twice(
        run_engine,
        model,
        options={"kv_cache_dtype": "fp8"} | options,
        rounds_latents=rounds_latents,
        **scales,
    )

    assert_same_generation(ours, twice(theirs), tolerance=ROUNDED_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("batched_tokens", [16, 256], ids=["all_absorbed", "whole_prompts"])
def test_latent_attention_generates_what_stock_vllm_generates(
    tiny_model, run_engine, batched_tokens
):
    model = tiny_model("deepseek_v2")

    stock = run_engine(model, PROMPTS)
    ours = run_twice(run_engine, model, options={"max_num_batched_tokens": batched_tokens})

    assert_same_generation(ours, twice(stock))


@pytest.mark.slow
def test_latent_attention_generates_what_stock_vllm_generates_with_requests_preempted(
    tiny_model, run_engine
):
    model = tiny_model("deepseek_v2")
    prompts = prompts_of_lengths((90, 100, 110, 95, 105, 60), seed=5, shared_tokens=40)
    job = {"max_tokens": 60}

    stock = run_engine(model, prompts, **job)
    ours = run_engine(
        model,
        prompts,
        options=JENGA | {"kv_cache_memory_bytes": 2 << 20},
        fill_arena=True,
        report_manager=True,
        **job,
    )

    assert_same_generation(ours, stock)
    assert ours["preemptions"] > 0
    assert ours["request_tokens"] == {}
