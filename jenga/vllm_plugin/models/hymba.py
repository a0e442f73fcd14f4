"""Hymba, which is refused: a class that vLLM can inspect, and that refuses to be built.

Without it, vLLM would try the code that comes with the model, which fails for other reasons.
"""

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

from jenga.vllm_plugin.settings.refusals import Refusal


class HymbaForCausalLM(LlamaForCausalLM):
    """The class that vLLM finds for the architecture. vLLM inspects it as a Llama."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Refuse the model, with any backend.

        Raises:
            ValueError: Always.
        """
        msg = f"no class serves {Refusal.HYMBA.text()}"
        raise ValueError(msg)
