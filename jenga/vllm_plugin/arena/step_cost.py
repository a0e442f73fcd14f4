"""Fixed cost of a step, which the manager counts in tokens of a prompt.

It is the number of tokens that are computed in the time in which the weights are read. A
mixture-of-experts model reads all experts in a step, but multiplies each token with only a few. So
its fixed cost is that of a dense model, times all parameters over those that one token uses.
"""

from typing import TYPE_CHECKING, Any

from jenga.admission.reserve import STEP_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MATRICES = 3  # matrices of an expert: gate, up and down
_ATTENTION_MATRICES = 4  # about so many, hidden size by hidden size, in any layer that mixes tokens
_PERIODS = ("interleave_moe_layer_step", "expert_layer_period", "decoder_sparse_step")
_SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts")


def step_tokens(vllm_config: "VllmConfig") -> float:
    """Estimate the number of a prompt's tokens that take as long as reading the weights."""
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
    """Estimate the ratio of a model's parameters to those that a token is multiplied with.

    Args:
        config: Configuration of the text model, with Hugging Face's field names.
        num_experts: Number of experts in a layer. 0 for a dense model.
        experts_per_token: Number of experts that are chosen for a token.
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
    """Get the value of the first of some fields that is a positive integer, else 0."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0
