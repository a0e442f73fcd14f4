"""Configuration classes of a tiny InternVL and a tiny NVLM, copied beside their weights.

Neither vLLM nor transformers has them. Published models bring theirs, which vLLM reads with
`--trust-remote-code`. So this file stands alone.
"""

from transformers import PretrainedConfig


class InternVLChatConfig(PretrainedConfig):
    """Fields of the model, with a section for each of its two parts."""

    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **fields):
        super().__init__(**fields)
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        self.llm_config = PretrainedConfig(**(llm_config or {}))


class NVLMConfig(InternVLChatConfig):
    """The same fields under another name."""

    model_type = "NVLM_D"

    def __init__(self, vision_config=None, llm_config=None, **fields):
        # transformers makes one for a class without it, which does not read the sections.
        super().__init__(vision_config, llm_config, **fields)
