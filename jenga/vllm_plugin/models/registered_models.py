"""The table of our models, and their registration with vLLM.

This module imports neither vLLM nor a model until it registers, and then no model.
"""

MODELS = {
    "CharacterLlamaForCausalLM": "jenga.vllm_plugin.models.character_llama",
    "HymbaForCausalLM": "jenga.vllm_plugin.models.hymba",
    "MllamaForConditionalGeneration": "jenga.vllm_plugin.models.mllama",
}
"""Architecture in `config.json`, and name of the class -> module of the class."""


def register_models() -> None:
    """Make our architectures known to vLLM in this process. More than one call is safe.

    An architecture that vLLM has itself stays vLLM's.
    """
    from vllm.model_executor.models import ModelRegistry

    for architecture, module in MODELS.items():
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, f"{module}:{architecture}")
