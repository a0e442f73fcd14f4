"""Mamba-1 and Mamba-2 layers of vLLM, served by `jenga_kernels` on states in pages.

Weights, projections and norms stay in vLLM's layers. The convolution and the recurrence between
them read and write state slots of the arena in place. In a step, tokens of decoding requests come
first, then those of prompts. `mamba_builder` determines the slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from jenga.errors import InvariantError
from jenga.vllm_plugin.layers.mamba_builder import JengaMambaMetadata
from jenga.vllm_plugin.layers.replay_counts import Replay
from jenga_kernels.causal_conv import causal_conv
from jenga_kernels.checks.histories import InputHistory
from jenga_kernels.conv_update import conv_update
from jenga_kernels.state_replay import state_replay
from jenga_kernels.state_scan import state_scan
from jenga_kernels.state_update import state_update
from jenga_kernels.trial_calls import FEW_TOKENS, Call


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
    """A layer's convolution. Fields are named as in `jenga_kernels.causal_conv.causal_conv`.

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
class Recurrence:
    """A step's inputs to the recurrence, named as in `jenga_kernels.state_scan.state_scan`."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool = True
    allow_tf32: bool = False


def replay(
    out: torch.Tensor,
    states: torch.Tensor,
    history: InputHistory,
    step: Recurrence,
    slots: torch.Tensor,
    counts: Replay,
) -> None:
    """Apply the first tokens of a step, or none, to states that are seldom written.

    Args:
        out: Outputs, [num_tokens, num_heads, head_dim], written in place. Its rows give the number
            of tokens.
        states: [num_slots, num_heads, head_dim, d_state]. Those that `counts` names are written in
            place.
        history: History beside the states, written in place.
        step: Inputs of the step.
        slots: State slots of the requests, i32[num_requests].
        counts: Numbers of tokens in the states, before and after.
    """
    first = len(out)
    state_replay(
        out,
        states,
        history,
        step.x[:first],
        step.dt[:first],
        step.A,
        step.B[:first],
        step.C[:first],
        slots,
        counts.computed_tokens,
        counts.state_tokens,
        counts.next_state_tokens,
        D=step.D,
        z=None if step.z is None else step.z[:first],
        dt_bias=step.dt_bias,
        dt_softplus=step.dt_softplus,
        query_starts=counts.query_starts,
    )


def recur(
    out: torch.Tensor,
    states: torch.Tensor,
    step: Recurrence,
    metadata: JengaMambaMetadata,
    layer_name: str,
) -> None:
    """Run the recurrence on a step's tokens.

    Args:
        out: Outputs, [num_tokens, num_heads, head_dim], written in place.
        states: [num_slots, num_heads, head_dim, d_state], written in place.
        step: Inputs of the step.
        metadata: Metadata of the step.
        layer_name: Name of the layer.
    """
    for num_tokens, slots, counts in replays(metadata):
        history = counts.histories[layer_name]
        replay(out[:num_tokens], states, history, step, slots, counts)
    first = metadata.num_decode_tokens
    if first and metadata.replay_d is None:
        initial_slots, slots, query_starts = decode_slots(metadata)
        state_update(
            out[:first],
            states,
            step.x[:first],
            step.dt[:first],
            step.A,
            step.B[:first],
            step.C[:first],
            initial_slots,
            slots,
            D=step.D,
            z=None if step.z is None else step.z[:first],
            dt_bias=step.dt_bias,
            dt_softplus=step.dt_softplus,
            query_starts=query_starts,
        )
    if metadata.num_prefill_tokens:
        query_starts, initial_slots, slots = prompts_of(metadata)
        state_scan(
            out[first:],
            states,
            step.x[first:],
            step.dt[first:],
            step.A,
            step.B[first:],
            step.C[first:],
            query_starts,
            initial_slots,
            slots,
            D=step.D,
            z=None if step.z is None else step.z[first:],
            dt_bias=step.dt_bias,
            dt_softplus=step.dt_softplus,
            checkpoints=metadata.checkpoints,
            allow_tf32=step.allow_tf32,
            longest_tokens=metadata.longest_prompt_tokens,
            is_portable=metadata.has_portable_scans is True,
            compile_ahead=True,
        )


def forward_mamba1(
    layer: Any,  # noqa: ANN401
    hidden_states: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run a Mamba-1 layer of vLLM.

    Args:
        layer: A `MambaMixer`. Its states are written in place.
        hidden_states: [num_tokens or more, hidden].
        output: Same shape as hidden_states. Rows of the step's tokens are written in place.
        metadata: Metadata of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    x, gate = layer.in_proj(hidden_states)[0][:num_tokens].chunk(2, dim=-1)
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, convolution_of(layer, conv_weight_of(layer.conv1d)), metadata)
    dt, B, C = layer._ssm_transform(convolved)  # noqa: N806
    scanned = torch.empty_like(convolved)
    # All channels form one head and one group.
    step = Recurrence(
        x=convolved.unsqueeze(1),
        dt=dt.transpose(0, 1).unsqueeze(1),
        A=layer.A.unsqueeze(0),
        B=B.unsqueeze(1),
        C=C.unsqueeze(1),
        D=layer.D.unsqueeze(0),
        z=gate.unsqueeze(1),
        dt_bias=None if layer.dt_proj.bias is None else layer.dt_proj.bias.unsqueeze(0),
    )
    states = states_of(layer)
    recur(scanned.unsqueeze(1), states.unsqueeze(1), step, metadata, layer.prefix)
    output[:num_tokens] = layer.out_proj(scanned)[0]


def forward_mamba2(
    layer: Any,  # noqa: ANN401
    projected: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run a Mamba-2 layer of vLLM between its projections.

    Args:
        layer: A `MambaMixer2`. Its states are written in place.
        projected: Gates, inputs of the convolution and step sizes side by side,
            [num_tokens or more, gate + dim + num_heads].
        output: [num_tokens or more, num_heads * head_dim]. Rows of the step's tokens are written in
            place.
        metadata: Metadata of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    x, dt = _mamba2_inputs(layer, projected[:num_tokens])
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, convolution_of(layer, layer.conv_weights), metadata)
    out = output[:num_tokens].unflatten(-1, (layer.tped_dt_size, -1))
    recur(out, states_of(layer), _mamba2_step(layer, convolved, dt), metadata, layer.prefix)


def _mamba2_inputs(layer: Any, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Get a convolution's inputs, [num_tokens, dim], and step sizes, [num_tokens, num_heads]."""
    sizes = [layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size]
    _, x, dt = projected.split(sizes, dim=-1)
    return x, dt


def _mamba2_step(layer: Any, convolved: torch.Tensor, dt: torch.Tensor) -> Recurrence:  # noqa: ANN401
    x, B, C = layer.split_hidden_states_B_C_fn(convolved)  # noqa: N806
    return Recurrence(
        x=x.unflatten(-1, (layer.tped_dt_size, -1)),
        dt=dt,
        A=layer.A,
        B=B.unflatten(-1, (-1, layer.ssm_state_size)),
        C=C.unflatten(-1, (-1, layer.ssm_state_size)),
        D=layer.D,
        z=None,
        dt_bias=layer.dt_bias,
    )


def scan_call(layer: Any, dtype: torch.dtype) -> Call:  # noqa: ANN401
    """Describe the calls of `state_scan` that a Mamba-2 layer of vLLM will make, for trials.

    Args:
        layer: A `MambaMixer2` with its cache bound.
        dtype: Element type of its inputs.
    """
    width = layer.tped_intermediate_size + layer.tped_conv_size + layer.tped_dt_size
    x, dt = _mamba2_inputs(layer, torch.empty(FEW_TOKENS, width, dtype=dtype, device="meta"))
    step = _mamba2_step(layer, torch.empty(x.shape, dtype=dtype, device="meta"), dt)
    return Call.of(
        "state_scan",
        states=states_of(layer),
        **{each.name: getattr(step, each.name) for each in fields(step)},
    )
