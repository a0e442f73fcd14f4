"""What each kind of recurrent layers keeps beside states that are seldom written.

A kind says which parts lie behind the states in a page, and what the kernels take them for. All
else is the same for every kind: `state_history`, `state_counts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from jenga.vllm_plugin.specs.layer_types import PER_CHANNEL_DELTA_MODELS
from jenga_kernels.checks.histories import MAX_DELTA_HISTORY, DeltaHistory, InputHistory

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.kv_cache_interface import MambaSpec

NUM_STATES = 2
"""Of a layer: its convolution's and its recurrence's."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one tensor of a history has in a page.

    Attributes:
        shape: (heads, tokens), or (heads, tokens, elements) where a token's row is more than one.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryKind:
    """A kind of layers whose steps need not write states.

    Attributes:
        layers: What they are called.
        parts: Of a layer's spec, a number of tokens and the model: what their history takes, with
            rows before single elements, so that each part begins at a multiple of 16 bytes.
        history: Of these parts as views, [num_slots, *shape] each: what the kernels take.
        max_tokens: Most tokens that they take; None for any number.
    """

    layers: str
    parts: Callable[["MambaSpec", int, "ModelConfig"], tuple[Part, ...]]
    history: Callable[[Sequence[torch.Tensor]], InputHistory | DeltaHistory]
    max_tokens: int | None = None


def _num_channels(spec: "MambaSpec") -> int:
    """Get the channels of a layer's convolution."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return spec.shapes[0][0 if is_conv_state_dim_first() else 1]


def _input_parts(spec: "MambaSpec", num_tokens: int, model: "ModelConfig") -> tuple[Part, ...]:
    num_heads, head_dim, d_state = spec.shapes[1]
    num_groups = (_num_channels(spec) - num_heads * head_dim) // (2 * d_state)
    return (
        Part((num_heads, num_tokens, head_dim), model.dtype),
        Part((num_groups, num_tokens, d_state), model.dtype),
        Part((num_heads, num_tokens), torch.float32),
    )


def _input_history(parts: Sequence[torch.Tensor]) -> InputHistory:
    x, B, dt = parts  # noqa: N806
    return InputHistory(x=x, dt=dt, B=B)


def _delta_parts(spec: "MambaSpec", num_tokens: int, model: "ModelConfig") -> tuple[Part, ...]:
    num_v_heads, head_v_dim, head_k_dim = spec.shapes[1]
    num_qk_heads = (_num_channels(spec) - num_v_heads * head_v_dim) // (2 * head_k_dim)
    # Sums of them are what float16 states hold; alone they may be beyond its range.
    changes = torch.float32 if spec.dtypes[1] is torch.float16 else spec.dtypes[1]
    is_per_channel = model.architecture in PER_CHANNEL_DELTA_MODELS
    decays = (num_v_heads, num_tokens, head_k_dim) if is_per_channel else (num_v_heads, num_tokens)
    return (
        Part((num_v_heads, num_tokens, head_v_dim), changes),
        Part((num_qk_heads, num_tokens, head_k_dim), model.dtype),
        Part(decays, torch.float32),
    )


def _delta_history(parts: Sequence[torch.Tensor]) -> DeltaHistory:
    changes, keys, decays = parts
    return DeltaHistory(changes=changes, keys=keys, decays=decays)


HISTORY_KINDS = {
    "MAMBA2": HistoryKind(layers="Mamba-2 layers", parts=_input_parts, history=_input_history),
    "GDN_ATTN": HistoryKind(
        layers="layers of the gated delta rule",
        parts=_delta_parts,
        history=_delta_history,
        max_tokens=MAX_DELTA_HISTORY,
    ),
}
"""By vLLM's word for the kind."""
