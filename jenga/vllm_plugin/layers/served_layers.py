"""Which layers may keep their cache in the arena: those that attend through our backend.

What a layer of vLLM stores is all that the planner asks. Some models bring layers that store what
others do and read it with kernels of their own, which nobody has tried on pages of an arena.
"""

from collections.abc import Container
from typing import TYPE_CHECKING, Any, cast

from jenga.vllm_plugin.settings.refusals import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase


def _path(of_class: type) -> str:
    return f"{of_class.__module__}.{of_class.__qualname__}"


def is_served(layer: "AttentionLayerBase") -> bool:
    """Whether a layer is recurrent, or vLLM's (MLA)Attention that attends through our backend.

    Which recurrent layers run on our kernels is decided elsewhere (`specs.served_states`).
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    from jenga.vllm_plugin.layers.attention import JengaTritonBackend

    if isinstance(layer, MambaBase):
        return True
    return isinstance(layer, (Attention, MLAAttention)) and issubclass(
        layer.get_attn_backend(), JengaTritonBackend
    )


def check_layers(vllm_config: "VllmConfig", stored: Container[str]) -> None:
    """Refuse layers that would read or write the arena with kernels other than ours.

    Args:
        vllm_config: After the model was made, and the one that drafts for it; it names the layers
            of both.
        stored: Names of the layers that store a cache in this process. Others have none, or share
            that of one of these.

    Raises:
        ValueError: There are such layers; the message names the first, and says how many.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, cast("type[Any]", AttentionLayerBase))
    refused = {
        name: layer
        for name, layer in layers.items()
        if (getattr(layer, "kv_sharing_target_layer_name", None) or name) in stored
        and not is_served(layer)
    }
    if refused:
        name, layer = next(iter(refused.items()))
        backend = layer.get_attn_backend()
        msg = (
            f"{len(refused)} of them, of which {name!r} is a {_path(type(layer))} with attention "
            f"backend {backend.get_name()} ({_path(backend)})"
        )
        raise Refusal.OWN_KERNELS.error(msg)
