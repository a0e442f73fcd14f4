"""Short convolutions of vLLM (LFM2), served by `jenga_kernels` on states in pages.

Such a layer has no recurrence after its convolution. A request's state is that of the convolution,
some KiB. The weights and projections stay in vLLM's layer.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

from jenga.vllm_plugin.layers.recurrent.mamba_builder import (
    JengaMambaMetadata,
    JengaStateBackend,
    builder_beside,
)
from jenga.vllm_plugin.layers.recurrent.recurrence import (
    Convolution,
    channels_first,
    conv_weight_of,
    convolve,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder


def _layer_classes() -> tuple[type, ...]:
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    return (ShortConv,)


_ShortConvBuilder = builder_beside(ShortConvAttentionMetadataBuilder, _layer_classes)


class JengaShortConvBackend(JengaStateBackend):
    """Backend registered instead of vLLM's own for short convolutions."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_SHORT_CONV"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that builds a step's metadata."""
        return _ShortConvBuilder


def forward_short_conv(
    layer: Any,  # noqa: ANN401
    hidden_states: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run a short convolution of vLLM.

    Args:
        layer: A `ShortConv`. Its states are written in place.
        hidden_states: [num_tokens or more, hidden].
        output: Same shape as hidden_states. Rows of the step's tokens are written in place.
        metadata: Metadata of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    # vLLM calls them B, C and x, after the inputs of a state space model.
    input_gates, output_gates, x = layer.in_proj(hidden_states)[0][:num_tokens].chunk(3, dim=-1)
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (conv_states,) = layer.kv_cache
    convolution = Convolution(
        states=channels_first(conv_states),
        weight=conv_weight_of(layer.conv),
        bias=layer.conv.bias,
        silu=False,
    )
    convolve(
        convolved, x, convolution, metadata, input_gates=input_gates, output_gates=output_gates
    )
    output[:num_tokens] = layer.out_proj(convolved)[0]
