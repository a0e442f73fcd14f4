"""What a step costs, from the parameters that a configuration tells of; no engine runs."""

from types import SimpleNamespace

import pytest

from jenga.admission.reserve import STEP_TOKENS
from jenga.vllm_plugin.arena.step_cost import parameters_over_active, step_tokens

# Fields of published configurations, their experts, those for a token, parameters and active ones.
MODELS = {
    "gpt-oss-20b": (
        {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
        {"vocab_size": 201088},
        (32, 4),
        20.9 / 3.61,
    ),
    "Granite 4.0 H Small": (
        {"hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40},
        {"vocab_size": 100352, "shared_intermediate_size": 1536},
        (72, 10),
        32.2 / 9.0,
    ),
    "Qwen3-Next 80B": (
        {"hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48},
        {
            "vocab_size": 151936,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
        },
        (512, 10),
        80 / 3.0,
    ),
    "DeepSeek-V3": (
        {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
        {
            "vocab_size": 129280,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
        },
        (256, 8),
        671 / 37,
    ),
    "Jamba 1.5 Mini": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        {"vocab_size": 65536, "expert_layer_period": 2},
        (16, 2),
        51.6 / 12,
    ),
    "Mixtral 8x7B": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        {"vocab_size": 32000},
        (8, 2),
        46.7 / 12.9,
    ),
}


def config_of(fields, *, num_experts=0, experts_per_token=0):
    """A vLLM configuration as far as it is read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**fields),
            get_num_experts=lambda: num_experts,
            get_num_experts_per_tok=lambda: experts_per_token,
        )
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_experts_costs_as_much_more_as_it_has_parameters_that_a_token_does_not_meet(
    name,
):
    common, others, (num_experts, experts_per_token), ratio = MODELS[name]

    found = step_tokens(
        config_of(common | others, num_experts=num_experts, experts_per_token=experts_per_token)
    )

    # Attention is estimated, so published numbers are met within a quarter.
    assert found / STEP_TOKENS == pytest.approx(ratio, rel=0.25)


def test_a_dense_model_costs_what_it_costs():
    common, others, _, _ = MODELS["Mixtral 8x7B"]
    assert step_tokens(config_of(common | others)) == STEP_TOKENS


@pytest.mark.parametrize("missing", ["hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_model_of_which_too_little_is_known_counts_as_dense(missing):
    common, others, _, _ = MODELS["Mixtral 8x7B"]
    fields = {name: value for name, value in (common | others).items() if name != missing}

    config = SimpleNamespace(**fields)

    assert parameters_over_active(config, num_experts=8, experts_per_token=2) == 1


def test_experts_of_which_no_number_is_chosen_count_as_dense():
    common, others, _, _ = MODELS["Mixtral 8x7B"]
    config = SimpleNamespace(**common, **others)
    for experts_per_token in (0, 9):
        assert (
            parameters_over_active(config, num_experts=8, experts_per_token=experts_per_token) == 1
        )
