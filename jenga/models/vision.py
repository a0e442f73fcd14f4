"""Models with a vision encoder: where their language model is, and how long an image is."""

from collections.abc import Callable
from dataclasses import dataclass

from jenga.models.config import Config

_QWEN_TOKENS = 1024
"""A picture of about a megapixel; the encoder's resolution follows the picture's."""

_PHI_3_TOKENS = 1921
"""A picture of 4 x 3 crops of 144 tokens, its overview and separators."""

_TYPICAL_TILES = 7
"""A picture of 3 x 2 tiles and its overview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """A vision-language model.

    Attributes:
        sections: Names under which the language model's fields may lie; where none is present they
            lie beside the vision model's.
        text_model: The language model's `model_type` where the section does not say.
        image_tokens: Tokens of a typical image, for the planner's expectation.
    """

    sections: tuple[str, ...]
    text_model: str
    image_tokens: Callable[[Config], int]


def _grid_tokens(config: Config, *, shrink: float = 1.0) -> int:
    """Tokens of one square tile: patches along the side, shrunk, squared."""
    vision = config.section("vision_config")
    return int((vision.integer("image_size") // vision.integer("patch_size") * shrink) ** 2)


def _llama4_tokens(config: Config) -> int:
    vision = config.section("vision_config")
    return _grid_tokens(config, shrink=vision.number("pixel_shuffle_ratio", default=0.5))


def _tiled_tokens(config: Config) -> int:
    shrink = config.number("downsample_ratio", default=1.0)
    return _TYPICAL_TILES * _grid_tokens(config, shrink=shrink)


def _lfm2_tokens(config: Config) -> int:
    num_tiles = _TYPICAL_TILES if config.flag("do_image_splitting", default=True) else 1
    return num_tiles * config.integer("max_image_tokens", default=256)


VISION_MODELS = {
    "gemma3": Vision(
        sections=("text_config",),
        text_model="gemma3_text",
        image_tokens=lambda config: config.integer("mm_tokens_per_image", default=256),
    ),
    "gemma3n": Vision(
        sections=("text_config",),
        text_model="gemma3n_text",
        image_tokens=lambda config: config.integer("vision_soft_tokens_per_image", default=256),
    ),
    "gemma4": Vision(
        sections=("text_config",),
        text_model="gemma4_text",
        image_tokens=lambda config: config.integer("vision_soft_tokens_per_image", default=280),
    ),
    "lfm2_vl": Vision(sections=("text_config",), text_model="lfm2", image_tokens=_lfm2_tokens),
    "llama4": Vision(
        sections=("text_config",), text_model="llama4_text", image_tokens=_llama4_tokens
    ),
    "llava_onevision": Vision(
        sections=("text_config",), text_model="qwen2", image_tokens=_tiled_tokens
    ),
    "internvl_chat": Vision(
        sections=("llm_config",), text_model="llama", image_tokens=_tiled_tokens
    ),
    "NVLM_D": Vision(
        sections=("llm_config", "text_config"), text_model="qwen2", image_tokens=_tiled_tokens
    ),
    "paligemma": Vision(sections=("text_config",), text_model="gemma2", image_tokens=_grid_tokens),
    "phi3_v": Vision(sections=(), text_model="phi3", image_tokens=lambda _: _PHI_3_TOKENS),
    "qwen2_5_vl": Vision(
        sections=("text_config",), text_model="qwen2", image_tokens=lambda _: _QWEN_TOKENS
    ),
    "qwen3_5": Vision(
        sections=("text_config",), text_model="qwen3_5_text", image_tokens=lambda _: _QWEN_TOKENS
    ),
    "qwen3_5_moe": Vision(
        sections=("text_config",), text_model="qwen3_5_text", image_tokens=lambda _: _QWEN_TOKENS
    ),
}
"""By `model_type`."""
