"""Mamba-1 and Mamba-2 layers of vLLM, served by `jenga_kernels` on states in pages.

Weights, projections and norms stay in vLLM's layers. See `recurrence` for the rest.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from jenga.vllm_plugin.layers.recurrent.mamba_builder import JengaMambaMetadata
from jenga.vllm_plugin.layers.recurrent.recurrence import (
    Operations,
    conv_weight_of,
    convolution_of,
    convolve,
    recur,
    states_of,
)
from jenga_kernels.recurrent.state_replay import state_replay
from jenga_kernels.recurrent.state_scan import state_scan
from jenga_kernels.recurrent.state_update import state_update
from jenga_kernels.trial_calls import FEW_TOKENS, Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A step's inputs to the recurrence, named as in `jenga_kernels.state_scan`."""

    operations: ClassVar[Operations] = Operations(
        update=state_update, scan=state_scan, replay=state_replay
    )

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

    def inputs(self, rows: slice) -> tuple[torch.Tensor, ...]:
        """See `StepInputs`."""
        return self.x[rows], self.dt[rows], self.A, self.B[rows], self.C[rows]

    def options(self, rows: slice) -> dict[str, Any]:
        """See `StepInputs`."""
        return {
            "D": self.D,
            "z": None if self.z is None else self.z[rows],
            "dt_bias": self.dt_bias,
            "dt_softplus": self.dt_softplus,
        }

    def scan_options(self, metadata: JengaMambaMetadata) -> dict[str, Any]:
        """See `StepInputs`."""
        return {
            "allow_tf32": self.allow_tf32,
            "longest_tokens": metadata.longest_prompt_tokens,
            "is_portable": metadata.has_portable_scans is True,
            "compile_ahead": True,
        }


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
