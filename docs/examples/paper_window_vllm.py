"""The layers of `paper_window` in vLLM. `register` is a plugin of `vllm.general_plugins`."""

from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import jenga
from docs.examples.paper_window import PaperWindow


class PaperWindowSpec(SlidingWindowSpec):
    pass


class PaperWindowAttention(Attention):
    def get_kv_cache_spec(self, vllm_config):
        return PaperWindowSpec(**vars(super().get_kv_cache_spec(vllm_config)))


def register():
    KVCacheSpecRegistry.register(PaperWindowSpec, SlidingWindowManager)
    jenga.register_layer_type(
        PaperWindow,
        example={"window_tokens": 5},
        cache_spec=PaperWindowSpec,
        fields_of=lambda spec: {"window_tokens": spec.sliding_window},
    )
