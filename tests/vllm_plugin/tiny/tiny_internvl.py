"""A tiny InternVL2 with random weights, as the published one of 8B parameters is built.

It reads an image as tiles of equal size, at most `MAX_TILES`. Of several tiles, a thumbnail of the
whole image comes last. The language model is InternLM2.
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


def save(path: Path, tokenizer, *, first_special_token: int) -> None:
    """Save the model as the directory `path`, under the names of published weights.

    Args:
        path: To make.
        tokenizer: Knows `<image>`, `<img>`, `</img>` and `<IMG_CONTEXT>`.
        first_special_token: Tokens from here on get rows of zeros.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    save_file(_weights(first_special_token), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("internvl_chat_config.py"), path)
    tokenizer.save_pretrained(path)


def _weights(first_special_token):
    import torch

    def normal(*shape):
        return _STANDARD_DEVIATION * torch.randn(shape)

    def scale(width):
        return 1 + normal(width)

    width, inner = _TEXT["hidden_size"], _TEXT["intermediate_size"]
    num_heads = _TEXT["num_attention_heads"] + 2 * _TEXT["num_key_value_heads"]
    weights = {
        "model.tok_embeddings.weight": 0.2 * normal(VOCAB_SIZE, width),
        "model.norm.weight": scale(width),
        "output.weight": normal(VOCAB_SIZE, width),
    }
    weights["model.tok_embeddings.weight"][first_special_token:] = 0
    for index in range(_TEXT["num_hidden_layers"]):
        layer = {
            "attention.wqkv": normal(num_heads * HEAD_DIM, width),
            "attention.wo": normal(width, width),
            "feed_forward.w1": normal(inner, width),
            "feed_forward.w3": normal(inner, width),
            "feed_forward.w2": normal(width, inner),
            "attention_norm": scale(width),
            "ffn_norm": scale(width),
        }
        weights |= {f"model.layers.{index}.{name}.weight": part for name, part in layer.items()}
    weights = {f"language_model.{name}": part for name, part in weights.items()}

    seen, seen_inner = _VISION["hidden_size"], _VISION["intermediate_size"]
    side, num_patches = _VISION["patch_size"], (TILE_SIDE // _VISION["patch_size"]) ** 2
    vision = {
        "embeddings.class_embedding": normal(1, 1, seen),
        "embeddings.position_embedding": normal(1, 1 + num_patches, seen),
        "embeddings.patch_embedding.weight": normal(seen, 3, side, side),
        "embeddings.patch_embedding.bias": normal(seen),
    }
    for index in range(_VISION["num_hidden_layers"]):
        shapes = {
            "attn.qkv": (3 * seen, seen),
            "attn.proj": (seen, seen),
            "mlp.fc1": (seen_inner, seen),
            "mlp.fc2": (seen, seen_inner),
        }
        layer = {f"{name}.weight": normal(*shape) for name, shape in shapes.items()}
        layer |= {f"{name}.bias": normal(shape[0]) for name, shape in shapes.items()}
        layer |= {f"norm{number}.weight": scale(seen) for number in (1, 2)}
        layer |= {f"norm{number}.bias": normal(seen) for number in (1, 2)}
        layer |= {f"ls{number}": scale(seen) for number in (1, 2)}
        vision |= {f"encoder.layers.{index}.{name}": part for name, part in layer.items()}
    weights |= {f"vision_model.{name}": part for name, part in vision.items()}

    weights |= {  # what makes embeddings of four patches each
        "mlp1.0.weight": scale(4 * seen),
        "mlp1.0.bias": normal(4 * seen),
        "mlp1.1.weight": normal(width, 4 * seen),
        "mlp1.1.bias": normal(width),
        "mlp1.3.weight": normal(width, width),
        "mlp1.3.bias": normal(width),
    }
    return weights
