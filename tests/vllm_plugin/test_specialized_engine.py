"""The engine whose layers attend by kernels for Hopper, beside the engine as it is elsewhere."""

import pytest
import torch

from jenga_kernels.triton.tiles import HOPPER, machine_of
from tests.kernels.support import DEVICE
from tests.vllm_plugin.conftest import ROUNDED_TOLERANCE, assert_same_generation
from tests.vllm_plugin.engine_process import prompts_of_lengths

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        machine_of(torch.device(DEVICE)).capability != HOPPER,
        reason="only Hopper runs it; test_emulated_engine.py does so in software",
    ),
]


def test_engine_with_the_specialized_prefill_generates_what_it_does_without(tiny_model, run_engine):
    model = tiny_model("llama")
    prompts = prompts_of_lengths((5, 33, 70, 150), seed=0)
    options = {"attention_backend": "JENGA_TRITON", "dtype": "float16"}

    plain = run_engine(
        model,
        prompts,
        options=options,
        max_tokens=4,
        environment={"JENGA_SPECIALIZED_PREFILL": "0"},
    )
    ours = run_engine(model, prompts, options=options, max_tokens=4, fill_arena=True)

    assert_same_generation(ours, plain)
    assert ours["has_specialized_prefill"]
    assert not plain["has_specialized_prefill"]


def test_engine_with_specialized_latents_generates_what_it_does_without(tiny_model, run_engine):
    model = tiny_model("deepseek_v2_64_heads")
    prompts = prompts_of_lengths((5, 33, 150), seed=0)
    options = {"attention_backend": "JENGA_TRITON", "dtype": "float16"}

    plain = run_engine(
        model,
        prompts,
        options=options,
        max_tokens=4,
        environment={"JENGA_SPECIALIZED_LATENTS": "0"},
    )
    ours = run_engine(model, prompts, options=options, max_tokens=4, fill_arena=True)

    # Results of 64 heads are rounded to 16 bits in each layer, and were seen 0.002 apart.
    assert_same_generation(ours, plain, tolerance=ROUNDED_TOLERANCE)
    assert ours["has_specialized_latents"]
    assert not plain["has_specialized_latents"]
