"""Features of attention in the real engine, each by a tiny model that needs it.

Prefix caching is on and every prompt comes twice, so each feature is also read from pages hit.
"""

import json

import pytest

from tests.vllm_plugin.conftest import BOTH_WAYS, ROUNDED_TOLERANCE, assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
# Short, page-crossing, longer than one chunk of 64 tokens, longer than two.
PROMPTS = prompts_of_lengths((5, 33, 70, 150), seed=0)


def run_twice(run_engine, model, **job):
    """Run ours with every prompt given in two rounds; check what the second one hit."""
    options = JENGA | job.pop("options", {})
    ours = run_engine(
        model,
        PROMPTS + PROMPTS,
        rounds=2,
        options=options,
        fill_arena=True,
        report_manager=True,
        **job,
    )
    assert "error" not in ours, ours["error"][-4000:]
    hits = [output["cached_tokens"] for output in ours["outputs"]]
    assert hits == [0] * len(PROMPTS) + [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert ours["request_tokens"] == {}
    return ours


def twice(result):
    return result | {"outputs": result["outputs"] * 2} if "outputs" in result else result


@pytest.mark.slow
def test_chunked_local_attention_generates_what_transformers_generates(tiny_model, run_engine):
    model = tiny_model("llama4")

    theirs = run_engine(model, PROMPTS, script="reference_process.py")
    ours = run_twice(run_engine, model)

    assert_same_generation(ours, twice(theirs))


@pytest.mark.slow
def test_chunked_local_attention_generates_what_stock_vllm_generates(tiny_model, run_engine):
    model = tiny_model("llama4")

    stock = run_engine(model, PROMPTS, options={"block_size": 32})  # a divisor of its chunks
    ours = run_twice(run_engine, model)

    assert_same_generation(ours, twice(stock))


@pytest.mark.slow
def test_a_float8_cache_with_a_scale_per_head_generates_what_transformers_generates(
    tiny_model, run_engine
):
    model = tiny_model("llama_fp8_cache")

    theirs = run_engine(model, PROMPTS, script="reference_process.py", fp8_cache="float8_e4m3fn")
    ours = run_twice(run_engine, model)

    assert_same_generation(ours, twice(theirs), tolerance=ROUNDED_TOLERANCE)


@pytest.mark.slow
def test_a_float8_cache_generates_what_stock_vllm_generates_from_rounded_keys_and_values(
    tiny_model, run_engine
):
    model = tiny_model("gemma2")

    # Stock's own float8 cache truncates on a CPU, and not every CPU has it.
    stock = run_engine(model, PROMPTS, stores_rounded_to="float8_e4m3fn")
    ours = run_twice(run_engine, model, options={"kv_cache_dtype": "fp8"})

    assert_same_generation(ours, twice(stock), tolerance=ROUNDED_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_in_float8_e5m2_generates_what_transformers_generates(tiny_model, run_engine, name):
    model = tiny_model(name)

    theirs = run_engine(model, PROMPTS, script="reference_process.py", fp8_cache="float8_e5m2")
    exact = run_engine(model, PROMPTS, script="reference_process.py")
    ours = run_twice(run_engine, model, options={"kv_cache_dtype": "fp8_e5m2"})

    # As below.
    rounding = most_apart(exact, theirs)
    assert_same_generation(ours, twice(theirs), tolerance=rounding / 10)


STORED = {
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "float8_e4m3fn",
    "int4_per_token_head": "uint8",
}
"""Values of --kv-cache-dtype -> element type of the pages."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [
        ("llama", "int4_per_token_head"),
        pytest.param("llama", "int8_per_token_head", marks=pytest.mark.slow),
        pytest.param("llama", "fp8_per_token_head", marks=pytest.mark.slow),
        pytest.param("gemma3", "int8_per_token_head", marks=pytest.mark.slow),
        pytest.param("gemma3", "int4_per_token_head", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "int8_per_token_head", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "int4_per_token_head", marks=pytest.mark.slow),
    ],
)
def test_a_cache_with_a_scale_per_token_and_head_generates_what_transformers_generates(
    tiny_model, run_engine, name, cache_dtype
):
    model = tiny_model(name)
    stored = STORED[cache_dtype]

    theirs = run_engine(model, PROMPTS, script="reference_process.py", slot_scales=stored)
    exact = run_engine(model, PROMPTS, script="reference_process.py")
    ours = run_twice(run_engine, model, options={"kv_cache_dtype": cache_dtype})

    # Where an element lies between two steps, the last places of a sum decide which it becomes.
    rounding = most_apart(exact, theirs)
    assert_same_generation(ours, twice(theirs), tolerance=rounding / 10)


@pytest.mark.slow
def test_layers_that_keep_the_models_dtype_have_pages_of_their_own_size(tiny_model, run_engine):
    model = tiny_model("gemma3")
    kinds = json.loads((model / "config.json").read_text())["layer_types"]
    kept = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention" or layer == 2]
    assert 0 < len(kept) < len(kinds)
    scripts = {"script": "reference_process.py", "slot_scales": "int8"}
    options = {
        "kv_cache_dtype": "int8_per_token_head",
        "kv_cache_dtype_skip_layers": ["sliding_window", "2"],
    }

    theirs = run_engine(model, PROMPTS, **scripts, kept_layers=kept)
    all_rounded = run_engine(model, PROMPTS, **scripts)
    ours = run_twice(run_engine, model, options=options)

    assert_same_generation(ours, twice(theirs), tolerance=most_apart(all_rounded, theirs) / 10)


def most_apart(ours, theirs):
    """Greatest difference of two log-probabilities of the same token after the same tokens."""
    greatest = 0.0
    for our, their in zip(ours["outputs"], theirs["outputs"], strict=True):
        steps = zip(our["tokens"], their["tokens"], strict=True)
        num_same = next((i for i, (a, b) in enumerate(steps) if a != b), len(our["tokens"]))
        for a, b in list(zip(our["logprobs"], their["logprobs"], strict=True))[: num_same + 1]:
            greatest = max(greatest, *(abs(a[token] - b[token]) for token in a.keys() & b.keys()))
    return greatest


@pytest.mark.slow
def test_heads_of_512_beside_narrow_ones_generate_what_transformers_generates(
    tiny_model, run_engine
):
    model = tiny_model("gemma4")  # whose last layers read the keys and values of others, besides

    theirs = run_engine(model, PROMPTS, script="reference_process.py")
    ours = run_twice(run_engine, model)

    assert_same_generation(ours, twice(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "gemma4_experts"])
def test_heads_of_512_beside_narrow_ones_generate_what_stock_vllm_generates(
    tiny_model, run_engine, name
):
    model = tiny_model(name)

    stock = run_engine(model, PROMPTS)
    ours = run_twice(run_engine, model)

    assert_same_generation(ours, twice(stock))


# Its processor needs a tokenizer, and vLLM does not cut the prompts of such models into chunks.
WHISPER = {"skip_tokenizer_init": False, "max_num_batched_tokens": 256}


@BOTH_WAYS
def test_cross_attention_generates_what_transformers_generates(
    by_references, tiny_model, run_engine
):
    model, audio_seeds = tiny_model("whisper"), [0, 1, 2, 1]

    theirs = run_engine(model, PROMPTS, script="reference_process.py", audio_seeds=audio_seeds)
    ours = run_engine(
        model,
        PROMPTS,
        audio_seeds=audio_seeds,
        options=WHISPER | {"attention_backend": "JENGA_TRITON"},
        fill_arena=True,
        report_manager=True,
        by_references=by_references,
    )

    assert_same_generation(ours, theirs)
    assert ours["request_tokens"] == {}


@pytest.mark.slow
def test_cross_attention_over_slots_with_scales_generates_what_transformers_generates(
    tiny_model, run_engine
):
    model, audio_seeds = tiny_model("whisper"), [0, 1, 2, 1]
    job = {"script": "reference_process.py", "audio_seeds": audio_seeds}
    options = {"attention_backend": "JENGA_TRITON", "kv_cache_dtype": "int8_per_token_head"}

    exact = run_engine(model, PROMPTS, **job)
    theirs = run_engine(model, PROMPTS, slot_scales="int8", **job)
    ours = run_engine(model, PROMPTS, audio_seeds=audio_seeds, options=WHISPER | options)

    assert_same_generation(ours, theirs, tolerance=most_apart(exact, theirs) / 10)


@pytest.mark.slow
def test_cross_attention_generates_what_stock_vllm_generates_with_requests_preempted(
    tiny_model, run_engine
):
    model = tiny_model("whisper")
    prompts = prompts_of_lengths((90, 100, 110, 95, 105, 60), seed=5)
    job = {"audio_seeds": list(range(len(prompts))), "max_tokens": 60}

    stock = run_engine(model, prompts, options=WHISPER, **job)
    ours = run_engine(
        model,
        prompts,
        options=WHISPER | {"attention_backend": "JENGA_TRITON", "kv_cache_memory_bytes": 2 << 20},
        report_manager=True,
        **job,
    )

    assert_same_generation(ours, stock)
    assert ours["preemptions"] > 0
