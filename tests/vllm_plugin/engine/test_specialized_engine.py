"""The engine whose layers attend by kernels for Hopper, beside the engine as it is elsewhere."""

import pytest
import torch

from jenga_kernels.triton.lib.tiles import HOPPER, machine_of
from tests.conftest import EMULATED_GPU
from tests.kernels.support import DEVICE
from tests.vllm_plugin.conftest import ROUNDED_TOLERANCE, assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        machine_of(torch.device(DEVICE)).capability != HOPPER,
        reason="only Hopper runs it; test_emulated_engine.py does so in software",
    ),
]


HALF_TOLERANCE = 0.06
"""Of log-probabilities in float16 beside those in float32: up to 0.024 was seen."""


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    # Gemma 3 takes no float16; bfloat16 has three bits less.
    [("llama", "float16", None), ("gemma3_256", "bfloat16", 8 * HALF_TOLERANCE)],
)
def test_engine_with_the_specialized_prefill_generates_what_it_does_without(
    name, dtype, tolerance, tiny_model, run_engine
):
    model = tiny_model(name)
    prompts = prompts_of_lengths((5, 33, 70, 150), seed=0)
    options = {"attention_backend": "JENGA_TRITON", "dtype": dtype}

    plain = run_engine(
        model,
        prompts,
        options=options,
        max_tokens=4,
        environment={"JENGA_SPECIALIZED_PREFILL": "0"},
    )
    ours = run_engine(model, prompts, options=options, max_tokens=4, fill_arena=True)

    assert_same_generation(ours, plain, **({} if tolerance is None else {"tolerance": tolerance}))
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


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("granite_hybrid_64", "state_scan_specialized"), ("qwen3_next_64", "delta_scan_hopper")],
)
def test_engine_with_scans_for_hopper_generates_what_it_does_in_float32(
    name, kernel, tiny_model, run_engine
):
    model = tiny_model(name)
    prompts = prompts_of_lengths((5, 64, 150), seed=0)
    options = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}

    plain = run_engine(model, prompts, options=options | {"dtype": "float32"}, max_tokens=4)
    ours = run_engine(
        model,
        prompts,
        options=options | {"dtype": "float16"},
        max_tokens=4,
        fill_arena=True,
        environment={"JENGA_SPECIALIZED_SCANS": "1"},  # so few heads would do without
    )

    assert_same_generation(ours, plain, tolerance=HALF_TOLERANCE)
    assert plain["has_hopper_scans"] == []
    assert ours["has_hopper_scans"] == [f"jenga_kernels.triton.{kernel}"]


ATTENTION = "attention_prefill_hopper_kernel"

LAUNCHED = {
    "gemma3_256": {ATTENTION},
    "deepseek_v2_64_heads": {"latent_decode_hopper_kernel"},
    "granite_hybrid_64": {ATTENTION, "state_scan_specialized_kernel"},
    # So few heads are scanned by the kernels of all GPUs.
    "qwen3_next_64": {ATTENTION},
}
"""Model -> the kernels for Hopper that serve it."""


@pytest.mark.skipif(
    not EMULATED_GPU, reason="notes launches of trials, which elsewhere are another process's"
)
@pytest.mark.parametrize("name", LAUNCHED)
def test_engine_launches_what_it_has_tried_with_the_same_strides_and_tiles(
    name, tiny_model, run_engine
):
    result = run_engine(
        tiny_model(name),
        prompts_of_lengths((5, 70), seed=0),
        options={"attention_backend": "JENGA_TRITON", "dtype": "bfloat16"},
        max_tokens=2,
        script="tried_process.py",
    )

    assert "error" not in result, result["error"][-4000:]
    tried, launched = (
        {(kernel, tuple(facts)) for kernel, facts in result[when]} for when in ("tried", "launched")
    )
    assert {kernel for kernel, _ in launched} == LAUNCHED[name]
    assert launched <= tried
