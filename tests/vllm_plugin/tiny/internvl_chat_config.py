"""Configuration class of a tiny InternVL, copied beside its weights.

Neither vLLM nor transformers has one. Published models bring theirs, which vLLM reads with
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
