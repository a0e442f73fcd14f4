"""Tiny models by name, saved as Hugging Face directories.

So vLLM loads them as it loads any model, and both backends read the same numbers.
"""

from pathlib import Path

from tests.vllm_plugin.tiny import tiny_drafts, tiny_finishers, tiny_models

MAKERS = tiny_models.MAKERS | tiny_drafts.MAKERS
DELTA_NETS = (
    "qwen3_next",
    "qwen3_next_64",
    "qwen3_next_calm",
    "qwen3_next_mtp",
    "qwen3_5",
    "qwen3_5_mtp",
)
FINISHERS = tiny_finishers.FINISHERS | tiny_drafts.FINISHERS


def save(name: str, directory: Path) -> Path:
    """Make the model named `name` and save it under `directory`."""
    import torch

    torch.manual_seed(0)
    model = MAKERS[name]().to(torch.float32).eval()
    if name in ("gemma2", "gemma2_draft", "gemma3", "gemma4", "gemma4_experts", "bloom", "whisper"):
        # They tie their heads to their embeddings: at full width every token predicts itself.
        model.get_input_embeddings().weight.data.mul_(0.4)
    if name in ("gpt_oss", "mimo_v2", "mimo_v2_mtp"):
        # Sinks start at zero in a fresh model; give them weight, so that leaving them out shows.
        for layer_name, parameter in model.named_parameters():
            if layer_name.endswith("sinks"):
                torch.nn.init.normal_(parameter, mean=1.0, std=1.0)
    if name in DELTA_NETS:
        # Fresh rates of decay forget nearly all within a token; keep what shows over a prompt.
        for layer_name, parameter in model.named_parameters():
            if layer_name.endswith("A_log"):
                torch.nn.init.uniform_(parameter, -4.0, 0.0)
    path = directory / name
    model.save_pretrained(path)
    if name in FINISHERS:
        FINISHERS[name](path)
    return path
