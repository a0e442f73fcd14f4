"""Models that are refused with any options. Fields of their configuration identify them.

This module does not import vLLM. More models are refused after vLLM's classes have made their
layers: see `served_layers`.
"""

from collections.abc import Mapping

from jenga.vllm_plugin.settings.refusals import Refusal

SPARSE_MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
"""Types of models whose latent attention reads only chosen tokens, whatever their fields say."""

HYMBA = "hymba"
"""Type of the model for which `jenga.models.unserved` names the missing pieces."""


def refused_features(fields: Mapping[str, object]) -> list[str]:
    """Get each feature of a model that the plugin cannot serve, with the reason.

    Args:
        fields: Fields of the language model's `config.json`.
    """
    is_sparse = (
        fields.get("index_topk") is not None or fields.get("model_type") in SPARSE_MODEL_TYPES
    )
    checks = {
        Refusal.SPARSE_LATENTS: is_sparse,
        Refusal.DIFFUSION: fields.get("canvas_length") is not None,
        Refusal.HYMBA: fields.get("model_type") == HYMBA,
    }
    return [refusal.text() for refusal, is_used in checks.items() if is_used]
