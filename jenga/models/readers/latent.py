"""Readers of models with multi-head latent attention: DeepSeek and others, some with states too.

Source: page sizes, state shapes and dtypes of vLLM 0.33.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from jenga.models.config import Config
from jenga.models.options import ReadOptions
from jenga.models.readers.layers import (
    Kind,
    delta_rule_parts,
    layer_kinds,
    layer_name,
    matrix_part,
    state_type,
)
from jenga.spec import FullAttention, Layer, LayerType, SlidingWindow, StatePart

_INDEXER_SCALE_BYTES = 4
_INDEXER_GROUP_ELEMENTS = 128

_V4_ROTARY_DIM = 64
_V4_SCALE_BYTES = 8
"""Bytes of scales in a slot of DeepSeek-V4: one per 64 float8 elements, and one of padding."""

_V4_PAGE_TOKENS = 64
"""Least tokens of a page of compressed keys.

A page of keys compressed fourfold then has 16 slots, so that a kernel loads whole vectors.
"""

_V4_COMPRESSOR_PAGE_TOKENS = 4
_FLOAT32_BYTES = 4
_DENSE_RATIO = 4
"""Compression ratio of the layers whose groups of tokens overlap and that have an indexer."""

_BAILING_DELTA = "BailingMoeV3ForCausalLM"
_BAILING = ("BailingMoeV2_5ForCausalLM", _BAILING_DELTA)


def _indexer_bytes(index_head_dim: int) -> int:
    """Bytes of an indexer's key: float8 elements, and a float32 scale per 128 of them."""
    return index_head_dim + index_head_dim // _INDEXER_GROUP_ELEMENTS * _INDEXER_SCALE_BYTES


def latent_layer(config: Config, options: ReadOptions, index: int) -> Layer:
    """Return the storage of one layer's latents."""
    latent_dim = config.integer("kv_lora_rank")
    slot_bytes = options.latent_slot_bytes(latent_dim, config.integer("qk_rope_head_dim"))
    return Layer(name=layer_name(index), slot_bytes=slot_bytes)


def read_deepseek(config: Config, options: ReadOptions) -> list[LayerType]:
    """DeepSeek V2 to V3.2 and GLM 5: a latent per token and layer; from V3.2 on indexer keys too.

    Latents and indexer keys are read for the whole prefix, so they share one page table.
    """
    num_layers = config.num_layers()
    options.shard("attention heads", config.integer("num_attention_heads"))
    layers = [latent_layer(config, options, index) for index in range(num_layers)]
    if "index_head_dim" in config:
        slot_bytes = _indexer_bytes(config.integer("index_head_dim"))
        layers += [
            Layer(name=f"{layer_name(index)}.indexer", slot_bytes=slot_bytes)
            for index in _indexed_layers(config, num_layers)
        ]
    return [FullAttention(name="full", layers=tuple(layers))]


def _indexed_layers(config: Config, num_layers: int) -> list[int]:
    """Indices of the layers with an indexer of their own.

    The other layers reuse the tokens that the last indexer before them chose. The pattern of the
    model comes in one of three forms (arXiv 2603.12201):

    - a list of kinds, as transformers saves it;
    - a text with one letter per layer;
    - an interval in layers, and an offset.
    """
    if "indexer_types" in config:
        known = {"full": True, "shared": False}
        has_own = config.kinds("indexer_types", known, length=num_layers)
    elif "index_topk_pattern" in config:
        pattern = config.text("index_topk_pattern")
        if len(pattern) != num_layers or set(pattern) - {"F", "S"}:
            config.refuse("index_topk_pattern", f"{num_layers} letters F or S, one per layer")
        has_own = [letter == "F" for letter in pattern]
    else:
        interval = config.integer("index_topk_freq", default=1)
        first = config.count("index_skip_topk_offset", default=2) - 1
        has_own = [max(index - first, 0) % interval == 0 for index in range(num_layers)]
    if not has_own[0]:
        config.refuse("indexer_types", "a pattern whose first layer has an indexer of its own")
    return [index for index, own in enumerate(has_own) if own]


def read_longcat(config: Config, options: ReadOptions) -> list[LayerType]:
    """LongCat-Flash: two latent attentions in every layer."""
    options.shard("attention heads", config.integer("num_attention_heads"))
    layers: list[Layer] = []
    for index in range(config.num_layers()):
        one = latent_layer(config, options, index)
        layers += [replace(one, name=f"{one.name}.{half}") for half in range(2)]
    return [FullAttention(name="full", layers=tuple(layers))]


def read_deepseek_v4(config: Config, options: ReadOptions) -> list[LayerType]:
    """DeepSeek V4: a window in every layer; most layers also have keys compressed 4- or 128-fold.

    A compressor reads the last few tokens uncompressed, so it has a small window of its own. Keys
    are stored in float8, whatever `options.kv_format` says.
    """
    num_layers = config.num_layers()
    ratios = _compress_ratios(config, num_layers)
    options.shard("attention heads", config.integer("num_attention_heads"))
    head_dim = config.integer("head_dim")
    index_dim = config.integer("index_head_dim")
    rotary_dim = config.integer("qk_rope_head_dim", default=_V4_ROTARY_DIM)
    slot_bytes = head_dim - rotary_dim + 2 * rotary_dim + _V4_SCALE_BYTES

    window_tokens = config.integer("sliding_window")
    windows: dict[int, list[Layer]] = {
        window_tokens: [Layer(name=layer_name(i), slot_bytes=slot_bytes) for i in range(num_layers)]
    }
    compressed: dict[int, list[Layer]] = {}
    for index, ratio in enumerate(ratios):
        if ratio == 0:
            continue
        overlap = 2 if ratio == _DENSE_RATIO else 1
        dims = {"compressed": (head_dim, slot_bytes)}
        if ratio == _DENSE_RATIO:
            dims["indexer"] = (index_dim, _indexer_bytes(index_dim))
        for part, (dim, bytes_per_slot) in dims.items():
            name = f"{layer_name(index)}.{part}"
            compressed.setdefault(ratio, []).append(Layer(name=name, slot_bytes=bytes_per_slot))
            # The compressor stores a value and a weight for each element, in float32.
            windows.setdefault(ratio * overlap, []).append(
                Layer(name=f"{name}.compressor", slot_bytes=2 * overlap * dim * _FLOAT32_BYTES)
            )
    types: list[LayerType] = [
        FullAttention(
            name=f"full_{ratio}",
            layers=tuple(layers),
            tokens_per_slot=ratio,
            tokens_per_page=max(ratio, _V4_PAGE_TOKENS),
        )
        for ratio, layers in sorted(compressed.items())
    ]
    types += [
        SlidingWindow(
            name=f"sliding_{tokens}",
            layers=tuple(layers),
            window_tokens=tokens,
            tokens_per_page=_V4_COMPRESSOR_PAGE_TOKENS if tokens < window_tokens else None,
        )
        for tokens, layers in sorted(windows.items())
    ]
    return types


def _compress_ratios(config: Config, num_layers: int) -> list[int]:
    """Tokens that share one compressed slot, for each layer; 0 for a layer with only a window.

    DeepSeek published the numbers as a list. transformers saves a kind for each layer, and a number
    for each kind.
    """
    if "compress_ratios" not in config and "compress_rates" in config:
        rates = config.section("compress_rates")
        names = ("compressed_sparse_attention", "heavily_compressed_attention")
        known = {"sliding_attention": 0} | {name: rates.integer(name) for name in names}
        return config.kinds("layer_types", known, length=num_layers)
    return config.layer_counts("compress_ratios", num_layers=num_layers)


def read_kimi_linear(config: Config, options: ReadOptions) -> list[LayerType]:
    """Kimi Linear: latent attention in listed layers, the delta rule with float32 states elsewhere.

    The published configuration has a section for the delta rule and for the list. transformers
    saves fields instead.
    """
    num_layers = config.num_layers()
    if "linear_attn_config" in config:
        linear = config.section("linear_attn_config")
        full = [number - 1 for number in linear.counts("full_attn_layers")]
        if any(not 0 <= index < num_layers for index in full):
            linear.refuse("full_attn_layers", f"layer numbers from 1 to {num_layers}")
        heads = (linear.integer("num_heads"), linear.integer("head_dim"))
        kernel = linear.integer("short_conv_kernel_size", default=4)
    else:
        kinds = layer_kinds(config, num_layers, None)
        full = [index for index, kind in enumerate(kinds) if kind is Kind.FULL]
        heads = (config.integer("linear_num_heads"), config.integer("linear_head_dim"))
        kernel = config.integer("linear_conv_kernel_dim", default=4)
    parts = delta_rule_parts(
        options,
        keys=heads,
        values=heads,
        kernel=kernel,
        state_dtype="float32",
        is_per_channel=True,
    )
    return _beside_states(config, options, full, parts)


def read_bailing(config: Config, options: ReadOptions) -> list[LayerType]:
    """Ling and Ring from 2.5 on: latent attention in the last layer of a group, states elsewhere.

    The states of 2.5 are those of lightning attention. The states of 3.0 are those of Kimi Linear.
    `architectures` says which of the two a model has.
    """
    is_delta = config.architecture(_BAILING) == _BAILING_DELTA
    num_layers = config.num_layers()
    group_layers = config.integer("layer_group_size")
    full = {index for index in range(num_layers) if (index + 1) % group_layers == 0}
    if is_delta:
        # Layers after the last whole group have latent attention; in 2.5 they have states.
        full |= set(range(num_layers - num_layers % group_layers, num_layers))
        heads = (config.integer("num_attention_heads"), config.integer("head_dim"))
        parts = delta_rule_parts(
            options,
            keys=heads,
            values=heads,
            kernel=config.integer("short_conv_kernel_size", default=4),
            state_dtype="float32",
            is_per_channel=True,
        )
    else:
        # The norm after lightning attention works on groups, and a rank needs whole groups.
        options.shard("groups of group_norm_size", config.integer("group_norm_size", default=1))
        parts = [matrix_part(config, options)]
    return _beside_states(config, options, full, parts)


def _beside_states(
    config: Config, options: ReadOptions, full: Collection[int], parts: Sequence[StatePart]
) -> list[LayerType]:
    """Return the layer types of a model with latents in `full`, and states in all other layers."""
    indices = range(config.num_layers())
    latents = tuple(latent_layer(config, options, index) for index in indices if index in full)
    states = [index for index in indices if index not in full]
    types: list[LayerType] = []
    if latents:
        types.append(FullAttention(name="full", layers=latents))
    if states:
        types.append(state_type(states, parts, options))
    return types
