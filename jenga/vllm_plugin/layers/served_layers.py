"""Check that only layers of our backend keep their cache in the arena.

The planner looks only at the cache spec of a layer. Some models have layers with a common cache
spec that read the cache with kernels of their own. Such kernels are untested on pages of an arena.
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
    """Whether a layer is recurrent, or vLLM's (MLA)Attention with our backend.

    `specs.served_states` decides which recurrent layers run on our kernels.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend

    if isinstance(layer, MambaBase):
        return True
    return isinstance(layer, (Attention, MLAAttention)) and issubclass(
        layer.get_attn_backend(), JengaTritonBackend
    )


def check_layers(vllm_config: "VllmConfig", stored: Container[str]) -> None:
    """Refuse layers that would read or write the arena with kernels of their own.

    Args:
        vllm_config: Configuration after the model and its draft model were made. It has the layers
            of both.
        stored: Names of the layers that store a cache in this process. Other layers have none, or
            share the cache of one of these.

    Raises:
        ValueError: There are such layers. The message has the first one's name, and their number.
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
