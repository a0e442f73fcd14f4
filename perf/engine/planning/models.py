"""Models with the widths of real ones and random weights: weights do not change the time of a step.

The widths are those of the named Hugging Face configurations. A model has three scales:

- all layers;
- a few layers of each kind, to compile kernels before anything is timed;
- a tiny twin of the same architecture, which a CPU can serve.
"""

import contextlib
import enum
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Scale(enum.Enum):
    """Size at which a model is built: all layers, a few layers, or a tiny twin."""

    FULL = "full"
    SHORT = "short"
    TINY = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One architecture at its real widths.

    Attributes:
        name: Name in rows.
        config: Name of the configuration class in transformers.
        architecture: Name of the model class in vLLM.
        widths: Arguments of the configuration.
        short: Arguments that replace some of `widths` for a few layers of each kind.
        tiny: Arguments that replace some of `widths` for a twin that a CPU can serve.
        has_windows: Whether some layers attend through a sliding window.
        has_states: Whether some layers are recurrent.
        has_experts: Whether the engine needs vLLM's compiled operations for experts.
        has_gated_deltas: Whether recurrent layers are gated delta nets.
        cpu_dtype: Element type in which vLLM's CPU build serves the tiny twin.
    """

    name: str
    config: str
    architecture: str
    widths: dict[str, Any]
    short: dict[str, Any]
    tiny: dict[str, Any]
    has_windows: bool = False
    has_states: bool = False
    has_experts: bool = False
    has_gated_deltas: bool = False
    cpu_dtype: str = "float32"

    def arguments(self, scale: Scale) -> dict[str, Any]:
        """Return the arguments of the configuration at a scale."""
        changes = {Scale.FULL: {}, Scale.SHORT: self.short, Scale.TINY: self.tiny}[scale]
        return self.widths | changes

    def configuration(self, scale: Scale) -> dict[str, Any]:
        """Return the argument of `save`: a transformers class and its constructor's arguments."""
        arguments = self.arguments(scale) | {"architectures": [self.architecture]}
        return {"class": self.config, "arguments": arguments}


def save(configuration: dict[str, Any], folder: Path) -> None:
    """Write a configuration in Hugging Face's format, unless its folder exists.

    Several processes may do so at the same time.

    Args:
        configuration: `class` is the name of a class in transformers, and `arguments` are its
            arguments.
        folder: Folder to write.
    """
    import transformers

    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary) / "model"
        made = getattr(transformers, configuration["class"])(**configuration["arguments"])
        made.save_pretrained(new)
        with contextlib.suppress(OSError):  # another process was faster
            new.rename(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A model that drafts tokens for another one.

    Attributes:
        model: The draft model. It has the target's vocabulary.
        num_tokens: Number of tokens drafted in a step.
        acceptance: Share of the drafted tokens that the target accepts, 0 to 1. The random weights
            are made so.
        method: vLLM's name of the drafting method.
    """

    model: Model
    num_tokens: int = 4
    acceptance: float = 0.7
    method: str = field(default="draft_model", init=False)


_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}

# Some configurations cannot set the head dimension; there it is hidden_size / num_attention_heads.
_TINY_TWO_HEADS = {key: value for key, value in _TINY.items() if key != "head_dim"} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _every(period: int, num_layers: int, *, rare: str, common: str) -> list[str]:
    """List the kinds of layers. Each `period`-th layer is of the rare kind."""
    return [rare if index % period == period - 1 else common for index in range(num_layers)]


def _windows(num_layers: int, period: int = 6) -> dict[str, Any]:
    """Return a Gemma's layers: sliding windows, and full attention in each `period`-th layer."""
    kinds = _every(period, num_layers, rare="full_attention", common="sliding_attention")
    return {"num_hidden_layers": num_layers, "layer_types": kinds}


GEMMA_3_4B = Model(
    name="gemma-3-4b",
    config="Gemma3TextConfig",
    architecture="Gemma3ForCausalLM",
    widths={
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
        **_windows(34),
    },
    short=_windows(6),
    tiny=_TINY | _windows(6) | {"sliding_window": 40, "query_pre_attn_scalar": 64},
    has_windows=True,
)

# The real model has 60 layers. A fifth of them, in the same proportion, leaves room for the cache
# on an H100. A byte of cache then holds five times as many tokens, for all kinds of layers alike.
GEMMA_4_31B_FIFTH = Model(
    name="gemma-4-31b-12-layers",
    config="Gemma4TextConfig",
    architecture="Gemma4ForCausalLM",
    widths={
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        **_windows(12),
    },
    short=_windows(6),
    tiny=_TINY
    | _windows(6)
    | {"sliding_window": 40, "num_global_key_value_heads": 1, "vocab_size_per_layer_input": 512},
    has_windows=True,
)

_NEMOTRON_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}


def _nemotron_layers(pattern: str) -> dict[str, Any]:
    return {"layers_block_type": [_NEMOTRON_KINDS[kind] for kind in pattern]}


# nvidia/Nemotron-H-8B-Base-8K, with a longer maximum length.
NEMOTRON_H_8B = Model(
    name="nemotron-h-8b",
    config="NemotronHConfig",
    architecture="NemotronHForCausalLM",
    widths={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 128,
        "max_position_embeddings": 131_072,
        **_nemotron_layers("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
    },
    short=_nemotron_layers("M*-M"),
    tiny=_TINY
    | _nemotron_layers("M*-M")
    | {
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
        "chunk_size": 256,
    },
    has_states=True,
)

_TINY_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_chunk_size": 256,  # in vLLM's CPU build a prompt has one chunk
}

# tiiuae/Falcon-H1-7B-Instruct. Its multipliers of activations change no shape and are left out.
FALCON_H1_7B = Model(
    name="falcon-h1-7b",
    config="FalconH1Config",
    architecture="FalconH1ForCausalLM",
    widths={
        "vocab_size": 130_048,
        "hidden_size": 3072,
        "intermediate_size": 12_288,
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 128,
        "max_position_embeddings": 262_144,
    },
    short={"num_hidden_layers": 2},
    tiny=_TINY_TWO_HEADS
    | _TINY_MAMBA
    | {"head_dim": 64, "mamba_d_ssm": 256, "num_hidden_layers": 2},
    has_states=True,
)


def _granite_layers(num_layers: int, attention: tuple[int, ...]) -> dict[str, Any]:
    kinds = ["attention" if index in attention else "mamba" for index in range(num_layers)]
    return {"num_hidden_layers": num_layers, "layer_types": kinds}


# ibm-ai-platform/Bamba-9B, with a longer maximum length. vLLM 0.32 has no class for it any more. A
# Granite 4 without experts has the same layers, and gets the same widths here.
BAMBA_9B = Model(
    name="bamba-9b",
    config="GraniteMoeHybridConfig",
    architecture="GraniteMoeHybridForCausalLM",
    widths={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "shared_intermediate_size": 14_336,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "position_embedding_type": "rope",
        "attention_multiplier": 128**-0.5,
        "max_position_embeddings": 131_072,
        **_granite_layers(32, (9, 18, 27)),
    },
    short=_granite_layers(3, (1,)),
    tiny=_TINY_TWO_HEADS
    | _TINY_MAMBA
    | _granite_layers(3, (1,))
    | {"shared_intermediate_size": 256, "attention_multiplier": 0.125},
    has_states=True,
)

_LLAMA_VOCABULARY = 128_256

LLAMA_3_1_8B = Model(
    name="llama-3.1-8b",
    config="LlamaConfig",
    architecture="LlamaForCausalLM",
    widths={
        "vocab_size": _LLAMA_VOCABULARY,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    short={"num_hidden_layers": 2},
    tiny=_TINY | {"num_hidden_layers": 3},
)

# The head is not tied to the embeddings here, so that the weights can determine the drafted tokens.
# This costs 0.5 GB.
LLAMA_3_2_1B = Model(
    name="llama-3.2-1b",
    config="LlamaConfig",
    architecture="LlamaForCausalLM",
    widths={
        "vocab_size": _LLAMA_VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    short={"num_hidden_layers": 2},
    tiny=_TINY | {"num_hidden_layers": 1},
)


def _alternating(num_layers: int) -> dict[str, Any]:
    kinds = _every(2, num_layers, rare="full_attention", common="sliding_attention")
    return {"num_hidden_layers": num_layers, "layer_types": kinds}


# openai/gpt-oss-20b with experts in bfloat16 (42 GB), whose kernels need no other library.
GPT_OSS_20B = Model(
    name="gpt-oss-20b",
    config="GptOssConfig",
    architecture="GptOssForCausalLM",
    widths={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        **_alternating(24),
    },
    short=_alternating(2),
    tiny=_TINY
    | _alternating(4)
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    has_windows=True,
    has_experts=True,
)


GRANITE_4_H_SMALL = Model(
    name="granite-4.0-h-small",
    config="GraniteMoeHybridConfig",
    architecture="GraniteMoeHybridForCausalLM",
    widths={
        "vocab_size": 100_352,
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "position_embedding_type": "nope",
        "attention_multiplier": 1 / 128,
        "max_position_embeddings": 131_072,
        **_granite_layers(40, (5, 15, 25, 35)),
    },
    short=_granite_layers(3, (1,)),
    tiny=_TINY_TWO_HEADS
    | _TINY_MAMBA
    | _granite_layers(3, (1,))
    | {
        "intermediate_size": 64,
        "shared_intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.125,
    },
    has_states=True,
    has_experts=True,
)


def _qwen_layers(num_layers: int) -> dict[str, Any]:
    kinds = _every(4, num_layers, rare="full_attention", common="linear_attention")
    return {"num_hidden_layers": num_layers, "layer_types": kinds}


# Qwen/Qwen3-Next-80B-A3B-Instruct with 64 of its 512 experts, so that it fits on one GPU.
QWEN3_NEXT_64_EXPERTS = Model(
    name="qwen3-next-64-experts",
    config="Qwen3NextConfig",
    architecture="Qwen3NextForCausalLM",
    widths={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262_144,
        **_qwen_layers(48),
    },
    short=_qwen_layers(4),
    tiny=_TINY_TWO_HEADS
    | _qwen_layers(4)
    | {
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    has_states=True,
    has_experts=True,
    has_gated_deltas=True,
    cpu_dtype="bfloat16",
)

MODELS = (
    GEMMA_3_4B,
    NEMOTRON_H_8B,
    FALCON_H1_7B,
    BAMBA_9B,
    LLAMA_3_1_8B,
    GPT_OSS_20B,
    GRANITE_4_H_SMALL,
    QWEN3_NEXT_64_EXPERTS,
    GEMMA_4_31B_FIFTH,
    LLAMA_3_2_1B,
)
"""All models."""
