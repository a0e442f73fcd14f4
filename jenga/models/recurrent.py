"""Readers of models with recurrent layers, alone or beside attention.

The shapes are those of one rank; a convolution keeps one tap less than its kernel has.

Source: state shapes and dtypes of vLLM 0.33.
"""

from collections.abc import Mapping, Sequence

from jenga.models.config import Config
from jenga.models.latent import latent_layer
from jenga.models.layers import (
    HISTORY,
    LAYER_KINDS,
    AttentionLayer,
    Kind,
    attention_types,
    head_dim,
    kv_slot_bytes,
    layer_kinds,
    state_type,
    uniform_attention,
)
from jenga.models.options import ReadOptions
from jenga.spec import FullAttention, LayerType, StatePart

_COUNT_ELEMENTS = 4
"""Of 32 bits, in which a page says how many tokens are in its states."""

_PATTERN_KINDS = {"M": Kind.STATE, "*": Kind.FULL, "-": Kind.NOTHING, "E": Kind.NOTHING}
_ZAMBA_KINDS = {"mamba": Kind.STATE, "hybrid": Kind.FULL}


def _parts(
    options: ReadOptions,
    *,
    conv: tuple[int, int],
    recurrent: tuple[int, ...],
    state_dtype: str | None = None,
) -> list[StatePart]:
    """Convolution state [channels, taps] and recurrent state of one layer."""
    dtype = options.state_dtype or state_dtype or options.model_dtype
    return [
        StatePart(name="conv", shape=conv, dtype=options.model_dtype),
        StatePart(name="recurrent", shape=recurrent, dtype=dtype),
    ]


def _history(
    options: ReadOptions, rows: Mapping[str, tuple[int, int, str]], numbers: tuple[str, int]
) -> list[StatePart]:
    """What the latest tokens brought in, and of how many; nothing where states are always written.

    Args:
        options: How the model is run.
        rows: What is kept of a token: heads, elements of a head, dtype.
        numbers: What is kept besides in float32, and how many of a token.
    """
    history_tokens = options.history_tokens
    if not history_tokens:
        return []
    name, per_token = numbers
    shape = (per_token * history_tokens + _COUNT_ELEMENTS,)
    return [
        *(
            StatePart(name=f"{HISTORY} {row}", shape=(heads, history_tokens, width), dtype=dtype)
            for row, (heads, width, dtype) in rows.items()
        ),
        StatePart(name=f"{HISTORY} {name}", shape=shape, dtype="float32"),
    ]


def _taps(options: ReadOptions, kernel: int) -> int:
    """Columns of a convolution's state.

    Of a history drafts are a part; without one vLLM gives each state their columns too.
    """
    return kernel - 1 + (options.draft_tokens if options.history_tokens else 0)


def _mamba1(config: Config, options: ReadOptions, *, channels: int) -> list[StatePart]:
    """Mamba 1: a diagonal state per channel."""
    state_size = config.integer("mamba_d_state" if "mamba_d_state" in config else "state_size")
    kernel = config.integer("mamba_d_conv" if "mamba_d_conv" in config else "conv_kernel")
    own_channels = options.shard("Mamba channels", channels)
    return _parts(options, conv=(own_channels, kernel - 1), recurrent=(own_channels, state_size))


def _mamba2(
    options: ReadOptions,
    *,
    channels: int,
    num_groups: int,
    heads: tuple[int, int, int],
    kernel: int,
    state_dtype: str | None = None,
) -> list[StatePart]:
    """Mamba 2: a matrix per head; groups are copied where ranks outnumber them.

    Args:
        options: How the model is run.
        channels: Inner width of the layer.
        num_groups: Groups of heads that share their inputs B and C.
        heads: Number of heads, elements of a head, elements of a state.
        kernel: Taps of the convolution.
        state_dtype: The architecture's default for the recurrent state.
    """
    num_heads, head_elements, state_size = heads
    if num_groups % options.tensor_parallel:
        num_groups = options.tensor_parallel
    conv_channels = channels + 2 * num_groups * state_size
    own_heads = options.shard("Mamba heads", num_heads)
    parts = _parts(
        options,
        conv=(options.shard("convolution channels", conv_channels), _taps(options, kernel)),
        recurrent=(own_heads, head_elements, state_size),
        state_dtype=state_dtype,
    )
    rows = {
        "inputs": (own_heads, head_elements, options.model_dtype),
        "projections": (num_groups // options.tensor_parallel, state_size, options.model_dtype),
    }
    return parts + _history(options, rows, ("steps", own_heads))


def _delta_rule(
    options: ReadOptions,
    *,
    keys: tuple[int, int],
    values: tuple[int, int],
    kernel: int,
    state_dtype: str,
    is_per_channel: bool,
) -> list[StatePart]:
    """The gated delta rule: a matrix per head of values.

    Args:
        options: How the model is run.
        keys: Number of heads, elements of a head; queries have as many.
        values: Number of heads, elements of a head.
        kernel: Taps of the convolution over queries, keys and values.
        state_dtype: The architecture's default for the recurrent state.
        is_per_channel: Whether every key channel decays on its own.
    """
    (num_key_heads, key_elements), (num_value_heads, value_elements) = keys, values
    channels = 2 * num_key_heads * key_elements + num_value_heads * value_elements
    own_heads = options.shard("linear-attention heads", num_value_heads)
    parts = _parts(
        options,
        conv=(options.shard("convolution channels", channels), _taps(options, kernel)),
        recurrent=(own_heads, value_elements, key_elements),
        state_dtype=state_dtype,
    )
    dtype = options.state_dtype or state_dtype
    # A change is divided by its key's length: float16 may not hold it where it holds the state.
    change_dtype = "float32" if dtype == "float16" else dtype
    own_key_heads = options.shard("linear-attention key heads", num_key_heads)
    rows = {
        "changes": (own_heads, value_elements, change_dtype),
        "keys": (own_key_heads, key_elements, options.model_dtype),
    }
    num_decays = own_heads * (key_elements if is_per_channel else 1)
    return parts + _history(options, rows, ("decays", num_decays))


def _bamba_parts(config: Config, options: ReadOptions, *, channels: int) -> list[StatePart]:
    """Mamba 2 under the field names of Bamba, Granite and Falcon-H1."""
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
    """Full attention in some layers, states in others."""
    types = attention_types(uniform_attention(config, options, kinds))
    states = [index for index, kind in enumerate(kinds) if kind is Kind.STATE]
    return [*types, state_type(states, parts, options)] if states else types


def read_mamba(config: Config, options: ReadOptions) -> list[LayerType]:
    """Mamba: states only."""
    channels = config.integer("hidden_size") * config.integer("expand", default=2)
    channels = config.integer("intermediate_size", default=channels)
    indices = range(config.num_layers())
    return [state_type(indices, _mamba1(config, options, channels=channels), options)]


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
    attention = config.counts("attn_layer_indices", default=[])
    kinds = [Kind.FULL if i in attention else Kind.STATE for i in range(num_layers)]
    channels = config.integer("hidden_size") * config.integer("mamba_expand", default=2)
    return _hybrid(config, options, kinds, _bamba_parts(config, options, channels=channels))


def read_granite_hybrid(config: Config, options: ReadOptions) -> list[LayerType]:
    """Granite 4 hybrid: attention and Mamba 2 by `layer_types`."""
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
    """Nemotron-H: attention, Mamba 2 and MLP by a pattern or a list; states in float32."""
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
    """Zamba 2: Mamba 2 in every layer, attention over twice the width before some of them."""
    num_layers = config.num_layers()
    if "layers_block_type" in config:
        kinds = config.kinds("layers_block_type", _ZAMBA_KINDS, length=num_layers)
        attention = [index for index, kind in enumerate(kinds) if kind is Kind.FULL]
    else:
        attention = config.counts("hybrid_layer_ids")
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
    """Qwen3-Next and Qwen3.5: gated delta rule, every fourth layer attends to everything."""
    num_layers = config.num_layers()
    interval = config.integer("full_attention_interval", default=4)
    default = [Kind.STATE if (i + 1) % interval else Kind.FULL for i in range(num_layers)]
    kinds = layer_kinds(config, num_layers, default)
    parts = _delta_rule(
        options,
        keys=(config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")),
        values=(config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")),
        kernel=config.integer("linear_conv_kernel_dim", default=4),
        state_dtype=config.text("mamba_ssm_dtype", default=options.model_dtype),
        is_per_channel=False,
    )
    return _hybrid(config, options, kinds, parts)


def read_kimi_linear(config: Config, options: ReadOptions) -> list[LayerType]:
    """Kimi Linear: delta attention with float32 states, latent attention in listed layers."""
    num_layers = config.num_layers()
    linear = config.section("linear_attn_config")
    full = [number - 1 for number in linear.counts("full_attn_layers")]
    if any(not 0 <= index < num_layers for index in full):
        linear.refuse("full_attn_layers", f"layer numbers from 1 to {num_layers}")
    heads = (linear.integer("num_heads"), linear.integer("head_dim"))
    parts = _delta_rule(
        options,
        keys=heads,
        values=heads,
        kernel=linear.integer("short_conv_kernel_size", default=4),
        state_dtype="float32",
        is_per_channel=True,
    )
    return [
        FullAttention(
            name="full", layers=tuple(latent_layer(config, options, index) for index in full)
        ),
        state_type([i for i in range(num_layers) if i not in full], parts, options),
    ]


def read_minimax(config: Config, options: ReadOptions) -> list[LayerType]:
    """MiniMax-Text-01: lightning attention with one matrix per head, softmax attention in some."""
    num_layers = config.num_layers()
    default = None
    if "attn_type_list" in config:
        is_full = config.counts("attn_type_list")
        if len(is_full) != num_layers:
            config.refuse("attn_type_list", f"a list of {num_layers} numbers, one per layer")
        default = [Kind.FULL if full else Kind.STATE for full in is_full]
    kinds = layer_kinds(config, num_layers, default)
    num_heads = options.shard("attention heads", config.integer("num_attention_heads"))
    elements = head_dim(config)
    matrix = StatePart(
        name="recurrent",
        shape=(num_heads, elements, elements),
        dtype=options.state_dtype or options.model_dtype,
    )
    return _hybrid(config, options, kinds, [matrix])


def read_hymba(config: Config, options: ReadOptions) -> list[LayerType]:
    """Hymba: attention and Mamba 1 in every layer; neighbours share KV, memory tokens stay.

    A window keeps the memory tokens as well, which every query reads.
    """
    num_layers = config.num_layers()
    window_tokens = config.integer("sliding_window") + config.count("num_memory_tokens", default=0)
    full = config.counts("global_attn_idx")
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
