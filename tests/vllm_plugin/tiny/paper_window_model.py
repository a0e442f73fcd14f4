"""A Llama whose windowed layers are of the documented example: a model from outside vLLM."""

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM

from docs.examples.paper_window_vllm import PaperWindowAttention


class PaperWindowLlama(LlamaForCausalLM):
    """Llama, with the layers that its configuration calls sliding."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if type(module) is Attention and module.sliding_window is not None:
                module.__class__ = PaperWindowAttention
