"""Tiny models with random weights that read images, with the processors that cut these up.

Their processors need torchvision.
"""

import sys
from pathlib import Path

from tests.vllm_plugin.tiny import tiny_internvl, tiny_phi3_v
from tests.vllm_plugin.tiny.tiny_models import HEAD_DIM, VOCAB_SIZE

FIRST_SPECIAL_TOKEN = 500
"""Prompts of random tokens have none from here on."""

_SPECIAL_TOKENS = (
    "<image>",
    "<start_of_image>",
    "<end_of_image>",
    "<audio>",
    "<start_of_audio>",
    "<end_of_audio>",
    "<|video|>",
    "\n",
    "\n\n",
    "\n\n\n",
    "\n\n\n\n",
)
TOKEN_IDS = {token: FIRST_SPECIAL_TOKEN + index for index, token in enumerate(_SPECIAL_TOKENS)}
_INTERNVL_TOKENS = ("<image>", "<img>", "</img>", "<IMG_CONTEXT>")
"""The first one is what stands for an image in a prompt, as in the others."""

_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.15,
}
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_hidden_layers": 6,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


def _tokenizer():
    return _tokenizer_of(
        _SPECIAL_TOKENS,
        extra_special_tokens={
            "image_token": "<image>",
            "video_token": "<|video|>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
    )


def _tokenizer_of(special_tokens, **names):
    """Make a tokenizer of whole words; the tests' prompts are tokens already."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(FIRST_SPECIAL_TOKEN)}
    words |= {token: FIRST_SPECIAL_TOKEN + index for index, token in enumerate(special_tokens)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="w1",
        eos_token="w2",
        pad_token="w0",
        unk_token="w3",
        **names,
    )


def _gemma3():
    """Get a Gemma 3 whose images take 25 tokens: less than its windows, more than a page."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=_TEXT | {"query_pre_attn_scalar": HEAD_DIM},
        vision_config=_VISION | {"image_size": 40, "patch_size": 4},
        mm_tokens_per_image=25,
        boi_token_index=TOKEN_IDS["<start_of_image>"],
        eoi_token_index=TOKEN_IDS["<end_of_image>"],
        image_token_index=TOKEN_IDS["<image>"],
    )
    return Gemma3ForConditionalGeneration(config)


def _finish_gemma3(path):
    """Save its processor, and call its vision layers what published checkpoints call them."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(size={"height": 40, "width": 40})
    Gemma3Processor(images, _tokenizer(), image_seq_length=25).save_pretrained(path)
    _name_vision_layers_as_published(path)


def _paligemma():
    """Get a PaliGemma 2 whose images take 25 tokens."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig(
        text_config=_TEXT | {"model_type": "gemma2", "query_pre_attn_scalar": HEAD_DIM},
        vision_config=_VISION | {"image_size": 40, "patch_size": 8, "vision_use_head": False},
        projection_dim=_TEXT["hidden_size"],
        hidden_size=_TEXT["hidden_size"],
        vocab_size=VOCAB_SIZE,
        image_token_index=TOKEN_IDS["<image>"],
    )
    return PaliGemmaForConditionalGeneration(config)


def _finish_paligemma(path):
    """Save its processor, and call its vision layers what published checkpoints call them."""
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    images = SiglipImageProcessor(size={"height": 40, "width": 40}, image_seq_length=25)
    PaliGemmaProcessor(images, _tokenizer()).save_pretrained(path)
    _name_vision_layers_as_published(path)


def _gemma4():
    """Get a Gemma 4 whose images take 64 tokens: more than its windows reach."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config(
        text_config=_TEXT
        | {
            "global_head_dim": 2 * HEAD_DIM,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
        },
        vision_config=_VISION
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "patch_size": 4,
            "default_output_length": 70,
            "pooling_kernel_size": 2,
        },
        audio_config=None,
        boi_token_id=TOKEN_IDS["<start_of_image>"],
        eoi_token_id=TOKEN_IDS["<end_of_image>"],
        image_token_id=TOKEN_IDS["<image>"],
        video_token_id=TOKEN_IDS["<|video|>"],
        boa_token_id=TOKEN_IDS["<start_of_audio>"],
        eoa_token_index=TOKEN_IDS["<end_of_audio>"],
        audio_token_id=TOKEN_IDS["<audio>"],
    )
    return Gemma4ForConditionalGeneration(config)


def _finish_gemma4(path):
    """Save its processor."""
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    cuts = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}
    Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**cuts),
        _tokenizer(),
        Gemma4VideoProcessor(**cuts),
        image_seq_length=70,
    ).save_pretrained(path)


MLLAMA_IMAGE = VOCAB_SIZE
"""Token of an image in Llama 3.2 Vision: the first one behind the vocabulary."""

MLLAMA_TILE_TOKENS = 17
"""Tokens of a tile of 56 by 56 pixels: a page and one slot, as the model's real tiles have."""


def _mllama():
    """Get a Llama 3.2 Vision with open gates: those of a new configuration hide every image."""
    import torch
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 3 * 64,
        "max_num_tiles": 4,
        "initializer_range": 0.15,
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    }
    kept = {
        name: value for name, value in _TEXT.items() if not name.endswith(("head_dim", "types"))
    }
    text = kept | {"hidden_size": 4 * HEAD_DIM, "num_hidden_layers": 5}
    text |= {"cross_attention_layers": [1, 3]}
    text.pop("sliding_window")
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=MLLAMA_IMAGE)
    model = MllamaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "gate" in name and "proj" not in name:
            torch.nn.init.ones_(weight)
    return model


def _finish_mllama(path):
    """Save its processor. The token of an image is behind the vocabulary."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import MllamaImageProcessor, MllamaProcessor, PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCAB_SIZE)} | {"<|image|>": MLLAMA_IMAGE}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(["<|image|>"])
    names = {"bos_token": "w1", "eos_token": "w2", "pad_token": "w0", "unk_token": "w3"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    images = MllamaImageProcessor(size={"height": 56, "width": 56}, max_image_tiles=4)
    MllamaProcessor(images, fast).save_pretrained(path)


_QWEN_TEXT = {
    key: value for key, value in _TEXT.items() if key not in {"sliding_window", "layer_types"}
} | {"hidden_size": 4 * HEAD_DIM, "num_hidden_layers": 3}  # vLLM does not read its head_dim


def _llava_onevision():
    """Get a LLaVA-OneVision whose images take 55 tokens, 5 of which begin new lines of a tile."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    config = LlavaOnevisionConfig(
        text_config=_QWEN_TEXT | {"model_type": "qwen2"},
        vision_config=_VISION
        | {
            "model_type": "siglip_vision_model",
            "image_size": 40,
            "patch_size": 8,
            "vision_use_head": False,
        },
        image_grid_pinpoints=[[40, 40]],
        image_token_index=TOKEN_IDS["<image>"],
        video_token_index=TOKEN_IDS["<|video|>"],
    )
    return LlavaOnevisionForConditionalGeneration(config)


def _finish_llava_onevision(path):
    """Save its processor, and call its vision layers what published checkpoints call them."""
    from transformers import (
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    size = {"height": 40, "width": 40}
    LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=[[40, 40]]),
        _tokenizer(),
        LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=25,
        vision_feature_select_strategy="full",
    ).save_pretrained(path)
    _name_vision_layers_as_published(path)


def _qwen2_5_vl():
    """Get a Qwen2.5-VL whose images take 25 tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=_QWEN_TEXT
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "out_hidden_size": 4 * HEAD_DIM,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.15,
        },
        image_token_id=TOKEN_IDS["<image>"],
        video_token_id=TOKEN_IDS["<|video|>"],
        vision_start_token_id=TOKEN_IDS["<start_of_image>"],
        vision_end_token_id=TOKEN_IDS["<end_of_image>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _finish_qwen2_5_vl(path):
    """Save its processor."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    cuts = {
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 40 * 40, "longest_edge": 40 * 40},
    }
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**cuts), _tokenizer(), Qwen2VLVideoProcessor(**cuts)
    ).save_pretrained(path)


def _name_vision_layers_as_published(path):
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in weights.items()
    }
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})


_MAKERS = {
    "gemma3_vision": _gemma3,
    "gemma4_vision": _gemma4,
    "llava_onevision": _llava_onevision,
    "mllama": _mllama,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen2_5_vl,
}
_FINISHERS = {
    "gemma3_vision": _finish_gemma3,
    "gemma4_vision": _finish_gemma4,
    "llava_onevision": _finish_llava_onevision,
    "mllama": _finish_mllama,
    "paligemma": _finish_paligemma,
    "qwen2_5_vl": _finish_qwen2_5_vl,
}
PLACEHOLDERS = {
    "gemma3_vision": "<start_of_image>",
    "gemma4_vision": "<image>",
    "internvl_chat": "<image>",
    "llava_onevision": "<image>",
    "phi3_v": "<image>",
    "qwen2_5_vl": "<image>",
}
"""What stands for an image in a prompt."""


def main(name: str, path: Path) -> None:
    """Make the model named `name` and save it as `path`."""
    import torch

    torch.manual_seed(0)
    if name == "internvl_chat":  # transformers has no class for it
        tokenizer = _tokenizer_of(_INTERNVL_TOKENS)
        tiny_internvl.save(path, tokenizer, first_special_token=FIRST_SPECIAL_TOKEN)
        return
    if name == "phi3_v":  # nor for this
        tiny_phi3_v.save(path, first_placeholder=FIRST_SPECIAL_TOKEN)
        return
    model = _MAKERS[name]().to(torch.float32).eval()
    # Heads are tied to embeddings: at full width every token predicts itself. None is an image's.
    embeddings = model.get_input_embeddings().weight.data
    embeddings.mul_(0.2)
    embeddings[FIRST_SPECIAL_TOKEN:] = 0
    model.save_pretrained(path)
    _FINISHERS[name](path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
