"""Caches of another 16-bit float than the model's own.

vLLM's CPU build cannot be compared with as it is: with such a cache its attention takes the cache's
bytes for elements of the model's type, and its latent attention raises. It is given keys and values
that the cache would hold exactly, in a cache of the model's own type.
"""

import pytest

from tests.vllm_plugin.conftest import (
    LOGPROB_TOLERANCE,
    ROUNDED_TOLERANCE,
    assert_same_generation,
)
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

PROMPTS = prompts_of_lengths((5, 100, 64, 21), seed=11, shared_tokens=20)

BFLOAT16_TOLERANCE = 0.05
"""Greatest difference of log-probabilities of models in bfloat16 that round in another order."""

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run(run_engine, tiny_model):
    """Run an engine on a model: ours with a cache of a type, or stock with what that would hold."""

    def run(name, dtype, *, cache_dtype="auto", stores_rounded_to=None, is_stock=False):
        backend = {} if is_stock else {"attention_backend": "JENGA_TRITON"}
        job = {"stores_rounded_to": stores_rounded_to} if stores_rounded_to else {}
        options = {"dtype": dtype, "kv_cache_dtype": cache_dtype, "enable_prefix_caching": True}
        return run_engine(tiny_model(name), PROMPTS, options=options | backend, **job)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16"])
def test_a_model_in_float32_reads_what_a_cache_of_16_bits_holds(cache_dtype, run):
    ours = run("gemma3", "float32", cache_dtype=cache_dtype)
    stock = run("gemma3", "float32", stores_rounded_to=cache_dtype, is_stock=True)

    assert_same_generation(ours, stock)
    assert any(output["cached_tokens"] for output in ours["outputs"])


@pytest.mark.slow
def test_latents_of_a_model_in_float32_are_read_from_a_cache_of_16_bits(run):
    # A chunk of a prompt reads its own latents as they were before they were stored.
    rounds = {"stores_rounded_to": "bfloat16"}

    ours = run("deepseek_v2", "float32", cache_dtype="bfloat16", **rounds)
    stock = run("deepseek_v2", "float32", is_stock=True, **rounds)

    assert_same_generation(ours, stock, tolerance=ROUNDED_TOLERANCE)


@pytest.mark.slow
def test_a_model_in_float16_is_served_with_a_cache_in_bfloat16(run):
    ours = run("llama", "float16", cache_dtype="bfloat16")
    stock = run("llama", "float16", stores_rounded_to="bfloat16", is_stock=True)

    assert_same_generation(ours, stock, tolerance=BFLOAT16_TOLERANCE)


@pytest.mark.slow
def test_a_cache_in_float16_holds_what_a_model_in_bfloat16_stores(run):
    ours = run("gemma3", "bfloat16", cache_dtype="float16")

    assert_same_generation(ours, run("gemma3", "bfloat16"), tolerance=LOGPROB_TOLERANCE)
