"""Parts that all recurrent layers share: slots of a step, convolution and recurrence.

A layer has weights, projections and norms of vLLM. Its convolution and its recurrence read and
write state slots of the arena in place. In a step, tokens of decoding requests come first, then
those of prompts. `mamba_builder` determines the slots.

The recurrence of each kind of layers has three operations: one for decoding, one for prompts, and
one for states that are seldom written. `recur` decides which of them runs on which tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from jenga.errors import InvariantError
from jenga.vllm_plugin.layers.recurrent.mamba_builder import JengaMambaMetadata
from jenga.vllm_plugin.layers.recurrent.replay_counts import Replay
from jenga_kernels.recurrent.causal_conv import causal_conv
from jenga_kernels.recurrent.conv_update import conv_update


def metadata_of(layer_name: str) -> JengaMambaMetadata | None:
    """Get the metadata of a layer in the current step.

    Returns:
        The metadata. None if vLLM profiles memory without a cache, or if the layer is not served
        here.
    """
    by_layer = get_forward_context().attn_metadata
    metadata = by_layer.get(layer_name) if isinstance(by_layer, dict) else None
    return metadata if isinstance(metadata, JengaMambaMetadata) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A layer's convolution. Fields are named as in `jenga_kernels.causal_conv`.

    Attributes:
        states: [num_slots, dim, width - 1 or more], written in place.
        weight: [dim, width].
        bias: [dim], or None.
        silu: Whether SiLU is applied to the outputs.
    """

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool


def channels_first(conv_states: torch.Tensor) -> torch.Tensor:
    """Get the states of a convolution as [num_slots, dim, columns], for either layout of vLLM."""
    return conv_states if is_conv_state_dim_first() else conv_states.transpose(1, 2)


def conv_weight_of(conv1d: Any) -> torch.Tensor:  # noqa: ANN401
    """Get the weight of a convolution module, [dim, width]."""
    # vLLM's CPU operations may reorder the weight. Then vLLM keeps the original here.
    weight = getattr(conv1d, "_cpu_unpacked_conv_weight", conv1d.weight)
    return weight.view(weight.shape[0], -1)


def convolution_of(layer: Any, weight: torch.Tensor) -> Convolution:  # noqa: ANN401
    """Get the convolution before a layer's recurrence, with a weight of [dim, width]."""
    conv_states, _ = layer.kv_cache
    return Convolution(
        states=channels_first(conv_states),
        weight=weight,
        bias=layer.conv1d.bias,
        silu=layer.activation in ("silu", "swish"),
    )


def states_of(layer: Any) -> torch.Tensor:  # noqa: ANN401
    """Get the states of a layer's recurrence. They follow those of its convolution."""
    _, states = layer.kv_cache
    return states


def decode_slots(
    metadata: JengaMambaMetadata,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Get the state slots of decoding requests: initial_slots, state_slots, query_starts.

    query_starts is None if each request has one token.

    Raises:
        InvariantError: The step has no slots of decoding requests.
    """
    slots, query_starts = metadata.state_indices_tensor_d, metadata.query_start_loc_d
    if slots is None:
        msg = "a step that decodes must come with the state slots of its requests"
        raise InvariantError(msg)
    if query_starts is None:  # one token each
        slots = slots[: metadata.num_decode_tokens, 0]
        return slots, slots, None
    slots = slots[: len(query_starts) - 1]
    return slots[:, -1], slots, query_starts


def own_slots(slots: torch.Tensor) -> torch.Tensor:
    """Get the only slot of each decoding request, i32[num_requests], for layers with a history."""
    return slots if slots.dim() == 1 else slots[:, 0]


def prompts_of(
    metadata: JengaMambaMetadata,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Get the bounds and state slots of prompts: query_starts, initial_slots, state_slots.

    Raises:
        InvariantError: The step has none of these.
    """
    query_starts, slots = metadata.query_start_loc_p, metadata.state_indices_tensor_p
    if query_starts is None or slots is None or metadata.initial_slots_p is None:
        msg = "a step that reads prompts must come with their bounds and state slots"
        raise InvariantError(msg)
    return query_starts, metadata.initial_slots_p, slots


def replays(
    metadata: JengaMambaMetadata,
) -> Iterator[tuple[int, torch.Tensor, Replay]]:
    """Get the replays that a step must run on states that are seldom written.

    For decoding requests, a replay applies their tokens. For prompts, it applies no token: it only
    brings the states that their scans start from up to date.

    Yields:
        Number of the step's first tokens that the replay applies, slots of the requests, and their
        counts.
    """
    if metadata.num_decode_tokens and metadata.replay_d is not None:
        _, slots, _ = decode_slots(metadata)
        yield metadata.num_decode_tokens, own_slots(slots), metadata.replay_d
    counts = metadata.replay_p
    if metadata.num_prefill_tokens and counts is not None and not counts.is_current:
        _, initial_slots, _ = prompts_of(metadata)
        yield 0, initial_slots, counts


def convolve(
    out: torch.Tensor,
    x: torch.Tensor,
    convolution: Convolution,
    metadata: JengaMambaMetadata,
    *,
    input_gates: torch.Tensor | None = None,
    output_gates: torch.Tensor | None = None,
) -> None:
    """Run the convolution on a step's tokens.

    Args:
        out: Outputs, [num_tokens, dim], written in place.
        x: Inputs, [num_tokens, dim].
        convolution: Convolution of the layer. Its states are written in place.
        metadata: Metadata of the step.
        input_gates: Factors of the inputs, shape of x, or None.
        output_gates: Factors of the outputs, shape of x, or None.
    """
    gates = {"input_gates": input_gates, "output_gates": output_gates}
    gates = {name: rows for name, rows in gates.items() if rows is not None}
    first, counts = metadata.num_decode_tokens, metadata.replay_d
    if first:
        initial_slots, slots, query_starts = decode_slots(metadata)
        if counts is not None:
            initial_slots = slots = own_slots(slots)
        conv_update(
            out[:first],
            convolution.states,
            x[:first],
            convolution.weight,
            initial_slots,
            slots,
            bias=convolution.bias,
            silu=convolution.silu,
            query_starts=query_starts,
            computed_tokens=None if counts is None else counts.computed_tokens,
            **{name: rows[:first] for name, rows in gates.items()},
        )
    if metadata.num_prefill_tokens:
        query_starts, initial_slots, slots = prompts_of(metadata)
        counts = metadata.replay_p
        causal_conv(
            out[first:],
            convolution.states,
            x[first:],
            convolution.weight,
            query_starts,
            initial_slots,
            slots,
            bias=convolution.bias,
            silu=convolution.silu,
            checkpoints=metadata.checkpoints,
            computed_tokens=None if counts is None else counts.computed_tokens,
            **{name: rows[first:] for name, rows in gates.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The operations of `jenga_kernels` that run one kind of recurrence.

    All take outputs and states first, then the inputs in the same order.

    Attributes:
        update: Applies the tokens of decoding requests.
        scan: Applies the tokens of prompts.
        replay: Applies the tokens of decoding requests to states that are seldom written. It takes
            the history after the states.
    """

    update: Callable[..., None]
    scan: Callable[..., None]
    replay: Callable[..., None]


class StepInputs(Protocol):
    """A step's inputs to the recurrence of one kind of layers.

    Attributes:
        operations: Operations that run the recurrence.
    """

    operations: ClassVar[Operations]

    def inputs(self, rows: slice) -> tuple[torch.Tensor, ...]:
        """Get the inputs of some of the step's tokens, in the order of the operations."""
        ...

    def options(self, rows: slice) -> dict[str, Any]:
        """Get the named arguments of all three operations, for some of the step's tokens."""
        ...

    def scan_options(self, metadata: JengaMambaMetadata) -> dict[str, Any]:
        """Get further named arguments of the scan."""
        ...


def recur(
    out: torch.Tensor,
    states: torch.Tensor,
    step: StepInputs,
    metadata: JengaMambaMetadata,
    layer_name: str,
) -> None:
    """Run the recurrence on a step's tokens.

    Args:
        out: Outputs, [num_tokens, num_heads, head_dim], written in place.
        states: [num_slots, num_heads, ...], as the operations take them, written in place.
        step: Inputs of the step.
        metadata: Metadata of the step.
        layer_name: Name of the layer.
    """
    operations, first = step.operations, metadata.num_decode_tokens
    decoded, prompts = slice(first), slice(first, None)
    for num_tokens, slots, counts in replays(metadata):
        rows = slice(num_tokens)
        operations.replay(
            out[rows],
            states,
            counts.histories[layer_name],
            *step.inputs(rows),
            slots,
            counts.computed_tokens,
            counts.state_tokens,
            counts.next_state_tokens,
            query_starts=counts.query_starts,
            writes_states=counts.writes_states,
            **step.options(rows),
        )
    if first and metadata.replay_d is None:
        initial_slots, slots, query_starts = decode_slots(metadata)
        operations.update(
            out[decoded],
            states,
            *step.inputs(decoded),
            initial_slots,
            slots,
            query_starts=query_starts,
            **step.options(decoded),
        )
    if metadata.num_prefill_tokens:
        operations.scan(
            out[prompts],
            states,
            *step.inputs(prompts),
            *prompts_of(metadata),
            checkpoints=metadata.checkpoints,
            **step.options(prompts),
            **step.scan_options(metadata),
        )
