"""Names in published configurations that differ from those of `jenga.models.reader`."""

MODEL_TYPES_AS_PUBLISHED = {
    "AXK1": "axk1",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
    "kimi_k2": "deepseek_v3",
}
"""`model_type` of a published configuration -> `model_type` of its reader."""

MODEL_TYPE_OF_OWN_CLASS = {"CharacterLlamaForCausalLM": "character_llama"}
"""Class of the plugin that runs a model -> `model_type` of its reader.

The class decides first, because such a configuration has the `model_type` of the model that it
extends.
"""

MODEL_TYPE_OF_CLASS = {
    "AXK1ForCausalLM": "axk1",
    "BailingMoeForCausalLM": "bailing_moe",
    "BailingMoeLinearV2ForCausalLM": "bailing_moe_linear",
    "BailingMoeV2ForCausalLM": "bailing_moe",
    "BailingMoeV2_5ForCausalLM": "bailing_hybrid",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "ChatGLMForConditionalGeneration": "chatglm",
    "ChatGLMModel": "chatglm",
    "DeciLMForCausalLM": "nemotron-nas",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "ExaoneForCausalLM": "exaone",
    "FalconForCausalLM": "falcon",
    "GemmaForCausalLM": "gemma",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "llama",
    "IQuestCoderForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "LongcatFlashForCausalLM": "longcat_flash",
    "MiMoForCausalLM": "mimo",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiMoV2ForCausalLM": "mimo_v2",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Plamo3ForCausalLM": "plamo3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "RWForCausalLM": "falcon",
    "Step3p5ForCausalLM": "step3p5",
    "TeleChat3ForCausalLM": "llama",
}
"""Class that runs a model -> `model_type` of its reader.

The class decides if a configuration has no `model_type`, or one that its author made up. An engine
also chooses its code by the class.
"""
