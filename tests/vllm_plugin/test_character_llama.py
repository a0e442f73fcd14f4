"""character.ai's design in the real engine, against a dense model."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.vllm_plugin.conftest import NUM_WORKERS, V2_RUNNER, assert_same_generation
from tests.vllm_plugin.dense_character import dense_answers
from tests.vllm_plugin.engine_process import prompts_of_lengths
from tests.vllm_plugin.test_prefix_caching import check_hits, prompts_over_shared_prefixes

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
# Shorter than a page, longer than the windows of 40 tokens, longer than a step of 64.
PROMPTS = prompts_of_lengths((5, 33, 70, 150), seed=31)
# A budget that cuts prompts anywhere, the fewer tokens the more others decode.
CUTS = {"max_num_batched_tokens": 37, "max_num_seqs": 3}


@pytest.fixture(scope="session")
def model(tiny_model):
    return tiny_model("character_llama")


def twice(answers):
    return {"outputs": answers["outputs"] * 2}


def test_engine_generates_what_a_dense_model_generates_and_finds_its_prefixes(model, run_engine):
    ours = run_engine(
        model,
        PROMPTS * 2,
        rounds=2,
        max_tokens=24,
        options=JENGA | CUTS,
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, twice(dense_answers(model, PROMPTS, 24)))
    assert ours["request_tokens"] == {}
    hits = [output["cached_tokens"] for output in ours["outputs"]]
    assert hits == [0] * 4 + [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.slow
def test_kernels_generate_what_a_dense_model_generates(model, run_engine):
    ours = run_engine(
        model, PROMPTS[1:3], max_tokens=12, options=JENGA | CUTS, fill_arena=True
    )

    assert_same_generation(ours, dense_answers(model, PROMPTS[1:3], 12))
