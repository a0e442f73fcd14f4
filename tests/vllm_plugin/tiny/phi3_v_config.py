"""Configuration class of a tiny Phi-3 Vision, copied beside its weights.

Neither vLLM nor transformers has one. Published models bring theirs, which vLLM reads with
`--trust-remote-code`. So this file stands alone.
"""

from transformers import PretrainedConfig


class Phi3VConfig(PretrainedConfig):
    """Fields of the language model, with those of the encoder in two dictionaries beside them."""

    model_type = "phi3_v"

    def __init__(self, img_processor=None, embd_layer=None, **fields):
        super().__init__(**fields)
        self.img_processor = img_processor or {}
        self.embd_layer = embd_layer or {}
