"""Readers of models with recurrent layers, with or without attention.

Shapes are those of one rank. A convolution stores one tap less than its kernel has.

Source: state shapes and dtypes of vLLM 0.33.
"""

from collections.abc import Sequence

from jenga.models.config import Config
from jenga.models.options import ReadOptions
from jenga.models.readers.layers import (
    LAYER_KINDS,
    AttentionLayer,
    Kind,
    attention_types,
    conv_taps,
    delta_rule_parts,
    history_parts,
    kv_slot_bytes,
    layer_kinds,
    matrix_part,
    state_parts,
    state_type,
    uniform_attention,
)
from jenga.spec import LayerType, StatePart

_PATTERN_KINDS = {"M": Kind.STATE, "*": Kind.FULL, "-": Kind.NOTHING, "E": Kind.NOTHING}
_ZAMBA_KINDS = {"mamba": Kind.STATE, "linear_attention": Kind.STATE, "hybrid": Kind.FULL}
_LFM2_KINDS = {"conv": Kind.STATE, "full_attention": Kind.FULL}
_LFM2 = {"num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3}


def _mamba1(config: Config, options: ReadOptions, *, channels: int) -> list[StatePart]:
    """Return the state parts of Mamba 1: a diagonal state per channel."""
    state_size = config.integer("mamba_d_state" if "mamba_d_state" in config else "state_size")
    kernel = config.integer("mamba_d_conv" if "mamba_d_conv" in config else "conv_kernel")
    own_channels = options.shard("Mamba channels", channels)
    return state_parts(
        options, conv=(own_channels, kernel - 1), recurrent=(own_channels, state_size)
    )


def _mamba2(
    options: ReadOptions,
    *,
    channels: int,
    num_groups: int,
    heads: tuple[int, int, int],
    kernel: int,
    state_dtype: str | None = None,
) -> list[StatePart]:
    """Return the state parts of Mamba 2: a matrix per head.

    If the ranks do not divide the groups, every rank stores a copy of one group.

    Args:
        options: How the model is run.
        channels: Inner width of the layer.
        num_groups: Number of groups of heads that share the inputs B and C.
        heads: Number of heads, elements of a head, elements of a state.
        kernel: Taps of the convolution.
        state_dtype: The architecture's default for the recurrent state.
    """
    num_heads, head_elements, state_size = heads
    if num_groups % options.tensor_parallel:
        num_groups = options.tensor_parallel
    conv_channels = channels + 2 * num_groups * state_size
    own_heads = options.shard("Mamba heads", num_heads)
    parts = state_parts(
        options,
        conv=(options.shard("convolution channels", conv_channels), conv_taps(options, kernel)),
        recurrent=(own_heads, head_elements, state_size),
        state_dtype=state_dtype,
    )
    rows = {
        "inputs": (own_heads, head_elements, options.model_dtype),
        "projections": (num_groups // options.tensor_parallel, state_size, options.model_dtype),
    }
    return parts + history_parts(options, rows, ("steps", own_heads))


def _bamba_parts(config: Config, options: ReadOptions, *, channels: int) -> list[StatePart]:
    """Return the state parts of Mamba 2, from the field names of Bamba, Granite and Falcon-H1."""
    num_heads = config.integer("mamba_n_heads")
    if "mamba_d_head" in config and not config.equals("mamba_d_head", "auto"):
        head_elements = config.integer("mamba_d_head")
    else:
        head_elements = channels // num_heads
    if num_heads * head_elements != channels:
        config.refuse("mamba_n_heads", f"a divisor of the {channels} inner channels")
    return _mamba2(
        options,
        channels=channels,
        num_groups=config.integer("mamba_n_groups", default=1),
        heads=(num_heads, head_elements, config.integer("mamba_d_state")),
        kernel=config.integer("mamba_d_conv", default=4),
    )


def _hybrid(
    config: Config, options: ReadOptions, kinds: Sequence[Kind], parts: Sequence[StatePart]
) -> list[LayerType]:
    """Return the layer types of a model with attention in some layers and states in others."""
    types = attention_types(uniform_attention(config, options, kinds))
    states = [index for index, kind in enumerate(kinds) if kind is Kind.STATE]
    return [*types, state_type(states, parts, options)] if states else types


def _short_convolutions(
    config: Config, options: ReadOptions, kinds: Sequence[Kind], *, channels: int
) -> list[LayerType]:
    """Return the layer types of a model whose states are convolutions alone, in its own dtype."""
    config = config.with_defaults(_LFM2)
    kernel = config.integer("conv_L_cache")
    if kernel == 1:
        config.refuse("conv_L_cache", "at least 2")
    shape = (options.shard("convolution channels", channels), conv_taps(options, kernel))
    conv = StatePart(name="conv", shape=shape, dtype=options.model_dtype)
    return _hybrid(config, options, kinds, [conv])


def read_mamba(config: Config, options: ReadOptions) -> list[LayerType]:
    """Mamba: states only."""
    channels = config.integer("hidden_size") * config.integer("expand", default=2)
    channels = config.integer("intermediate_size", default=channels)
    indices = range(config.num_layers())
    return [state_type(indices, _mamba1(config, options, channels=channels), options)]


def read_mamba2(config: Config, options: ReadOptions) -> list[LayerType]:
    """Mamba 2: states only."""
    num_heads, head_elements = config.integer("num_heads"), config.integer("head_dim")
    parts = _mamba2(
        options,
        channels=num_heads * head_elements,
        num_groups=config.integer("n_groups"),
        heads=(num_heads, head_elements, config.integer("state_size")),
        kernel=config.integer("conv_kernel", default=4),
    )
    return [state_type(range(config.num_layers()), parts, options)]


def read_jamba(config: Config, options: ReadOptions) -> list[LayerType]:
    """Jamba: attention in one layer of a period, Mamba 1 in the others."""
    num_layers = config.num_layers()
    period = config.integer("attn_layer_period", default=8)
    offset = config.count("attn_layer_offset", default=4)
    kinds = [Kind.FULL if i % period == offset else Kind.STATE for i in range(num_layers)]
    config = config.with_defaults({"mamba_d_state": 16, "mamba_d_conv": 4})
    channels = config.integer("hidden_size") * config.integer("mamba_expand", default=2)
    return _hybrid(config, options, kinds, _mamba1(config, options, channels=channels))


def read_bamba(config: Config, options: ReadOptions) -> list[LayerType]:
    """Bamba: attention in listed layers, Mamba 2 in the others."""
    num_layers = config.num_layers()
    attention = config.indices("attn_layer_indices", num_layers=num_layers, default=[])
    kinds = [Kind.FULL if i in attention else Kind.STATE for i in range(num_layers)]
    channels = config.integer("hidden_size") * config.integer("mamba_expand", default=2)
    return _hybrid(config, options, kinds, _bamba_parts(config, options, channels=channels))


def read_granite_hybrid(config: Config, options: ReadOptions) -> list[LayerType]:
    """Granite 4 hybrid: attention and Mamba 2 as in `layer_types`."""
    kinds = layer_kinds(config, config.num_layers(), None)
    channels = config.integer("hidden_size") * config.integer("mamba_expand", default=2)
    return _hybrid(config, options, kinds, _bamba_parts(config, options, channels=channels))


def read_falcon_h1(config: Config, options: ReadOptions) -> list[LayerType]:
    """Falcon-H1: attention and Mamba 2 side by side in every layer."""
    num_layers = config.num_layers()
    parts = _bamba_parts(config, options, channels=config.integer("mamba_d_ssm"))
    attention = uniform_attention(config, options, [Kind.FULL] * num_layers)
    return [*attention_types(attention), state_type(range(num_layers), parts, options)]


def read_nemotron_h(config: Config, options: ReadOptions) -> list[LayerType]:
    """Nemotron-H: attention, Mamba 2 and MLP as in a list or a pattern; states are float32.

    `mamba_ssm_cache_dtype` may name another dtype.
    """
    num_layers = config.num_layers()
    if "layers_block_type" in config:
        kinds = config.kinds("layers_block_type", LAYER_KINDS, length=num_layers)
    else:
        pattern = config.text("hybrid_override_pattern")
        if len(pattern) != num_layers or not set(pattern) <= set(_PATTERN_KINDS):
            letters = ", ".join(_PATTERN_KINDS)
            config.refuse("hybrid_override_pattern", f"{num_layers} letters out of {letters}")
        kinds = [_PATTERN_KINDS[letter] for letter in pattern]
    if "attention_head_dim" in config:
        config = config.with_defaults({"head_dim": config.integer("attention_head_dim")})
    num_heads = config.integer("mamba_num_heads")
    head_elements = config.integer("mamba_head_dim")
    parts = _mamba2(
        options,
        channels=num_heads * head_elements,
        num_groups=config.integer("n_groups"),
        heads=(num_heads, head_elements, config.integer("ssm_state_size")),
        kernel=config.integer("conv_kernel", default=4),
        state_dtype=config.text("mamba_ssm_cache_dtype", default="float32"),
    )
    return _hybrid(config, options, kinds, parts)


def read_zamba2(config: Config, options: ReadOptions) -> list[LayerType]:
    """Zamba 2: Mamba 2 in every layer; some also have attention over twice the hidden size."""
    num_layers = config.num_layers()
    if "layers_block_type" in config:
        kinds = config.kinds("layers_block_type", _ZAMBA_KINDS, length=num_layers)
        attention = [index for index, kind in enumerate(kinds) if kind is Kind.FULL]
    else:
        attention = config.indices("hybrid_layer_ids", num_layers=num_layers)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    elements = config.integer("attention_head_dim", default=2 * hidden_size // num_heads)
    slot_bytes = kv_slot_bytes(
        config.with_defaults({"head_dim": elements, "num_key_value_heads": num_heads}), options
    )
    channels = hidden_size * config.integer("mamba_expand", default=2)
    num_mamba_heads = config.integer("n_mamba_heads")
    if channels % num_mamba_heads:
        config.refuse("n_mamba_heads", f"a divisor of the {channels} inner channels")
    parts = _mamba2(
        options,
        channels=channels,
        num_groups=config.integer("mamba_ngroups", default=1),
        heads=(num_mamba_heads, channels // num_mamba_heads, config.integer("mamba_d_state")),
        kernel=config.integer("mamba_d_conv", default=4),
    )
    layers = [AttentionLayer(index=index, slot_bytes=slot_bytes) for index in attention]
    return [*attention_types(layers), state_type(range(num_layers), parts, options)]


def read_gated_delta(config: Config, options: ReadOptions) -> list[LayerType]:
    """Qwen3-Next and Qwen3.5: full attention in every fourth layer, gated delta rule elsewhere."""
    num_layers = config.num_layers()
    interval = config.integer("full_attention_interval", default=4)
    default = [Kind.STATE if (i + 1) % interval else Kind.FULL for i in range(num_layers)]
    kinds = layer_kinds(config, num_layers, default)
    parts = delta_rule_parts(
        options,
        keys=(config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")),
        values=(config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")),
        kernel=config.integer("linear_conv_kernel_dim", default=4),
        state_dtype=config.text("mamba_ssm_dtype", default=options.model_dtype),
        is_per_channel=False,
    )
    return _hybrid(config, options, kinds, parts)


def read_minimax(config: Config, options: ReadOptions) -> list[LayerType]:
    """MiniMax-Text-01: full attention in some layers, lightning attention in the others."""
    num_layers = config.num_layers()
    default = None
    if "attn_type_list" in config:
        is_full = config.layer_counts("attn_type_list", num_layers=num_layers)
        default = [Kind.FULL if full else Kind.STATE for full in is_full]
    kinds = layer_kinds(config, num_layers, default)
    return _hybrid(config, options, kinds, [matrix_part(config, options)])


def read_lfm2(config: Config, options: ReadOptions) -> list[LayerType]:
    """LFM2: short convolutions, and full attention as in `layer_types` or in listed layers."""
    num_layers = config.num_layers()
    if "layer_types" in config:
        kinds = config.kinds("layer_types", _LFM2_KINDS, length=num_layers)
    else:
        attention = config.indices(
            "full_attn_idxs", num_layers=num_layers, default=range(num_layers)
        )
        kinds = [Kind.FULL if i in attention else Kind.STATE for i in range(num_layers)]
    channels = config.integer("conv_dim", default=config.integer("hidden_size"))
    return _short_convolutions(config, options, kinds, channels=channels)


def read_lfm2_moe(config: Config, options: ReadOptions) -> list[LayerType]:
    """LFM2 with experts: short convolutions and full attention as in `layer_types`."""
    kinds = config.kinds("layer_types", _LFM2_KINDS, length=config.num_layers())
    return _short_convolutions(config, options, kinds, channels=config.integer("hidden_size"))


def read_hymba(config: Config, options: ReadOptions) -> list[LayerType]:
    """Hymba: attention and Mamba 1 in every layer; layers of a group share KV.

    Every query also reads the memory tokens, so a window is longer by their number.
    """
    num_layers = config.num_layers()
    window_tokens = config.integer("sliding_window") + config.count("num_memory_tokens", default=0)
    full = config.indices("global_attn_idx", num_layers=num_layers)
    slot_bytes = kv_slot_bytes(config, options)
    layers = [
        AttentionLayer(
            index=index,
            slot_bytes=slot_bytes,
            window_tokens=None if index in full else window_tokens,
        )
        for index in range(num_layers)
    ]
    sources = {
        reader: group[0] for group in config.groups("kv_reuse_group") for reader in group[1:]
    }
    channels = config.integer("hidden_size") * config.integer("mamba_expand", default=2)
    return [
        *attention_types(layers, sources=sources),
        state_type(range(num_layers), _mamba1(config, options, channels=channels), options),
    ]
