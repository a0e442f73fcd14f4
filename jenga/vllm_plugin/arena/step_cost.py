"""What a step costs beside what it computes, told to the manager in tokens of a prompt.

A model of experts reads all of them for the tokens of a step and multiplies each with a few, so
that a step costs as much as more tokens than one of a dense model does, by as much as it has more
parameters than a token meets.
"""

from typing import TYPE_CHECKING, Any

from jenga.admission.reserve import STEP_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MATRICES = 3  # of an expert: gate, up and down
_ATTENTION_MATRICES = 4  # hidden size by hidden size, about, of whatever mixes tokens
_PERIODS = ("interleave_moe_layer_step", "expert_layer_period", "decoder_sparse_step")
_SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts")


def step_tokens(vllm_config: "VllmConfig") -> float:
    """Get about how many tokens of a prompt take as long as reading the weights."""
    model_config = vllm_config.model_config
    return STEP_TOKENS * parameters_over_active(
        model_config.hf_text_config,
        num_experts=model_config.get_num_experts(),
        experts_per_token=model_config.get_num_experts_per_tok(),
    )


def parameters_over_active(
    config: Any,  # noqa: ANN401  whatever transformers or vLLM makes of a configuration
    *,
    num_experts: int,
    experts_per_token: int,
) -> float:
    """Get about how many parameters a model has over those that a token is multiplied with.

    Args:
        config: Of the text model, with the fields that Hugging Face configurations have.
        num_experts: Of a layer; 0 of a dense model.
        experts_per_token: Of these, chosen for a token.
    """
    hidden_size = _first(config, ("hidden_size",))
    expert_size = _first(config, ("moe_intermediate_size", "intermediate_size"))
    num_layers = _first(config, ("num_hidden_layers",))
    if not 0 < experts_per_token <= num_experts or not (hidden_size and expert_size and num_layers):
        return 1.0
    num_sparse = num_layers - _first(config, ("first_k_dense_replace",))
    num_sparse /= _first(config, _PERIODS) or 1
    num_dense = num_layers - num_sparse
    expert = _MATRICES * hidden_size * expert_size
    shared_size = _first(config, _SHARED_SIZES) or expert_size * _first(config, _SHARED_COUNTS)
    common = (
        hidden_size * _first(config, ("vocab_size",))
        + num_layers * _ATTENTION_MATRICES * hidden_size**2
        + num_sparse * _MATRICES * hidden_size * shared_size
        + num_dense * _MATRICES * hidden_size * _first(config, ("intermediate_size",))
    )
    routed = num_sparse * num_experts * expert
    return (common + routed) / (common + routed * experts_per_token / num_experts)


def _first(config: Any, names: tuple[str, ...]) -> int:  # noqa: ANN401
    """Get the first of some fields that says a positive number, else 0."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0
