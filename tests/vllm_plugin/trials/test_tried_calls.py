"""What is tried of an engine's layers is what they launch."""

import pytest

from jenga_kernels.trial_calls import BY_TOKEN, PAGED, Call, View
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

MODELS = {
    "llama": {"paged_attention": 1},
    "gemma3_256": {"paged_attention": 2},  # with windows and without
    "gpt_oss": {"paged_attention": 2},  # sinks, too
    "granite_hybrid_64": {"paged_attention": 1, "state_scan": 1},
    "qwen3_next_64": {"paged_attention": 1, "delta_scan": 1},
    "deepseek_v2_64_heads": {"latent_attention": 1},
}
"""Model -> operation with kernels for a GPU -> kinds of its calls."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("0", id="first_runner"),
        pytest.param("1", id="second_runner", marks=pytest.mark.slow),
    ],
)
def calls(request, tiny_model, run_engine):
    """Get what each model's engine says will be called, and what is."""
    models = [str(tiny_model(name)) for name in MODELS]
    result = run_engine(
        models[0],
        prompts_of_lengths((5, 40), seed=0),
        models=models,
        options={"attention_backend": "JENGA_TRITON", "dtype": "bfloat16"},
        script="calls_process.py",
        environment={"VLLM_USE_V2_MODEL_RUNNER": request.param},
    )
    assert "error" not in result, result["error"][-4000:]
    return result


def without_counts(text):
    """A call's arguments, without those that tell one step, or layer, from another."""
    call = Call.from_json(text)
    counted = (*PAGED[call.operation], *BY_TOKEN[call.operation])
    return {
        name: (value.dtype, value.shape[name in counted :], value.strides)
        if isinstance(value, View)
        else value
        for name, value in call.arguments.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_layers_make_the_calls_that_they_say_are_to_be_tried(name, calls):
    told, made = calls[name]["told"], calls[name]["made"]

    assert {operation: len(kinds) for operation, kinds in told.items()} == MODELS[name]
    assert made.keys() == told.keys()
    for operation, kinds in told.items():
        of_layers, of_steps = (
            {key: without_counts(text) for key, text in each.items()}
            for each in (kinds, made[operation])
        )
        assert of_steps == of_layers
