"""A tiny Qwen2-Audio with random weights, and its processor.

Its encoder reads spectra of 30 seconds, as that of published weights does, whatever the length of
the audio. A second of audio becomes 25 tokens.
"""

from pathlib import Path

from tests.vllm_plugin.tiny.tiny_models import HEAD_DIM, VOCAB_SIZE
from tests.vllm_plugin.tiny.tiny_vision_models import FIRST_SPECIAL_TOKEN, TOKEN_IDS, _tokenizer

PLACEHOLDER = TOKEN_IDS["<audio>"]
TOKENS_PER_SECOND = 25

_MEL_BINS = 16
_AUDIO = {
    "num_mel_bins": _MEL_BINS,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "initializer_range": 0.15,
}
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 4 * HEAD_DIM,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save(path: Path) -> Path:
    """Make the model, and save it with its processor as `path`."""
    import torch
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    torch.manual_seed(0)
    config = Qwen2AudioConfig(audio_config=_AUDIO, text_config=_TEXT, audio_token_index=PLACEHOLDER)
    model = Qwen2AudioForConditionalGeneration(config).to(torch.float32).eval()
    embeddings = model.get_input_embeddings().weight.data
    embeddings.mul_(0.2)
    embeddings[FIRST_SPECIAL_TOKEN:] = 0
    model.save_pretrained(path)
    _name_text_layers_as_published(path)
    Qwen2AudioProcessor(
        WhisperFeatureExtractor(feature_size=_MEL_BINS),
        _tokenizer(),
        audio_bos_token="<start_of_audio>",
        audio_eos_token="<end_of_audio>",
    ).save_pretrained(path)
    return path


def _name_text_layers_as_published(path: Path) -> None:
    """Undo a second prefix that transformers adds to the text layers as it saves them."""
    from safetensors.torch import load_file, save_file

    twice, once = "language_model.model.model.", "language_model.model."
    weights = load_file(path / "model.safetensors")
    named = {name.replace(twice, once): weight for name, weight in weights.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
