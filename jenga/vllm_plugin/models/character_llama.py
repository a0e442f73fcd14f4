"""Llama in character.ai's design: windows in most layers, and layers that share keys and values.

The configuration is Llama's, with three more fields. `layer_types` and `sliding_window` are as in
other models with windows. `kv_sharing` is an object from the number of a layer to the number of the
layer whose keys and values it reads. Such a layer has projections of queries and outputs only. The
weights have Llama's names.

Source: "Optimizing AI inference at Character.AI", 2024; neither code nor weights are published.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, extract_layer_index

from jenga.models.config import Config
from jenga.models.readers.designs import SharedLayers, shared_layers

_OF_KEYS_AND_VALUES = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:[kv]_proj\.|(?:attn\.)?(?:k|v|kv)_scale$)"
)
"""Names of what a checkpoint may have for the keys and values of a layer."""

_CACHE_SCALES = ("k_scale", "v_scale", "output_scale")
"""Ends of the names of scales for a float8 cache, in the formats that vLLM reads."""

_NO_LAYER = -1


def layers_of(config: PreTrainedConfig) -> SharedLayers:
    """Read what each layer of a configuration does.

    Raises:
        ValueError: A field is missing or wrong; the message names it.
    """
    return shared_layers(Config(config.to_dict(), source="config.json"))


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]], sources: Mapping[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a checkpoint's layers, once each is known to have a use.

    Args:
        weights: Names, which begin with "layers." for the weights of a layer, and tensors.
        sources: As in `SharedLayers`.

    Raises:
        ValueError: A layer that reads another's keys and values has weights for its own. Or a layer
            that others read has scales for a float8 cache, which the others would not know.
    """
    for name, weight in weights:
        found = _OF_KEYS_AND_VALUES.match(name)
        index = int(found[1]) if found else _NO_LAYER
        if index in sources:
            msg = (
                f"the checkpoint must have no keys and values for layer {index}, which reads those "
                f"of layer {sources[index]} (kv_sharing), got {name}"
            )
            raise ValueError(msg)
        if index in sources.values() and name.endswith(_CACHE_SCALES):
            msg = (
                f"the checkpoint must have no scales for the keys and values of layer {index}, "
                f"which other layers read (kv_sharing), got {name}"
            )
            raise ValueError(msg)
        yield name, weight


class CharacterLlamaAttention(nn.Module):
    """Attention of one layer, with or without a window, to its own or an earlier layer's keys."""

    def __init__(
        self,
        config: LlamaConfig,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int,
        quant_config: QuantizationConfig | None,
        bias: bool,
        bias_o_proj: bool,
        cache_config: CacheConfig | None,
        prefix: str,
        attn_type: str,
    ) -> None:
        """Build the layer that `prefix` names, in the way in which `LlamaDecoderLayer` asks."""
        super().__init__()
        index, layers = extract_layer_index(prefix), layers_of(config)
        source = layers.sources.get(index)
        num_ranks = get_tensor_model_parallel_world_size()
        head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
        own_heads = num_heads // num_ranks
        own_kv_heads = max(1, num_kv_heads // num_ranks)  # fewer heads than ranks are copied
        self.q_size, self.kv_size = own_heads * head_dim, own_kv_heads * head_dim
        self.is_reader = source is not None
        if self.is_reader:
            self.q_proj = ColumnParallelLinear(
                hidden_size,
                num_heads * head_dim,
                bias=bias,
                quant_config=quant_config,
                prefix=f"{prefix}.q_proj",
            )
        else:
            self.qkv_proj = QKVParallelLinear(
                hidden_size,
                head_dim,
                num_heads,
                num_kv_heads,
                bias=bias,
                quant_config=quant_config,
                prefix=f"{prefix}.qkv_proj",
            )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            bias=bias_o_proj,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            head_dim,
            max_position=max_position_embeddings,
            rope_parameters=getattr(config, "rope_parameters", None),
        )
        parent = prefix.removesuffix(f"{index}.self_attn")
        self.attn = Attention(
            own_heads,
            head_dim,
            head_dim**-0.5,
            num_kv_heads=own_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=layers.window_tokens[index],
            attn_type=attn_type,
            kv_sharing_target_layer_name=(
                f"{parent}{source}.self_attn.attn" if self.is_reader else None
            ),
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            positions: Place of each token in its request, i64[num_tokens].
            hidden_states: [num_tokens, hidden_size].

        Returns:
            [num_tokens, hidden_size].
        """
        if self.is_reader:
            q, _ = self.q_proj(hidden_states)
            q, _ = self.rotary_emb(positions, q, None)
            attended = self.attn(q, None, None)
        else:
            qkv, _ = self.qkv_proj(hidden_states)
            q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
            q, k = self.rotary_emb(positions, q, k)
            attended = self.attn(q, k, v)
        output, _ = self.o_proj(attended)
        return output


class CharacterLlamaDecoderLayer(LlamaDecoderLayer):
    """A layer of Llama with this attention."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the layer that `prefix` names."""
        super().__init__(vllm_config, prefix, attn_layer_type=CharacterLlamaAttention)


class CharacterLlamaModel(LlamaModel):
    """Embeddings, layers and the last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the layers of this pipeline rank.

        Raises:
            ValueError: See `layers_of`.
        """
        config = vllm_config.model_config.hf_config
        self.sources = layers_of(config).sources
        super().__init__(
            vllm_config=vllm_config, prefix=prefix, layer_type=CharacterLlamaDecoderLayer
        )
        # Only layers with their own keys and values have the three projections as one.
        self.hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_stacked={
                f"layers.{index}.self_attn.{shard}_proj.": (
                    f"layers.{index}.self_attn.qkv_proj.",
                    shard,
                )
                for index in range(config.num_hidden_layers)
                if index not in self.sources
                for shard in ("q", "k", "v")
            }
            | {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights of this rank, by Llama's names.

        Raises:
            ValueError: See `checked_weights`.
        """
        return super().load_weights(checked_weights(weights, self.sources))


class CharacterLlamaForCausalLM(LlamaForCausalLM):
    """The model with its head, as vLLM loads it."""

    # Adapters were never tried on layers without keys.
    supports_lora = False  # pyright: ignore[reportAssignmentType]

    def _init_model(
        self,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] = CharacterLlamaDecoderLayer,
    ) -> CharacterLlamaModel:
        return CharacterLlamaModel(vllm_config=vllm_config, prefix=prefix)
