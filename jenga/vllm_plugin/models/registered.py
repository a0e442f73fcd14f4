"""The registration of our models in vLLM's registry."""

MODELS = {
    "MllamaForConditionalGeneration": (
        "jenga.vllm_plugin.models.mllama:MllamaForConditionalGeneration"
    ),
}
"""Architecture in a model's configuration -> module and class."""


def register_models() -> None:
    """Add our models to vLLM's registry. More than one call is safe."""
    from vllm import ModelRegistry

    registered = ModelRegistry.get_supported_archs()
    for architecture, place in MODELS.items():
        if architecture not in registered:
            ModelRegistry.register_model(architecture, place)
