"""The real vLLM engine on JENGA_TRITON against stock vLLM on the same machine."""

import os

import pytest

from tests.conftest import EMULATED_GPU, HAS_GPU
from tests.vllm_plugin.conftest import (
    BOTH_WAYS,
    V2_RUNNER,
    assert_same_generation,
    gemma_3_directory,
)
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON"}
# Short, page-crossing, longer than the windows (32 and 40), longer than one chunk of 64 tokens.
PROMPTS = prompts_of_lengths((5, 33, 70, 150), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_engine_generates_what_stock_vllm_generates(name, tiny_model, run_engine):
    model = tiny_model(name)

    stock = run_engine(model, PROMPTS)
    ours = run_engine(model, PROMPTS, options=JENGA, fill_arena=True, report_manager=True)

    assert_same_generation(ours, stock)
    assert ours["request_tokens"] == {}


@BOTH_WAYS
def test_gemma_3_with_its_real_weights_generates_what_stock_vllm_generates(
    by_references, run_engine
):
    model = gemma_3_directory()
    options = {
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 96 << 20,
        "max_num_batched_tokens": 512,
    }
    # 15 of its 18 layers slide over 512 tokens: one prompt crosses pages, one is longer than that.
    prompts = [
        [2, *prompt[1:]] for prompt in prompts_of_lengths((40, 700), seed=1, vocab_size=9000)
    ]

    stock = run_engine(model, prompts, options=options)
    ours = run_engine(
        model,
        prompts,
        options=options | JENGA,
        fill_arena=True,
        report_manager=True,
        by_references=by_references,
    )

    assert_same_generation(ours, stock)


@pytest.mark.slow
def test_engine_in_processes_of_its_own_generates_the_same(tiny_model, run_engine):
    model = tiny_model("gpt_oss")

    stock = run_engine(model, PROMPTS)
    ours = run_engine(
        model,
        PROMPTS,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_ATTENTION_BACKEND": "JENGA_TRITON",
            "VLLM_LOGGING_LEVEL": "INFO",
        },
        by_references=True,
    )

    assert_same_generation(ours, stock)
    assert "JENGA_TRITON: planned geometry" in ours["log"]
    by_references = "JENGA_TRITON: PyTorch references compute attention and states on this CPU"
    has_kernels = HAS_GPU or EMULATED_GPU or os.environ.get(V2_RUNNER) == "1"
    assert (by_references in ours["log"]) == (not has_kernels)
    assert "JENGA_TRITON" not in stock["log"]


@pytest.mark.slow
def test_engine_preempts_in_a_small_arena_and_loses_nothing(tiny_model, run_engine):
    model = tiny_model("gpt_oss")
    prompts = prompts_of_lengths((30, 50, 40, 25, 45, 20), seed=5)  # short beside their answers

    stock = run_engine(model, prompts, max_tokens=60)
    ours = run_engine(
        model,
        prompts,
        max_tokens=60,
        options=JENGA | {"kv_cache_memory_bytes": 3 << 18},
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, stock)
    assert ours["preemptions"] > 0


def test_an_arena_too_small_for_one_request_is_refused_at_start_up_with_the_numbers(
    tiny_model, run_engine
):
    result = run_engine(
        tiny_model("gpt_oss"),
        [],
        options=JENGA | {"kv_cache_memory_bytes": 600 << 10},
        by_references=True,
    )

    assert "one request of 256 tokens (--max-model-len) takes" in result["error"]
    assert "614400 bytes of cache memory" in result["error"]
    assert "would do (--kv-cache-memory-bytes" in result["error"]
