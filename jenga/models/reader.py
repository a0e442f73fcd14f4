"""Choice of the reader for each `model_type`, from a configuration to a `ModelSpec`."""

from collections.abc import Container
from pathlib import Path

from jenga.models.config import Config, load_config
from jenga.models.defaults import CLASS_DEFAULTS
from jenga.models.names import (
    MODEL_TYPE_OF_CLASS,
    MODEL_TYPE_OF_OWN_CLASS,
    MODEL_TYPES_AS_PUBLISHED,
)
from jenga.models.options import ReadOptions
from jenga.models.readers import attention, designs, latent, published, recurrent
from jenga.models.readers.attention import Reader
from jenga.models.readers.layers import image_embedding, keeps_history
from jenga.models.readers.token_budgets import with_token_budgets
from jenga.models.readers.vision import VISION_MODELS
from jenga.spec import LayerType, ModelSpec

TEXT_READERS: dict[str, Reader] = {
    "afmoe": attention.read_every_fourth,
    "apertus": attention.read_full,
    "arcee": attention.read_full,
    "axk1": latent.read_deepseek,
    "baichuan": attention.read_full,
    "bailing_hybrid": latent.read_bailing,
    "bailing_moe": attention.read_full,
    "bailing_moe_linear": published.read_ring_linear,
    "bamba": recurrent.read_bamba,
    "bloom": published.read_bloom,
    "character_ai": designs.read_character_ai,
    "character_llama": designs.read_character_llama,
    "chatglm": published.read_chatglm,
    "cohere": attention.read_full,
    "cohere2": attention.read_cohere2,
    "cohere2_moe": attention.read_cohere2,
    "cwm": attention.read_exaone4,
    "dbrx": published.read_dbrx,
    "deepseek_v2": latent.read_deepseek,
    "deepseek_v3": latent.read_deepseek,
    "deepseek_v32": latent.read_deepseek,
    "deepseek_v4": latent.read_deepseek_v4,
    "dots1": attention.read_full,
    "ernie4_5": attention.read_full,
    "ernie4_5_moe": attention.read_full,
    "ernie4_5_vl_moe_text": attention.read_full,
    "exaone": attention.read_full,
    "exaone4": attention.read_exaone4,
    "exaone_moe": attention.read_exaone4,
    "falcon": published.read_falcon,
    "falcon_h1": recurrent.read_falcon_h1,
    "falcon_mamba": recurrent.read_mamba,
    "flex_olmo": attention.read_full,
    "gemma": attention.read_full,
    "gemma2": attention.read_alternating,
    "gemma3_text": attention.read_gemma3,
    "gemma3n_text": attention.read_gemma3n,
    "gemma4_text": attention.read_gemma4,
    "gemma4_unified_text": attention.read_gemma4,
    "glm": attention.read_full,
    "glm4": attention.read_full,
    "glm4_moe": attention.read_full,
    "glm4_moe_lite": latent.read_deepseek,
    "glm4v_moe_text": attention.read_full,
    "glm4v_text": attention.read_full,
    "glm_moe_dsa": latent.read_deepseek,
    "gpt2": published.read_gpt,
    "gpt_bigcode": published.read_gpt,
    "gpt_neox": attention.read_full,
    "gpt_oss": attention.read_alternating,
    "gptj": published.read_gpt,
    "granite": attention.read_full,
    "granite_swa": attention.read_exaone4,
    "granitemoe": attention.read_full,
    "granitemoe_swa": attention.read_exaone4,
    "granitemoehybrid": recurrent.read_granite_hybrid,
    "granitemoeshared": attention.read_full,
    "helium": attention.read_full,
    "hunyuan_v1_dense": attention.read_full,
    "hunyuan_v1_moe": attention.read_full,
    "hy_v3": attention.read_full,
    "hymba": recurrent.read_hymba,
    "hyperclovax": attention.read_full,
    "internlm2": attention.read_full,
    "internlm3": attention.read_full,
    "jais2": attention.read_full,
    "jamba": recurrent.read_jamba,
    "kimi_linear": latent.read_kimi_linear,
    "laguna": attention.read_full,
    "lfm2": recurrent.read_lfm2,
    "lfm2_moe": recurrent.read_lfm2_moe,
    "llama": attention.read_full,
    "llama4_text": attention.read_llama4,
    "longcat_flash": latent.read_longcat,
    "mamba": recurrent.read_mamba,
    "mamba2": recurrent.read_mamba2,
    "mellum": attention.read_exaone4,
    "mimo": attention.read_qwen,
    "mimo_v2": attention.read_mimo_v2,
    "mimo_v2_flash": attention.read_mimo_v2,
    "minicpm": attention.read_full,
    "minimax": recurrent.read_minimax,
    "minimax_m2": attention.read_full,
    "minimax_text_01": recurrent.read_minimax,
    "ministral": attention.read_mistral,
    "ministral3": attention.read_full,
    "mistral": attention.read_mistral,
    "mistral4": latent.read_deepseek,
    "mixtral": attention.read_full,
    "mllama_text_model": attention.read_mllama,
    "nemotron": attention.read_full,
    "nemotron-nas": published.read_nemotron_nas,
    "nemotron_h": recurrent.read_nemotron_h,
    "olmo": attention.read_full,
    "olmo2": attention.read_full,
    "olmo3": attention.read_every_fourth,
    "olmo_hybrid": recurrent.read_gated_delta,
    "olmoe": attention.read_full,
    "opt": attention.read_full,
    "orion": attention.read_full,
    "phi": attention.read_full,
    "phi3": attention.read_full,
    "phimoe": attention.read_full,
    "plamo3": published.read_plamo3,
    "pyramid_kv": designs.read_pyramid_kv,
    "qwen2": attention.read_qwen,
    "qwen2_5_vl_text": attention.read_qwen,
    "qwen2_moe": attention.read_qwen,
    "qwen2_vl_text": attention.read_qwen,
    "qwen3": attention.read_qwen,
    "qwen3_5_moe_text": recurrent.read_gated_delta,
    "qwen3_5_text": recurrent.read_gated_delta,
    "qwen3_moe": attention.read_qwen,
    "qwen3_next": recurrent.read_gated_delta,
    "qwen3_vl_moe_text": attention.read_qwen,
    "qwen3_vl_text": attention.read_qwen,
    "seed_oss": attention.read_full,
    "smollm3": attention.read_full,
    "solar_open": attention.read_full,
    "stablelm": attention.read_full,
    "starcoder2": attention.read_full,
    "step3p5": published.read_step,
    "vaultgemma": attention.read_alternating,
    "whisper": attention.read_whisper,
    "zamba2": recurrent.read_zamba2,
}
"""Readers of language models, by `model_type`."""

_TEXT_SECTIONS = {"mllama": ("text_config", "mllama_text_model")}
"""Models whose language model is in a section and that store no image embeddings.

`model_type` -> name of the section, and `model_type` of the language model.
"""

MODEL_TYPES = tuple(sorted({*TEXT_READERS, *VISION_MODELS, *_TEXT_SECTIONS}))
"""Every `model_type` that has a reader, sorted."""


def read_model(
    path: str | Path, *, name: str | None = None, options: ReadOptions | None = None
) -> ModelSpec:
    """Read the layer types of the model that a Hugging Face configuration describes.

    Args:
        path: A `config.json`, or the directory that holds it.
        name: Name of the spec. None takes the name of the directory that holds a `config.json`,
            or the name of another file without its ending.
        options: How the model is run; None means one rank in bfloat16.

    Raises:
        ValueError: There is no such file, a field (the message names it) is not understood, or
            the options do not fit the model.
    """
    path = Path(path)
    if name is None:
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return read_config(load_config(path), name=name, options=options)


def read_config(config: Config, *, name: str, options: ReadOptions | None = None) -> ModelSpec:
    """Read layer types as `read_model` does, from fields that are already loaded."""
    options = options or ReadOptions()
    spec = _read(config, name=name, options=options)
    if options.history_tokens and not keeps_history(spec):
        msg = (
            f"options: history_tokens is for models of Mamba-2 or gated delta layers, and {name} "
            "has none"
        )
        raise ValueError(msg)
    return spec


def known_type(config: Config) -> str | None:
    """Return the `model_type` of a configuration's reader; None if it has no reader."""
    known = _known(config, MODEL_TYPES)
    return known if known in MODEL_TYPES else None


def _known(config: Config, choices: Container[str]) -> str | None:
    """Return the `model_type` of the reader, found by the `model_type` or else by the class.

    If none of `choices` fits, return the configuration's own `model_type`; None if it has none.
    """
    own = MODEL_TYPE_OF_OWN_CLASS.get(config.usual_architecture() or "", "")
    if own in choices:
        return own
    named = config.text("model_type", default="")
    model_type = MODEL_TYPES_AS_PUBLISHED.get(named, named)
    if model_type in choices:
        return model_type
    by_class = MODEL_TYPE_OF_CLASS.get(config.usual_architecture() or "", named)
    return by_class if by_class in choices else named or None


def _read(config: Config, *, name: str, options: ReadOptions) -> ModelSpec:
    model_type = _known(config, MODEL_TYPES)
    if model_type not in MODEL_TYPES:
        config.refuse("model_type", f"one of {', '.join(MODEL_TYPES)}")
    if model_type in VISION_MODELS:
        vision = VISION_MODELS[model_type]
        has_section = any(section in config for section in vision.sections)
        text = config.section(*vision.sections) if has_section else config
        types = _read_text(text, vision.text_model, options, is_section=has_section)
        width = text.integer("hidden_size") * (1 + vision.deepstack_levels(config))
        image = image_embedding(width, options, typical_tokens=vision.image_tokens(config))
        model = ModelSpec(name=name, layer_types=(*types, image))
        return model.with_images_in("full") if options.embeddings_in_kv_pages else model
    is_section = model_type in _TEXT_SECTIONS
    section, text_model = _TEXT_SECTIONS.get(model_type, ("", model_type))
    text = config.section(section) if is_section else config
    types = _read_text(text, text_model, options, is_section=is_section)
    return ModelSpec(name=name, layer_types=tuple(types))


def _read_text(
    text: Config, model_type: str, options: ReadOptions, *, is_section: bool
) -> list[LayerType]:
    """Read the layer types of a language model.

    Args:
        text: Fields of the language model.
        model_type: The usual type. A section that names another type overrides it.
        options: How the model is run.
        is_section: Whether the fields come from a section of a larger model.
    """
    if is_section:
        model_type = _known(text, TEXT_READERS) or model_type
        if model_type not in TEXT_READERS:
            text.refuse("model_type", f"one of {', '.join(TEXT_READERS)}")
    reader, fields = TEXT_READERS[model_type], text.with_absent(CLASS_DEFAULTS.get(model_type, {}))
    return with_token_budgets(lambda options: reader(fields, options), text, options)
