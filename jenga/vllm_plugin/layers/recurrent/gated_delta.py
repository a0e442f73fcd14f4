"""Layers of the gated delta rule of vLLM, served by `jenga_kernels` on states in pages.

Gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid) decay a head's state as a whole. Kimi delta
attention (Kimi-Linear, Ling 3) decays each key channel separately. As with Mamba layers, weights,
projections and norms stay in vLLM's layers. The parts between them read and write state slots of
the arena in place.

A step of decoding requests never waits for the device, and reads all changing values from buffers
of the metadata. So it can be captured in a CUDA graph. No graph has been captured so far, and this
code has not run on a GPU yet. vLLM's CPU build can only make Qwen's models, so layers of the other
models are tested alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import softplus
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from jenga.vllm_plugin.layers.recurrent.mamba_builder import (
    JengaMambaMetadata,
    JengaStateBackend,
    builder_beside,
)
from jenga.vllm_plugin.layers.recurrent.recurrence import (
    Convolution,
    Operations,
    channels_first,
    conv_weight_of,
    convolution_of,
    convolve,
    recur,
    states_of,
)
from jenga_kernels.recurrent.delta_replay import delta_replay
from jenga_kernels.recurrent.delta_scan import delta_scan
from jenga_kernels.recurrent.delta_update import delta_update
from jenga_kernels.trial_calls import FEW_TOKENS, Call

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder


def _layer_classes() -> tuple[type, ...]:
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
        KimiGatedDeltaNetAttention,
    )
    from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
        OlmoHybridGatedDeltaNetAttention,
    )
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

    return (
        QwenGatedDeltaNetAttention,
        OlmoHybridGatedDeltaNetAttention,
        KimiGatedDeltaNetAttention,
        BailingMoeV3KimiDeltaAttention,
    )


_GatedDeltaBuilder = builder_beside(GDNAttentionMetadataBuilder, _layer_classes)


class JengaGatedDeltaBackend(JengaStateBackend):
    """Backend registered instead of vLLM's own for layers of the gated delta rule."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_GATED_DELTA"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that builds a step's metadata."""
        return _GatedDeltaBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """A step's inputs to the delta rule, named as in `jenga_kernels.delta_scan`."""

    operations: ClassVar[Operations] = Operations(
        update=delta_update, scan=delta_scan, replay=delta_replay
    )

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: torch.Tensor
    betas: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None

    def inputs(self, rows: slice) -> tuple[torch.Tensor, ...]:
        """See `StepInputs`."""
        return self.q[rows], self.k[rows], self.v[rows], self.gates[rows], self.betas[rows]

    def options(self, rows: slice) -> dict[str, Any]:
        """See `StepInputs`."""
        return {"A_log": self.A_log, "dt_bias": self.dt_bias}

    def scan_options(self, metadata: JengaMambaMetadata) -> dict[str, Any]:
        """See `StepInputs`."""
        return {"is_portable": metadata.has_portable_scans}


def forward_gated_delta(
    layer: Any,  # noqa: ANN401
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run a gated delta net of vLLM between its projections.

    Args:
        layer: A `QwenGatedDeltaNetAttention` or `OlmoHybridGatedDeltaNetAttention`. Its states are
            written in place.
        mixed_qkv: Queries, keys and values side by side, [num_tokens or more, dim].
        b: Projections of betas, [num_tokens or more, num_v_heads].
        a: Projections of gates, [num_tokens or more, num_v_heads].
        output: [num_tokens or more, num_v_heads, head_v_dim]. Rows of the step's tokens are written
            in place.
        metadata: Metadata of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    x, b, a = mixed_qkv[:num_tokens], b[:num_tokens], a[:num_tokens]
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, convolution_of(layer, conv_weight_of(layer.conv1d)), metadata)
    step = _gated_delta_step(layer, convolved, b, a)
    recur(output[:num_tokens], states_of(layer), step, metadata, layer.prefix)


def _gated_delta_step(
    layer: Any,  # noqa: ANN401
    convolved: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> DeltaRule:
    q, k, v = _gated_delta_heads(layer, convolved)
    A_log, dt_bias = layer.A_log, layer.dt_bias  # noqa: N806
    if getattr(layer, "allow_neg_eigval", False):
        # Betas go up to 2 here, and the kernels' sigmoid only up to 1.
        a = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
        b = 2.0 * b.float().sigmoid()
        A_log, dt_bias = None, None  # noqa: N806
    return DeltaRule(q=q, k=k, v=v, gates=a, betas=b, A_log=A_log, dt_bias=dt_bias)


def _gated_delta_heads(layer: Any, convolved: torch.Tensor) -> list[torch.Tensor]:  # noqa: ANN401
    """Get queries, keys and values, each [num_tokens, heads, elements]."""
    key_dim, value_dim = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    parts = convolved.split([key_dim, key_dim, value_dim], dim=-1)
    dims = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    return [part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True)]


def scan_call(layer: Any, dtype: torch.dtype) -> Call:  # noqa: ANN401
    """Describe the calls of `delta_scan` that a layer of vLLM will make, for trials.

    Args:
        layer: A layer of one of the served classes, with its cache bound.
        dtype: Element type of its inputs.
    """

    def inputs(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(FEW_TOKENS, *shape, dtype=dtype, device="meta")

    states = states_of(layer)
    num_heads, key_dim = states.shape[1], states.shape[3]
    if hasattr(layer, "head_k_dim"):
        channels = ()
        q, k, v = _gated_delta_heads(
            layer, inputs((2 * layer.key_dim + layer.value_dim) // layer.tp_size)
        )
        are_ready = getattr(layer, "allow_neg_eigval", False)
    else:
        channels = (key_dim,)
        if hasattr(layer, "q_conv1d"):  # Bailing's
            q, k, v = (inputs(num_heads, key_dim) for _ in range(3))
            are_ready = True
        else:
            q, k, v = inputs(3 * num_heads * key_dim).unflatten(-1, (3, -1, key_dim)).unbind(1)
            are_ready = layer.gate_lower_bound is not None
    # Gates and betas are projections of the layer's dtype, or values in float32 made from them.
    gates_dtype = torch.float32 if are_ready else dtype
    return Call.of(
        "delta_scan",
        q=q,
        k=k,
        v=v,
        gates=inputs(num_heads, *channels, dtype=gates_dtype),
        betas=inputs(num_heads, dtype=gates_dtype),
        A_log=None if are_ready else layer.A_log,
        dt_bias=None if are_ready else layer.dt_bias.view(-1, *channels),
        states=states,
    )


def forward_kimi_delta(
    layer: Any,  # noqa: ANN401
    mixed_qkv: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run Kimi delta attention of vLLM between its projections and its output norm.

    Args:
        layer: A `KimiGatedDeltaNetAttention`. Its states are written in place.
        mixed_qkv: Queries, keys and values side by side, [num_tokens or more, dim].
        gates: Projections of gates, [num_tokens or more, num_heads, head_dim].
        betas: Projections of betas, [num_tokens or more, num_heads].
        output: [num_tokens or more, num_heads, head_dim]. Rows of the step's tokens are written in
            place.
        metadata: Metadata of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    x, gates, betas = mixed_qkv[:num_tokens], gates[:num_tokens], betas[:num_tokens]
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, convolution_of(layer, conv_weight_of(layer.conv1d)), metadata)
    q, k, v = convolved.unflatten(-1, (3, -1, layer.head_dim)).unbind(1)
    A_log, dt_bias = layer.A_log, layer.dt_bias.view(-1, layer.head_dim)  # noqa: N806
    if layer.gate_lower_bound is not None:
        # The layer computes gates from projections with another function than the kernels do. The
        # logarithm of a decay stays above this bound.
        rates = A_log.float().exp()[:, None]
        gates = layer.gate_lower_bound * (rates * (gates.float() + dt_bias.float())).sigmoid()
        betas = betas.float().sigmoid()
        A_log, dt_bias = None, None  # noqa: N806
    step = DeltaRule(q=q, k=k, v=v, gates=gates, betas=betas, A_log=A_log, dt_bias=dt_bias)
    recur(output[:num_tokens], states_of(layer), step, metadata, layer.prefix)


def forward_bailing_delta(
    layer: Any,  # noqa: ANN401
    q_proj_states: torch.Tensor,
    k_proj_states: torch.Tensor,
    v_proj_states: torch.Tensor,
    g1: torch.Tensor,
    beta: torch.Tensor,
    core_attn_out: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run Bailing's Kimi delta attention between its projections and its output norm.

    Args:
        layer: A `BailingMoeV3KimiDeltaAttention`. Its states are written in place.
        q_proj_states: Queries, [num_tokens or more, num_heads * head_dim].
        k_proj_states: Keys, likewise.
        v_proj_states: Values, likewise.
        g1: Logarithms of decays, [1, num_tokens or more, num_heads, head_dim].
        beta: Betas, the strengths of writing, [1, num_tokens or more, num_heads].
        core_attn_out: Same shape as g1. Rows of the step's tokens are written in place.
        metadata: Metadata of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    conv_states = channels_first(layer.kv_cache[0]).chunk(3, dim=1)
    inputs = (q_proj_states, k_proj_states, v_proj_states)
    convolved: list[torch.Tensor] = []
    for x, states, conv1d in zip(
        inputs, conv_states, (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d), strict=True
    ):
        weight, bias = conv_weight_of(conv1d), conv1d.bias
        convolution = Convolution(states=states, weight=weight, bias=bias, silu=True)
        convolved.append(torch.empty_like(x[:num_tokens]))
        convolve(convolved[-1], x[:num_tokens], convolution, metadata)
    q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in convolved)
    gates, betas = g1[0, :num_tokens], beta[0, :num_tokens]
    step = DeltaRule(q=q, k=k, v=v, gates=gates, betas=betas, A_log=None, dt_bias=None)
    recur(core_attn_out[0, :num_tokens], states_of(layer), step, metadata, layer.prefix)
