"""Linear attention of vLLM (Ling 2.5, Ring 2.5), served by `jenga_kernels` on states in pages.

A head's state is a sum of outer products of values and keys. It decays by a fixed factor with every
token (lightning attention). This is the recurrence of Mamba-2 with step sizes of one and a group
for each head. Keys are B, queries are C and values are x.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import silu
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadataBuilder

from jenga.vllm_plugin.layers.recurrent.mamba import Recurrence
from jenga.vllm_plugin.layers.recurrent.mamba_builder import (
    JengaMambaMetadata,
    JengaStateBackend,
    builder_beside,
)
from jenga.vllm_plugin.layers.recurrent.recurrence import recur

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder


def _layer_classes() -> tuple[type, ...]:
    from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import (
        BailingMoELinearAttention,
    )

    return (BailingMoELinearAttention,)


_KEPT_RATES = "_jenga_rates"
"""Attribute of a layer that holds the rates of its states' decay."""

_LinearAttentionBuilder = builder_beside(BailingLinearAttentionMetadataBuilder, _layer_classes)


class JengaLinearAttentionBackend(JengaStateBackend):
    """Backend that replaces the one that these layers name themselves, without vLLM's registry."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_LINEAR_ATTENTION"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that builds a step's metadata."""
        return _LinearAttentionBuilder


def keep_rates(layer: Any) -> None:  # noqa: ANN401
    """Copy the decay rates of a layer's states to the host, so that they survive deep sleep.

    vLLM's own tensor is made while weights are loaded, but is not a weight. Deep sleep drops it
    with the weights, and it is not loaded again.
    """
    if not hasattr(layer, _KEPT_RATES):
        setattr(layer, _KEPT_RATES, -layer.tp_slope.flatten().cpu())


def _rates(layer: Any, device: torch.device) -> torch.Tensor:  # noqa: ANN401
    """Get the decay rates of the states, f32[num_heads], below 0. They move to the device once."""
    rates = getattr(layer, _KEPT_RATES)
    if rates.device != device:
        rates = rates.to(device)
        setattr(layer, _KEPT_RATES, rates)
    return rates


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide the elements of each head by their root mean square, and multiply with a weight.

    Args:
        x: f32[num_tokens, dim].
        weight: Factors of a head's elements, [head_dim].
        eps: Number added to the mean square.

    Returns:
        f32[num_tokens, dim].
    """
    heads = x.unflatten(-1, (-1, len(weight)))
    return (heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).flatten(-2)


def forward_linear_attention(
    layer: Any,  # noqa: ANN401
    hidden_states: torch.Tensor,
    output: torch.Tensor,
    positions: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run a layer of linear attention of vLLM.

    Args:
        layer: A `BailingMoELinearAttention`. Its states are written in place.
        hidden_states: [num_tokens or more, hidden].
        output: Same shape as hidden_states. Rows of the step's tokens are written in place.
        positions: Positions of the tokens, i64[num_tokens or more].
        metadata: Metadata of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    hidden_states = hidden_states[:num_tokens]
    # As in vLLM, float32 from here to the output norm.
    qkv = layer.query_key_value(hidden_states)[0].float()
    if layer.linear_silu:
        qkv = silu(qkv)
    q, k, v = qkv.chunk(3, dim=-1)
    if layer.use_qk_norm:
        q = _normalised(q, layer.query_layernorm.weight, layer.rms_norm_eps)
        k = _normalised(k, layer.key_layernorm.weight, layer.rms_norm_eps)
    if layer.linear_rope:
        q, k = layer.rotary_emb(positions[:num_tokens], q, k)
    if layer.linear_scale:
        q = q * layer.scaling
    q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in (q, k, v))
    step = Recurrence(
        x=v,
        dt=v.new_ones(v.shape[1]).expand(v.shape[:2]),
        A=_rates(layer, v.device),
        B=k,
        C=q,
        D=None,
        z=None,
        dt_bias=None,
        dt_softplus=False,
        allow_tf32=True,  # as vLLM's kernel for prompts
    )
    attended = torch.empty_like(v)
    (states,) = layer.kv_cache
    recur(attended, states, step, metadata, layer.prefix)
    gate, attended = layer.g_proj(hidden_states)[0], attended.flatten(-2)
    if layer.group_norm_size > 1:
        attended = layer.g_norm(attended, gate)
    else:
        attended = layer.g_norm(attended) * gate.sigmoid()
    output[:num_tokens] = layer.dense(attended.to(output.dtype))[0]
