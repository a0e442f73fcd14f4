"""Histories that each kind of recurrent layers stores beside states that are seldom written.

A kind defines the parts that follow the states in a page, and how the kernels take them. Everything
else is the same for every kind: see `replay_layout` and `replay_counts`.
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
"""Number of states of a layer: one of its convolution and one of its recurrence."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a history, as it lies in a page.

    Attributes:
        shape: (heads, tokens), or (heads, tokens, elements) if a token has more than one element.
        dtype: Element type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryKind:
    """A kind of layers whose steps need not write states.

    Attributes:
        layers: Name of the kind in messages.
        parts: Function of a layer's spec, a number of tokens and the model. It returns the parts of
            a history. Parts with rows come before those with single elements, so that each part
            begins at a multiple of 16 bytes.
        history: Function of views of these parts, each [num_slots, *shape]. It returns the history
            in the form that the kernels take.
        least_bytes: Bytes of a step's states in one layer from which on the step does not write all
            of them. For fewer bytes the time of a step is known to be longer, or not known at all.
        max_tokens: Largest number of tokens that the kernels support. None means any number.
    """

    layers: str
    parts: Callable[["MambaSpec", int, "ModelConfig"], tuple[Part, ...]]
    history: Callable[[Sequence[torch.Tensor]], InputHistory | DeltaHistory]
    least_bytes: int
    max_tokens: int | None = None


def _num_channels(spec: "MambaSpec") -> int:
    """Get the number of channels of a layer's convolution."""
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
    # float16 states hold sums of changes. A single change may be out of float16's range.
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


LEAST_MAMBA2_BYTES = 64 << 20
"""On an H100, steps of 8 requests of Nemotron-H take longer if they do not write all states, and
steps of 64 requests take less time. These are 32 and 256 MiB of states in float32, half as many in
bfloat16. Straight lines between these times meet at 41 and 39 MiB. An H200 has more
bandwidth, and so the lines would meet at more bytes there.
"""

LEAST_DELTA_BYTES = 128 << 20
"""The fewest bytes for which such a step was timed: 64 requests of Qwen3-Next, on an H200. It takes
0.95 of the time of a step that writes all states.
"""

HISTORY_KINDS = {
    "MAMBA2": HistoryKind(
        layers="Mamba-2 layers",
        parts=_input_parts,
        history=_input_history,
        least_bytes=LEAST_MAMBA2_BYTES,
    ),
    "GDN_ATTN": HistoryKind(
        layers="layers of the gated delta rule",
        parts=_delta_parts,
        history=_delta_history,
        least_bytes=LEAST_DELTA_BYTES,
        max_tokens=MAX_DELTA_HISTORY,
    ),
}
"""Kinds of layers by vLLM's name of the kind."""
