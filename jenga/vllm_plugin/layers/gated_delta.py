"""Layers of the gated delta rule of vLLM, served by `jenga_kernels` on states in pages.

Gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid) decay a head's state as a whole, Kimi delta
attention (Kimi-Linear, Ling 3) each key channel on its own. As with Mamba layers, vLLM's keep their
weights, projections and norms; what lies between reads and writes the state slots of the page-layer
buffer in place. In a step of decoding requests nothing waits for the device and all that changes is
read from the metadata's buffers, so that a CUDA graph can be made of it; none has been captured,
and nothing here has run on a GPU yet. Of the models, vLLM's CPU build makes those of Qwen only: the
other layers are tested alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import softplus
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from jenga.vllm_plugin.layers.mamba import (
    Convolution,
    channels_first,
    conv_weight_of,
    convolution_of,
    convolve,
    decode_slots,
    prompts_of,
    replays,
    states_of,
)
from jenga.vllm_plugin.layers.mamba_builder import (
    JengaMambaMetadata,
    JengaStateBackend,
    builder_beside,
)
from jenga.vllm_plugin.layers.state_counts import Replay
from jenga_kernels.checks.histories import DeltaHistory
from jenga_kernels.delta_replay import delta_replay
from jenga_kernels.delta_scan import delta_scan
from jenga_kernels.delta_update import delta_update
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
    """Registered in place of vLLM's backend of layers of the gated delta rule."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_GATED_DELTA"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that prepares a step."""
        return _GatedDeltaBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """A step's inputs to the delta rule, as `jenga_kernels.delta_scan.delta_scan` names them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: torch.Tensor
    betas: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


def replay(
    out: torch.Tensor,
    states: torch.Tensor,
    history: DeltaHistory,
    step: DeltaRule,
    slots: torch.Tensor,
    counts: Replay,
) -> None:
    """Apply the first tokens of a step, or none, to states that are seldom written.

    Args:
        out: Written in place, [num_tokens, num_v_heads, head_v_dim]; as many tokens are applied.
        states: Written in place where `counts` says so, [num_slots, num_v_heads, head_v_dim,
            head_k_dim].
        history: Written in place.
        step: Inputs.
        slots: i32[num_requests].
        counts: What is in the states, before and after.
    """
    first = len(out)
    delta_replay(
        out,
        states,
        history,
        step.q[:first],
        step.k[:first],
        step.v[:first],
        step.gates[:first],
        step.betas[:first],
        slots,
        counts.computed_tokens,
        counts.state_tokens,
        counts.next_state_tokens,
        A_log=step.A_log,
        dt_bias=step.dt_bias,
        query_starts=counts.query_starts,
    )


def apply_delta_rule(
    out: torch.Tensor,
    states: torch.Tensor,
    step: DeltaRule,
    metadata: JengaMambaMetadata,
    layer_name: str,
) -> None:
    """Apply a step's tokens to the states.

    Args:
        out: Written in place, [num_tokens, num_v_heads, head_v_dim].
        states: Written in place, [num_slots, num_v_heads, head_v_dim, head_k_dim].
        step: Inputs.
        metadata: Of the step.
        layer_name: Of the layer.
    """
    for num_tokens, slots, counts in replays(metadata):
        history = counts.histories[layer_name]
        replay(out[:num_tokens], states, history, step, slots, counts)
    first = metadata.num_decode_tokens
    if first and metadata.replay_d is None:
        initial_slots, slots, query_starts = decode_slots(metadata)
        delta_update(
            out[:first],
            states,
            step.q[:first],
            step.k[:first],
            step.v[:first],
            step.gates[:first],
            step.betas[:first],
            initial_slots,
            slots,
            A_log=step.A_log,
            dt_bias=step.dt_bias,
            query_starts=query_starts,
        )
    if metadata.num_prefill_tokens:
        query_starts, initial_slots, slots = prompts_of(metadata)
        delta_scan(
            out[first:],
            states,
            step.q[first:],
            step.k[first:],
            step.v[first:],
            step.gates[first:],
            step.betas[first:],
            query_starts,
            initial_slots,
            slots,
            A_log=step.A_log,
            dt_bias=step.dt_bias,
            checkpoints=metadata.checkpoints,
            is_portable=metadata.has_portable_scans,
        )


def forward_gated_delta(
    layer: Any,  # noqa: ANN401
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run what lies between the projections of a gated delta net of vLLM.

    Args:
        layer: A `QwenGatedDeltaNetAttention` or `OlmoHybridGatedDeltaNetAttention`; its states are
            written in place.
        mixed_qkv: Queries, keys and values side by side, [num_tokens or more, dim].
        b: Projections of betas, [num_tokens or more, num_v_heads].
        a: Projections of gates, [num_tokens or more, num_v_heads].
        output: Written in place for the step's tokens, [num_tokens or more, num_v_heads,
            head_v_dim].
        metadata: Of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    x, b, a = mixed_qkv[:num_tokens], b[:num_tokens], a[:num_tokens]
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, convolution_of(layer, conv_weight_of(layer.conv1d)), metadata)
    step = _gated_delta_step(layer, convolved, b, a)
    apply_delta_rule(output[:num_tokens], states_of(layer), step, metadata, layer.prefix)


def _gated_delta_step(
    layer: Any,  # noqa: ANN401
    convolved: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> DeltaRule:
    q, k, v = _gated_delta_heads(layer, convolved)
    A_log, dt_bias = layer.A_log, layer.dt_bias  # noqa: N806
    if getattr(layer, "allow_neg_eigval", False):
        # Betas up to 2, where the kernels' sigmoid ends at 1.
        a = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
        b = 2.0 * b.float().sigmoid()
        A_log, dt_bias = None, None  # noqa: N806
    return DeltaRule(q=q, k=k, v=v, gates=a, betas=b, A_log=A_log, dt_bias=dt_bias)


def _gated_delta_heads(layer: Any, convolved: torch.Tensor) -> list[torch.Tensor]:  # noqa: ANN401
    """Get queries, keys and values, [num_tokens, heads, elements] each."""
    key_dim, value_dim = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    parts = convolved.split([key_dim, key_dim, value_dim], dim=-1)
    dims = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    return [part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True)]


def scan_call(layer: Any, dtype: torch.dtype) -> Call:  # noqa: ANN401
    """Describe the calls of `delta_scan` that a layer of vLLM will make.

    Args:
        layer: One of those served, with its cache.
        dtype: Of its inputs.
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
    # Projections of the layer's dtype, or what is made of them.
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
    """Run what lies between the projections and the output norm of Kimi delta attention in vLLM.

    Args:
        layer: A `KimiGatedDeltaNetAttention`; its states are written in place.
        mixed_qkv: Queries, keys and values side by side, [num_tokens or more, dim].
        gates: Projections, [num_tokens or more, num_heads, head_dim].
        betas: Projections, [num_tokens or more, num_heads].
        output: Written in place for the step's tokens, [num_tokens or more, num_heads, head_dim].
        metadata: Of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    x, gates, betas = mixed_qkv[:num_tokens], gates[:num_tokens], betas[:num_tokens]
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, convolution_of(layer, conv_weight_of(layer.conv1d)), metadata)
    q, k, v = convolved.unflatten(-1, (3, -1, layer.head_dim)).unbind(1)
    A_log, dt_bias = layer.A_log, layer.dt_bias.view(-1, layer.head_dim)  # noqa: N806
    if layer.gate_lower_bound is not None:
        # Another function of the projections than the kernels': no decay below this bound.
        rates = A_log.float().exp()[:, None]
        gates = layer.gate_lower_bound * (rates * (gates.float() + dt_bias.float())).sigmoid()
        betas = betas.float().sigmoid()
        A_log, dt_bias = None, None  # noqa: N806
    step = DeltaRule(q=q, k=k, v=v, gates=gates, betas=betas, A_log=A_log, dt_bias=dt_bias)
    apply_delta_rule(output[:num_tokens], states_of(layer), step, metadata, layer.prefix)


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
    """Run what lies between the projections and the output norm of Bailing's Kimi delta attention.

    Args:
        layer: A `BailingMoeV3KimiDeltaAttention`; its states are written in place.
        q_proj_states: Queries, [num_tokens or more, num_heads * head_dim].
        k_proj_states: Keys, likewise.
        v_proj_states: Values, likewise.
        g1: Logarithms of decays, [1, num_tokens or more, num_heads, head_dim].
        beta: Strengths of writing, [1, num_tokens or more, num_heads].
        core_attn_out: Written in place for the step's tokens, shape of g1.
        metadata: Of the step.
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
    apply_delta_rule(core_attn_out[0, :num_tokens], states_of(layer), step, metadata, layer.prefix)
