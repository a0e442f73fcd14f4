"""Readers of models whose published configurations have field names of their own.

Source: configurations on Hugging Face, and the attributes that vLLM 0.33 reads of them.
"""

from dataclasses import replace

from jenga.models.config import Config
from jenga.models.options import KvFormat, ReadOptions
from jenga.models.readers.attention import read_full
from jenga.models.readers.layers import (
    AttentionLayer,
    Kind,
    attention_types,
    kv_slot_bytes,
    layer_kinds,
    matrix_part,
    state_type,
    uniform_attention,
)
from jenga.spec import LayerType

_HEADS = {"num_attention_heads": "n_head"}
_PLAMO_3 = {"num_key_value_heads": 4, "head_dim": 128, "window_size": 2048}


def read_gpt(config: Config, options: ReadOptions) -> list[LayerType]:
    """GPT-2, GPT-J and StarCoder: full attention, with one KV head if `multi_query` is true."""
    config = config.renamed(_HEADS | {"hidden_size": "n_embd"})
    if config.flag("multi_query", default=False):
        config = config.with_values({"num_key_value_heads": 1})
    return read_full(config, options)


def read_bloom(config: Config, options: ReadOptions) -> list[LayerType]:
    """BLOOM: full attention with a bias for distance."""
    return read_full(config.renamed(_HEADS | {"hidden_size": "n_embed"}), options)


def read_falcon(config: Config, options: ReadOptions) -> list[LayerType]:
    """Falcon: one KV head in the first models, groups of heads in later ones.

    vLLM 0.32 and 0.33 store keys and values in the model's dtype, whatever format is asked for.
    """
    config = config.renamed(_HEADS)
    num_kv_heads = config.integer("num_attention_heads")
    if config.flag("new_decoder_architecture", default=False):
        config = config.renamed({"num_kv_heads": "n_head_kv"})
        num_kv_heads = config.integer("num_kv_heads", default=num_kv_heads)
    elif config.flag("multi_query", default=True):
        num_kv_heads = 1
    config = config.with_values({"num_key_value_heads": num_kv_heads})
    return read_full(config, replace(options, kv_format=KvFormat.MODEL))


def read_chatglm(config: Config, options: ReadOptions) -> list[LayerType]:
    """ChatGLM and GLM-4: full attention; groups of heads share keys and values."""
    if config.flag("multi_query_attention", default=False):
        num_kv_heads = config.integer("multi_query_group_num", default=1)
        config = config.with_values({"num_key_value_heads": num_kv_heads})
    return read_full(config, options)


def read_dbrx(config: Config, options: ReadOptions) -> list[LayerType]:
    """DBRX: full attention; the number of KV heads is in a section."""
    config = config.renamed({"num_attention_heads": "n_heads", "hidden_size": "d_model"})
    if "attn_config" in config:
        num_kv_heads = config.section("attn_config").integer("kv_n_heads", default=1)
        config = config.with_values({"num_key_value_heads": num_kv_heads})
    return read_full(config, options)


def read_step(config: Config, options: ReadOptions) -> list[LayerType]:
    """Step 3.5: windows as in `layer_types`; layers with a window may have other heads.

    The published list has further entries for draft layers, which are cut off.
    """
    num_layers = config.num_layers()
    config = config.renamed({"num_key_value_heads": "num_attention_groups"}).cut(
        "layer_types", num_layers
    )
    default = [Kind.FULL if index % 2 else Kind.SLIDING for index in range(num_layers)]
    kinds = layer_kinds(config, num_layers, default)
    others = "attention_other_setting"
    if others in config:
        own = config.section(others).renamed({"num_key_value_heads": "num_attention_groups"})
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        heads = {name: own.integer(name) for name in names if name in own}
        with_window = {str(i): heads for i, kind in enumerate(kinds) if kind is Kind.SLIDING}
        config = config.with_defaults({"per_layer_config": with_window})
    return attention_types(uniform_attention(config, options, kinds, window_field="sliding_window"))


def read_plamo3(config: Config, options: ReadOptions) -> list[LayerType]:
    """PLaMo 3: full attention in the last layer of every eight, a window in the others."""
    config = config.with_defaults(_PLAMO_3)
    num_layers = config.num_layers()
    interval = config.integer("sliding_window_pattern", default=8)
    kinds = [Kind.SLIDING if (i + 1) % interval else Kind.FULL for i in range(num_layers)]
    return attention_types(uniform_attention(config, options, kinds, window_field="window_size"))


def read_nemotron_nas(config: Config, options: ReadOptions) -> list[LayerType]:
    """Nemotron-NAS: each layer has its own number of KV heads, or no attention at all."""
    num_layers = config.num_layers()
    blocks = config.sections("block_configs")
    if len(blocks) != num_layers:
        config.refuse("block_configs", f"a list of {num_layers} objects, one per layer")
    num_heads = config.integer("num_attention_heads")
    layers: list[AttentionLayer] = []
    for index, block in enumerate(blocks):
        attention = block.section("attention")
        if any(attention.flag(name, default=False) for name in ("no_op", "replace_with_linear")):
            continue
        group_heads = attention.integer("n_heads_in_group")
        if num_heads % group_heads:
            attention.refuse("n_heads_in_group", f"a divisor of the {num_heads} heads")
        own = config.with_values({"num_key_value_heads": num_heads // group_heads})
        layers.append(AttentionLayer(index=index, slot_bytes=kv_slot_bytes(own, options)))
    return attention_types(layers)


def read_ring_linear(config: Config, options: ReadOptions) -> list[LayerType]:
    """Ring-linear: lightning attention, with full attention in the last layer of each group.

    Layers after the last whole group have full attention too.
    """
    num_layers = config.num_layers()
    group_layers = config.integer("layer_group_size")
    num_grouped = num_layers - num_layers % group_layers
    kinds = [
        Kind.FULL if (index + 1) % group_layers == 0 or index >= num_grouped else Kind.STATE
        for index in range(num_layers)
    ]
    types = attention_types(uniform_attention(config, options, kinds))
    states = [index for index, kind in enumerate(kinds) if kind is Kind.STATE]
    return [*types, state_type(states, [matrix_part(config, options)], options)]
