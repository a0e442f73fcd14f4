"""Readers of published designs that have no published configuration; field names are our own."""

from jenga.models.config import Config
from jenga.models.layers import (
    AttentionLayer,
    attention_types,
    head_dim,
    kv_slot_bytes,
    layer_name,
)
from jenga.models.options import ReadOptions
from jenga.spec import Layer, LayerType, TokenBudget


def read_character_ai(config: Config, options: ReadOptions) -> list[LayerType]:
    """Full attention in every `global_every`-th layer, a window in the others; layers share KV.

    Neighbouring layers of one kind form groups of `kv_share_group` layers. A group reads the keys
    and values of its first layer.

    Source: "Optimizing AI inference at Character.AI", 2024. It describes multi-query attention,
    windows of 1024 tokens in five layers of six, and KV shared between neighbours of a kind.
    """
    num_layers = config.num_layers()
    interval = config.integer("global_every")
    window_tokens = config.integer("sliding_window")
    slot_bytes = options.kv_slot_bytes(config.integer("num_key_value_heads"), head_dim(config))
    layers = [
        AttentionLayer(
            index=index,
            slot_bytes=slot_bytes,
            window_tokens=None if (index + 1) % interval == 0 else window_tokens,
        )
        for index in range(num_layers)
    ]
    group_layers = config.integer("kv_share_group")
    sources: dict[int, int] = {}
    for window in (None, window_tokens):
        alike = [layer.index for layer in layers if layer.window_tokens == window]
        for place, index in enumerate(alike):
            if place % group_layers:
                sources[index] = alike[place - place % group_layers]
    return attention_types(layers, sources=sources)


def read_pyramid_kv(config: Config, options: ReadOptions) -> list[LayerType]:
    """Full attention with a token budget that falls from layer to layer; one type per layer.

    Source: PyramidKV (arXiv 2406.02069).
    """
    num_layers = config.num_layers()
    slot_bytes = kv_slot_bytes(config, options)
    return [
        TokenBudget(
            name=f"budget_{index}",
            layers=(Layer(name=layer_name(index), slot_bytes=slot_bytes),),
            mean_budget_tokens=config.integer("max_capacity_prompt"),
            recent_tokens=config.integer("window_size"),
            steepness=config.integer("beta"),
            layer_index=index,
            num_layers=num_layers,
        )
        for index in range(num_layers)
    ]
