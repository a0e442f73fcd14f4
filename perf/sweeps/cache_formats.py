"""Measure the loss of Gemma 3 270M with caches of fewer bits, compared with full precision.

    python -m perf.sweeps.cache_formats [--windows N] [--tokens N]

Every layer reads all keys and values, those of its own chunk too, as a cache of the format would
return them. Everything else is float32. The text is Python's language reference, which comes with
Python. No speed is measured. The columns are:

- the loss in nats per token;
- its increase over a full cache, and the standard error of this increase over windows;
- the divergence of the next token's distribution from that of a full cache;
- "same", the share of tokens whose likeliest successor is unchanged.

Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms).
"""

import argparse
import platform
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jenga.demo.weights import gemma3_270m_directory
from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.checks.tensors import E5M2_DTYPE, FP8_DTYPE
from jenga_kernels.reference.attention.kv_store import quantised, quantised_int4
from jenga_kernels.reference.attention.paged_attention import from_int4

Format = Callable[[torch.Tensor], torch.Tensor]
"""Function from heads [rows, head_dim] to the values that a cache of the format returns."""


def unscaled(dtype: torch.dtype) -> Format:
    """Make a format: float8 without scales."""
    most = torch.finfo(dtype).max
    return lambda rows: rows.clamp(-most, most).to(dtype).float()


def with_slot_scales(dtype: torch.dtype) -> Format:
    """Make a format with one byte per element, and a scale for each head of each slot."""

    def store(rows: torch.Tensor) -> torch.Tensor:
        stored, scales = quantised(rows, dtype)
        return stored.float() * scales[:, None]

    return store


def in_int4(rows: torch.Tensor) -> torch.Tensor:
    """Convert to four bits per element and back.

    Each head of each slot has a step and a least element.
    """
    return from_int4(*quantised_int4(rows), torch.float32)


def in_int4_with_zero_points(rows: torch.Tensor) -> torch.Tensor:
    """Convert to four bits per element and back, as in vLLM's int4_per_token_head.

    Zero is a whole number of steps above the least element.
    """
    least, most = rows.aminmax(dim=-1, keepdim=True)
    step = ((most - least) / 15).clamp(min=1e-6)
    zero = (-least / step).round().clamp(0, 15)
    return ((rows / step + zero).round().clamp(0, 15) - zero) * step


def rotated(store: Format) -> Format:
    """Make a format that rotates heads before it stores them, and rotates the results back."""

    def store_rotated(rows: torch.Tensor) -> torch.Tensor:
        rotation = hadamard_rotation(rows.shape[-1], rows.dtype, rows.device)
        return store(rows @ rotation.forward) @ rotation.back

    return store_rotated


FORMATS: Mapping[str, Format] = {
    "bfloat16": lambda rows: rows.bfloat16().float(),
    "fp8, unscaled": unscaled(FP8_DTYPE),
    "fp8_e5m2, unscaled": unscaled(E5M2_DTYPE),
    "fp8_per_token_head": with_slot_scales(FP8_DTYPE),
    "int8_per_token_head": with_slot_scales(torch.int8),
    "int4, not rotated": in_int4,
    "int4, rotated, whole zero points": rotated(in_int4_with_zero_points),
    "int4_per_token_head": rotated(in_int4),
}
"""Name in the table -> format.

If a name is an option of vLLM, Jenga serves this option in that format.
"""


@torch.inference_mode()
def log_probabilities(
    model: torch.nn.Module, window: torch.Tensor, store: Format | None
) -> torch.Tensor:
    """Return log-probabilities of the successors of a window's tokens, [tokens - 1, vocabulary]."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend_to_stored(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> object:
        if store is not None:
            key, value = (store(t.reshape(-1, t.shape[-1])).reshape(t.shape) for t in (key, value))
        return attend(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend_to_stored)
    try:
        return model(window[None]).logits[0, :-1].log_softmax(-1)
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def compared(
    model: torch.nn.Module, windows: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return the losses of a full cache, [windows], and each format's loss, divergence and same.

    Each format has a tensor [windows, 3].
    """
    losses = []
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMATS}
    for window in windows:
        successors = window[1:, None]
        exact = log_probabilities(model, window, None)
        losses.append(-exact.gather(-1, successors).mean())
        for name, store in FORMATS.items():
            found = log_probabilities(model, window, store)
            loss = -found.gather(-1, successors).mean()
            divergence = (exact.exp() * (exact - found)).sum(-1).mean()
            same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
            rows[name].append((loss.item(), divergence.item(), same.item()))
    return torch.stack(losses), {name: torch.tensor(each) for name, each in rows.items()}


def main() -> None:
    """Print a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--windows", type=int, default=8, help="number of windows of text (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, help="tokens of a window (default: %(default)s)"
    )
    options = parser.parse_args()
    directory = gemma3_270m_directory("float32")
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    body = tokens[1 : 1 + options.windows * (options.tokens - 1)].reshape(options.windows, -1)
    windows = torch.cat([tokens[:1].expand(options.windows, 1), body], 1)

    print(f"Gemma 3 270M, {options.windows} windows of {options.tokens} tokens")
    print(f"Python {platform.python_version()}'s language reference, torch {torch.__version__}")
    print()
    print(f"{'cache':<34}{'loss':>8}{'more':>10}{'+-':>9}{'divergence':>12}{'same':>9}")
    exact, rows = compared(model, windows)
    print(f"{'full':<34}{exact.mean():>8.4f}")
    for name, row in rows.items():
        loss, divergence, same = row.unbind(1)
        error = (loss - exact).std() / options.windows**0.5
        print(
            f"{name:<34}{loss.mean():>8.4f}{(loss - exact).mean():>10.4f}{error:>9.4f}"
            f"{divergence.mean():>12.5f}{100 * same.mean():>8.2f}%"
        )


if __name__ == "__main__":
    main()
