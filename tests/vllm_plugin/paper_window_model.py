"""A Llama whose windowed layers declare a cache spec of their own: a model from outside vLLM."""

from dataclasses import fields

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM

from docs.examples.paper_window import PaperWindowSpec


class PaperWindowAttention(Attention):
    """Attention over a window, cached as the example's layer type."""

    def get_kv_cache_spec(self, vllm_config):
        spec = super().get_kv_cache_spec(vllm_config)
        own = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        return PaperWindowSpec(**own)


class PaperWindowLlama(LlamaForCausalLM):
    """Llama, with the layers that its configuration calls sliding."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if type(module) is Attention and module.sliding_window is not None:
                module.__class__ = PaperWindowAttention
