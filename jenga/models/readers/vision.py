"""Models with a vision encoder: section of the language model, and tokens of a typical image."""

from collections.abc import Callable
from dataclasses import dataclass

from jenga.models.config import Config

_MEGAPIXEL_TOKENS = 1024
"""Tokens of a picture of about a megapixel, for encoders that keep the picture's resolution."""

_PHI_3_TOKENS = 1921
"""Tokens of a picture: 4 x 3 crops of 144 tokens, the overview and separators."""

_TYPICAL_TILES = 7
"""Tiles of a picture: 3 x 2, and the overview."""

_LLAVA_NEXT_TILES = 5
"""Tiles of a square picture: 2 x 2, and the overview. Rows that are all padding are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """A vision-language model.

    Attributes:
        sections: Names of sections that may hold the language model's fields. If none is present,
            the fields are at the top level, beside those of the vision model.
        text_model: `model_type` of the language model, unless the section says another.
        image_tokens: Function that returns the tokens of a typical image, for the planner's
            expectation.
        deepstack_levels: Function that returns the number of encoder layers whose output goes to
            the first layers of the language model. An embedding has so many further hidden
            states (DeepStack, arXiv 2406.04334).
    """

    sections: tuple[str, ...]
    text_model: str
    image_tokens: Callable[[Config], int]
    deepstack_levels: Callable[[Config], int] = lambda _: 0


def _megapixel_tokens(_: Config) -> int:
    return _MEGAPIXEL_TOKENS


def _vision(config: Config) -> Config:
    """Return the encoder's fields; none if it has no section.

    A missing section is no error, because these fields only decide the planner's expectation.
    """
    if "vision_config" not in config:
        return Config({}, source=f"{config.source}: vision_config")
    return config.section("vision_config")


def _grid_tokens(config: Config, *, shrink: float = 1.0) -> int:
    """Tokens of one square tile: patches along a side, times `shrink`, squared."""
    vision = _vision(config)
    if "image_size" not in vision or "patch_size" not in vision:
        return _MEGAPIXEL_TOKENS
    return int((vision.side("image_size") // vision.side("patch_size") * shrink) ** 2)


def _llama4_tokens(config: Config) -> int:
    vision = _vision(config)
    return _grid_tokens(config, shrink=vision.number("pixel_shuffle_ratio", default=0.5))


def _tiled_tokens(config: Config) -> int:
    shrink = config.number("downsample_ratio", default=1.0)
    return _TYPICAL_TILES * _grid_tokens(config, shrink=shrink)


def _internvl_tokens(config: Config) -> int:
    """Tokens of a picture, for InternVL as transformers saves it: one field has a tile's tokens."""
    return _TYPICAL_TILES * config.integer("image_seq_length", default=256)


def _llava_next_tokens(config: Config) -> int:
    return _LLAVA_NEXT_TILES * _grid_tokens(config)


def _idefics_tokens(config: Config) -> int:
    return _TYPICAL_TILES * _grid_tokens(config, shrink=1 / config.integer("scale_factor"))


def _cohere_tokens(config: Config) -> int:
    shrink = 1 / config.integer("downsample_factor", default=2)
    return _TYPICAL_TILES * _grid_tokens(config, shrink=shrink)


def _qwen3_levels(config: Config) -> int:
    vision = _vision(config)
    return len(vision.counts("deepstack_visual_indexes", default=()))


def _lfm2_tokens(config: Config) -> int:
    num_tiles = _TYPICAL_TILES if config.flag("do_image_splitting", default=True) else 1
    return num_tiles * config.integer("max_image_tokens", default=256)


VISION_MODELS = {
    "cohere2_vision": Vision(
        sections=("text_config",), text_model="cohere2", image_tokens=_cohere_tokens
    ),
    "ernie4_5_vl_moe": Vision(
        sections=("text_config",),
        text_model="ernie4_5_vl_moe_text",
        image_tokens=_megapixel_tokens,
    ),
    "exaone4_5": Vision(
        sections=("text_config",), text_model="exaone4", image_tokens=_megapixel_tokens
    ),
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
    "gemma4_unified": Vision(
        sections=("text_config",),
        text_model="gemma4_unified_text",
        image_tokens=lambda config: config.integer("vision_soft_tokens_per_image", default=280),
    ),
    "glm4v": Vision(
        sections=("text_config",), text_model="glm4v_text", image_tokens=_megapixel_tokens
    ),
    "glm4v_moe": Vision(
        sections=("text_config",), text_model="glm4v_moe_text", image_tokens=_megapixel_tokens
    ),
    "idefics3": Vision(sections=("text_config",), text_model="llama", image_tokens=_idefics_tokens),
    "internvl": Vision(
        sections=("text_config",), text_model="qwen2", image_tokens=_internvl_tokens
    ),
    "internvl_chat": Vision(
        sections=("llm_config",), text_model="llama", image_tokens=_tiled_tokens
    ),
    "kimi_k25": Vision(
        sections=("text_config",), text_model="deepseek_v3", image_tokens=_megapixel_tokens
    ),
    "kimi_vl": Vision(
        sections=("text_config",), text_model="deepseek_v3", image_tokens=_megapixel_tokens
    ),
    "lfm2_vl": Vision(sections=("text_config",), text_model="lfm2", image_tokens=_lfm2_tokens),
    "llama4": Vision(
        sections=("text_config",), text_model="llama4_text", image_tokens=_llama4_tokens
    ),
    "llava": Vision(sections=("text_config",), text_model="llama", image_tokens=_grid_tokens),
    "llava_next": Vision(
        sections=("text_config",), text_model="llama", image_tokens=_llava_next_tokens
    ),
    "llava_onevision": Vision(
        sections=("text_config",), text_model="qwen2", image_tokens=_tiled_tokens
    ),
    "mistral3": Vision(
        sections=("text_config",), text_model="mistral", image_tokens=_megapixel_tokens
    ),
    "NVLM_D": Vision(
        sections=("llm_config", "text_config"), text_model="qwen2", image_tokens=_tiled_tokens
    ),
    "paligemma": Vision(sections=("text_config",), text_model="gemma2", image_tokens=_grid_tokens),
    "phi3_v": Vision(sections=(), text_model="phi3", image_tokens=lambda _: _PHI_3_TOKENS),
    "qwen2_5_vl": Vision(
        sections=("text_config",), text_model="qwen2", image_tokens=_megapixel_tokens
    ),
    "qwen2_vl": Vision(
        sections=("text_config",), text_model="qwen2", image_tokens=_megapixel_tokens
    ),
    "qwen3_5": Vision(
        sections=("text_config",), text_model="qwen3_5_text", image_tokens=_megapixel_tokens
    ),
    "qwen3_5_moe": Vision(
        sections=("text_config",), text_model="qwen3_5_text", image_tokens=_megapixel_tokens
    ),
    "qwen3_vl": Vision(
        sections=("text_config",),
        text_model="qwen3_vl_text",
        image_tokens=_megapixel_tokens,
        deepstack_levels=_qwen3_levels,
    ),
    "qwen3_vl_moe": Vision(
        sections=("text_config",),
        text_model="qwen3_vl_moe_text",
        image_tokens=_megapixel_tokens,
        deepstack_levels=_qwen3_levels,
    ),
    "smolvlm": Vision(sections=("text_config",), text_model="llama", image_tokens=_idefics_tokens),
    "step3p7": Vision(
        sections=("text_config",), text_model="step3p5", image_tokens=_megapixel_tokens
    ),
}
"""Vision-language models by `model_type`."""
