"""The engine whose prompts attend by the kernel for Hopper, beside the engine as it is."""

import pytest
import torch

from jenga_kernels.triton.tiles import HOPPER, machine_of
from tests.kernels.support import DEVICE
from tests.vllm_plugin.conftest import assert_same_generation
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
