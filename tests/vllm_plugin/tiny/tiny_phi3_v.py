"""A tiny Phi-3 Vision with random weights, under the names of the published one.

vLLM's class fixes much of the encoder: the width and heads of CLIP ViT-L/14, crops of 336 by 336
pixels, and the token of an image. So only its depth is tiny, and an image takes 313 tokens or more.
"""

import json
import shutil
from pathlib import Path

from tests.vllm_plugin.tiny.tiny_models import HEAD_DIM

MAX_CROPS = 2
"""Without the overview. An image of two crops takes 457 tokens side by side, 469 if stacked."""

_NUM_PLACEHOLDERS = 2
_IMAGE_TOKEN = 32044
_NUM_HEADS = 2
_WIDTH = _NUM_HEADS * HEAD_DIM
_INNER = 256
_NUM_LAYERS = 3
_VOCAB_SIZE = 32064
_CLIP_WIDTH, _CLIP_INNER, _CLIP_PATCHES = 1024, 4096, 24 * 24

_CONFIG = {
    "architectures": ["Phi3VForCausalLM"],
    "model_type": "phi3_v",
    "auto_map": {"AutoConfig": "phi3_v_config.Phi3VConfig"},
    "torch_dtype": "float32",
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": _NUM_LAYERS,
    "num_attention_heads": _NUM_HEADS,
    "num_key_value_heads": _NUM_HEADS,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 2048,
    "sliding_window": 2048,  # all of its context, as published
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "embd_layer": {
        "embedding_cls": "image",
        "hd_transform_order": "sub_glb",
        "projection_cls": "mlp",
        "use_hd_transform": True,
        "with_learnable_separator": True,
    },
    "img_processor": {
        "image_dim_out": _CLIP_WIDTH,
        "layer_idx": 0,  # the layer of the encoder that the language model sees: the first one
        "name": "clip_vision_model",
        "num_img_tokens": 144,
    },
}


def save(path: Path, *, first_placeholder: int) -> None:
    """Save the model with its processor and the classes of both.

    Args:
        path: Directory to make.
        first_placeholder: Token that stands for the first image of a prompt; the next one stands
            for the second. Smaller tokens are words.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    save_file(_weights(first_placeholder), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    processor = {
        "processor_class": "Phi3VProcessor",
        "auto_map": {"AutoProcessor": "phi3_v_processor.Phi3VProcessor"},
        "num_crops": MAX_CROPS,
    }
    (path / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    for module in ("phi3_v_config.py", "phi3_v_processor.py"):
        shutil.copy(Path(__file__).with_name(module), path)
    _tokenizer(first_placeholder).save_pretrained(path)


def _tokenizer(first_placeholder):
    """Make a tokenizer of whole words, which begins each text as the published one does.

    vLLM turns prompts of tokens into text and back, to find the images in it.
    """
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ("<unk>", "<s>", "</s>")  # none begins like a word, which it would split
    words = {token: index for index, token in enumerate(special)}
    words |= {f"w{index}": index for index in range(len(special), first_placeholder)}
    for index in range(_NUM_PLACEHOLDERS):
        words[f"<|image_{index + 1}|>"] = first_placeholder + index
    words["<|image|>"] = _IMAGE_TOKEN
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )


def _weights(num_words):
    """Make weights that let images change every answer, and none answer with an image's token."""
    import torch

    def normal(*shape):
        return torch.randn(shape)

    def matrix(rows, columns):
        return 2 * normal(rows, columns) / columns**0.5

    def linear(name, rows, columns):
        return {f"{name}.weight": matrix(rows, columns), f"{name}.bias": 0.1 * normal(rows)}

    def norm(name, width):
        return {f"{name}.weight": 1 + 0.15 * normal(width), f"{name}.bias": 0.1 * normal(width)}

    rows = {"embed_tokens": 0.1 * normal(_VOCAB_SIZE, _WIDTH)}
    rows["lm_head"] = matrix(_VOCAB_SIZE, _WIDTH)
    for each in rows.values():
        each[num_words:] = 0
    weights = {
        "lm_head.weight": rows["lm_head"],
        "model.embed_tokens.weight": rows["embed_tokens"],
        "model.norm.weight": 1 + 0.15 * normal(_WIDTH),
    }
    for index in range(_NUM_LAYERS):
        layer = {
            "self_attn.qkv_proj": matrix(3 * _WIDTH, _WIDTH),
            "self_attn.o_proj": matrix(_WIDTH, _WIDTH),
            "mlp.gate_up_proj": matrix(2 * _INNER, _WIDTH),
            "mlp.down_proj": matrix(_WIDTH, _INNER),
            "input_layernorm": 1 + 0.15 * normal(_WIDTH),
            "post_attention_layernorm": 1 + 0.15 * normal(_WIDTH),
        }
        weights |= {f"model.layers.{index}.{name}.weight": part for name, part in layer.items()}

    vision = {
        "embeddings.class_embedding": normal(_CLIP_WIDTH),
        "embeddings.patch_embedding.weight": matrix(_CLIP_WIDTH, 3 * 14 * 14).reshape(
            _CLIP_WIDTH, 3, 14, 14
        ),
        "embeddings.position_embedding.weight": normal(1 + _CLIP_PATCHES, _CLIP_WIDTH),
    }
    vision |= norm("pre_layrnorm", _CLIP_WIDTH) | norm("post_layernorm", _CLIP_WIDTH)
    layer = "encoder.layers.0."
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        vision |= linear(f"{layer}self_attn.{name}", _CLIP_WIDTH, _CLIP_WIDTH)
    vision |= linear(f"{layer}mlp.fc1", _CLIP_INNER, _CLIP_WIDTH)
    vision |= linear(f"{layer}mlp.fc2", _CLIP_WIDTH, _CLIP_INNER)
    vision |= norm(f"{layer}layer_norm1", _CLIP_WIDTH) | norm(f"{layer}layer_norm2", _CLIP_WIDTH)

    embedding = {f"img_processor.vision_model.{name}": part for name, part in vision.items()}
    embedding |= {
        "glb_GN": normal(1, 1, 4 * _CLIP_WIDTH),
        "sub_GN": normal(1, 1, 1, 4 * _CLIP_WIDTH),
    }
    embedding |= linear("img_projection.0", _WIDTH, 4 * _CLIP_WIDTH)
    embedding |= linear("img_projection.2", _WIDTH, _WIDTH)
    return weights | {f"model.vision_embed_tokens.{name}": part for name, part in embedding.items()}
