"""A tiny InternVL2 and a tiny NVLM with random weights, built as the published ones are.

They read an image as tiles of equal size, at most `MAX_TILES`. Of several tiles, a thumbnail of the
whole image comes last. The language model of InternVL2 8B is InternLM2, and that of NVLM is Qwen2.
"""

import json
import shutil
from pathlib import Path

from tests.vllm_plugin.tiny.tiny_models import HEAD_DIM, VOCAB_SIZE

TILE_SIDE = 24
"""Pixels."""

TILE_TOKENS = 9
"""A tile has 6 by 6 patches, and four of these become one token."""

MAX_TILES = 4
"""Without the thumbnail."""

_STANDARD_DEVIATION = 0.15
_TEXT = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 4 * HEAD_DIM,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "model_type": "intern_vit_6b",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE_SIDE,
    "patch_size": 4,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
    "qk_normalization": False,
    "initializer_factor": 1.0,
    "hidden_act": "gelu",
}
_CONFIG = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "auto_map": {"AutoConfig": "internvl_chat_config.InternVLChatConfig"},
    "torch_dtype": "float32",
    "llm_config": _TEXT,
    "vision_config": _VISION,
    "force_image_size": TILE_SIDE,
    "dynamic_image_size": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": MAX_TILES,
    "use_thumbnail": True,
    "downsample_ratio": 0.5,
    "select_layer": -1,
    "ps_version": "v2",
}


_NVLM_CONFIG = _CONFIG | {
    "architectures": ["NVLM_D"],
    "model_type": "NVLM_D",
    "auto_map": {"AutoConfig": "internvl_chat_config.NVLMConfig"},
    "llm_config": _TEXT
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
}
_NVLM_DUMMY_HEADS = 7
"""Heads of NVLM's vision layers beside those that its configuration names."""


def save(path: Path, tokenizer, *, first_special_token: int, is_nvlm: bool = False) -> None:
    """Save a model as the directory `path`, under the names of published weights.

    Args:
        path: To make.
        tokenizer: Knows the tokens that stand for an image, its start, its end and its embeddings.
        first_special_token: Tokens from here on get rows of zeros.
        is_nvlm: Whether the model is NVLM instead of InternVL2.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    text = _qwen2_weights() if is_nvlm else _internlm2_weights()
    (embeddings,) = [name for name in text if "embed" in name]
    text[embeddings].mul_(0.2)
    text[embeddings][first_special_token:] = 0
    weights = {f"language_model.{name}": part for name, part in text.items()}
    num_heads = _VISION["num_attention_heads"] + (_NVLM_DUMMY_HEADS if is_nvlm else 0)
    weights |= {f"vision_model.{name}": part for name, part in _vision_weights(num_heads).items()}
    weights |= _nvlm_projector_weights() if is_nvlm else _projector_weights()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = _NVLM_CONFIG if is_nvlm else _CONFIG
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("internvl_chat_config.py"), path)
    tokenizer.save_pretrained(path)


def _normal(*shape):
    import torch

    return _STANDARD_DEVIATION * torch.randn(shape)


def _scale(width):
    return 1 + _normal(width)


def _internlm2_weights():
    width, inner = _TEXT["hidden_size"], _TEXT["intermediate_size"]
    num_heads = _TEXT["num_attention_heads"] + 2 * _TEXT["num_key_value_heads"]
    weights = {
        "model.tok_embeddings.weight": _normal(VOCAB_SIZE, width),
        "model.norm.weight": _scale(width),
        "output.weight": _normal(VOCAB_SIZE, width),
    }
    for index in range(_TEXT["num_hidden_layers"]):
        layer = {
            "attention.wqkv": _normal(num_heads * HEAD_DIM, width),
            "attention.wo": _normal(width, width),
            "feed_forward.w1": _normal(inner, width),
            "feed_forward.w3": _normal(inner, width),
            "feed_forward.w2": _normal(width, inner),
            "attention_norm": _scale(width),
            "ffn_norm": _scale(width),
        }
        weights |= {f"model.layers.{index}.{name}.weight": part for name, part in layer.items()}
    return weights


def _qwen2_weights():
    width, inner = _TEXT["hidden_size"], _TEXT["intermediate_size"]
    queries, keys = (_TEXT[f"num_{of}_heads"] * HEAD_DIM for of in ("attention", "key_value"))
    weights = {
        "model.embed_tokens.weight": _normal(VOCAB_SIZE, width),
        "model.norm.weight": _scale(width),
        "lm_head.weight": _normal(VOCAB_SIZE, width),
    }
    for index in range(_TEXT["num_hidden_layers"]):
        layer = {
            "self_attn.o_proj.weight": _normal(width, queries),
            "mlp.gate_proj.weight": _normal(inner, width),
            "mlp.up_proj.weight": _normal(inner, width),
            "mlp.down_proj.weight": _normal(width, inner),
            "input_layernorm.weight": _scale(width),
            "post_attention_layernorm.weight": _scale(width),
        }
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            layer[f"self_attn.{name}_proj.weight"] = _normal(rows, width)
            layer[f"self_attn.{name}_proj.bias"] = _normal(rows)
        weights |= {f"model.layers.{index}.{name}": part for name, part in layer.items()}
    return weights


def _vision_weights(num_heads):
    seen, seen_inner = _VISION["hidden_size"], _VISION["intermediate_size"]
    heads = num_heads * (seen // _VISION["num_attention_heads"])
    side, num_patches = _VISION["patch_size"], (TILE_SIDE // _VISION["patch_size"]) ** 2
    vision = {
        "embeddings.class_embedding": _normal(1, 1, seen),
        "embeddings.position_embedding": _normal(1, 1 + num_patches, seen),
        "embeddings.patch_embedding.weight": _normal(seen, 3, side, side),
        "embeddings.patch_embedding.bias": _normal(seen),
    }
    for index in range(_VISION["num_hidden_layers"]):
        shapes = {
            "attn.qkv": (3 * heads, seen),
            "attn.proj": (seen, heads),
            "mlp.fc1": (seen_inner, seen),
            "mlp.fc2": (seen, seen_inner),
        }
        layer = {f"{name}.weight": _normal(*shape) for name, shape in shapes.items()}
        layer |= {f"{name}.bias": _normal(shape[0]) for name, shape in shapes.items()}
        layer |= {f"norm{number}.weight": _scale(seen) for number in (1, 2)}
        layer |= {f"norm{number}.bias": _normal(seen) for number in (1, 2)}
        layer |= {f"ls{number}": _scale(seen) for number in (1, 2)}
        vision |= {f"encoder.layers.{index}.{name}": part for name, part in layer.items()}
    return vision


def _projector_weights():
    """Make what turns four patches each into embeddings."""
    seen, width = 4 * _VISION["hidden_size"], _TEXT["hidden_size"]
    return {
        "mlp1.0.weight": _scale(seen),
        "mlp1.0.bias": _normal(seen),
        "mlp1.1.weight": _normal(width, seen),
        "mlp1.1.bias": _normal(width),
        "mlp1.3.weight": _normal(width, width),
        "mlp1.3.bias": _normal(width),
    }


def _nvlm_projector_weights():
    seen, inner, width = (
        4 * _VISION["hidden_size"],
        _TEXT["intermediate_size"],
        _TEXT["hidden_size"],
    )
    return {
        "mlp1.0.weight": _scale(seen),
        "mlp1.0.bias": _normal(seen),
        "mlp1.1.weight": _normal(inner, seen),
        "mlp1.3.weight": _normal(width, inner),
    }
