"""Readers of models whose layers are all attention over keys and values."""

from collections.abc import Callable, Sequence

from jenga.models.config import Config
from jenga.models.options import ReadOptions
from jenga.models.readers.layers import (
    Kind,
    attention_types,
    kv_slot_bytes,
    layer_kinds,
    layer_name,
    same_kinds,
    shared_sources,
    uniform_attention,
)
from jenga.spec import CrossAttention, FullAttention, Layer, LayerType

Reader = Callable[[Config, ReadOptions], list[LayerType]]
"""Function that turns the fields of a language model into its layer types."""

_GEMMA_3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_GEMMA_3N = {
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
}
_GEMMA_4 = {
    "num_attention_heads": 8,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "global_head_dim": 512,
}
_MISTRAL_WINDOW_TOKENS = 4096
_LLAMA_4_CHUNK_TOKENS = 8192
_MLLAMA_TOKENS_PER_IMAGE = 6193
"""Image tokens of a request on MMMU-Pro, from the Jenga paper."""


def _every(interval: int, num_layers: int, *, others: Kind) -> list[Kind]:
    """Give the last layer of every `interval` full attention, and the rest the kind `others`."""
    return [Kind.FULL if (i + 1) % interval == 0 else others for i in range(num_layers)]


def read_full(config: Config, options: ReadOptions) -> list[LayerType]:
    """Llama and similar models: all layers are alike, unless `layer_types` says otherwise."""
    kinds = same_kinds(config, config.num_layers())
    return attention_types(uniform_attention(config, options, kinds, window_field="sliding_window"))


def read_mistral(config: Config, options: ReadOptions) -> list[LayerType]:
    """Mistral and Ministral: a window in every layer, of 4096 tokens if the field is missing."""
    if not config.names("sliding_window"):
        config = config.with_defaults({"sliding_window": _MISTRAL_WINDOW_TOKENS})
    return read_full(config, options)


def read_qwen(config: Config, options: ReadOptions) -> list[LayerType]:
    """Qwen 2 and 3: full attention; layers from `max_window_layers` on may have a window.

    They have one only if `use_sliding_window` is true.
    """
    num_layers = config.num_layers()
    kinds = [Kind.FULL] * num_layers
    if config.flag("use_sliding_window", default=False):
        num_full = config.count("max_window_layers")
        kinds = [Kind.FULL if i < num_full else Kind.SLIDING for i in range(num_layers)]
        kinds = layer_kinds(config, num_layers, kinds)
    return attention_types(uniform_attention(config, options, kinds, window_field="sliding_window"))


def read_alternating(config: Config, options: ReadOptions) -> list[LayerType]:
    """Gemma 2 and gpt-oss: a window in every other layer, the first included."""
    num_layers = config.num_layers()
    kinds = layer_kinds(config, num_layers, _every(2, num_layers, others=Kind.SLIDING))
    return attention_types(uniform_attention(config, options, kinds, window_field="sliding_window"))


def read_every_fourth(config: Config, options: ReadOptions) -> list[LayerType]:
    """OLMo 3 and Trinity: full attention in every fourth layer, a window in the others."""
    num_layers = config.num_layers()
    interval = config.integer("sliding_window_pattern", default=4)
    kinds = layer_kinds(config, num_layers, _every(interval, num_layers, others=Kind.SLIDING))
    return attention_types(uniform_attention(config, options, kinds, window_field="sliding_window"))


def read_cohere2(config: Config, options: ReadOptions) -> list[LayerType]:
    """Command R7B and A: layers as in `read_every_fourth`.

    The configured window leaves out the query's own token, so one token is added here.
    """
    if (window_tokens := config.window()) is not None:
        config = config.with_values({"sliding_window": 1 + window_tokens})
    return read_every_fourth(config, options)


def read_exaone4(config: Config, options: ReadOptions) -> list[LayerType]:
    """EXAONE 4, Granite with windows, CWM and Mellum: kinds of layers from `layer_types`.

    If both `layer_types` and a window are missing, every layer has full attention.
    """
    num_layers = config.num_layers()
    default = None if "sliding_window" in config else [Kind.FULL] * num_layers
    kinds = layer_kinds(config, num_layers, default)
    return attention_types(uniform_attention(config, options, kinds, window_field="sliding_window"))


def read_gemma3(config: Config, options: ReadOptions) -> list[LayerType]:
    """Gemma 3: full attention in every sixth layer, a window in the others."""
    config = config.with_defaults(_GEMMA_3)
    num_layers = config.num_layers()
    interval = config.integer("sliding_window_pattern", default=6)
    kinds = layer_kinds(config, num_layers, _every(interval, num_layers, others=Kind.SLIDING))
    return attention_types(uniform_attention(config, options, kinds, window_field="sliding_window"))


def read_gemma3n(config: Config, options: ReadOptions) -> list[LayerType]:
    """Gemma 3n: full attention in every fifth layer; the last 15 read the KV of earlier layers."""
    config = config.with_defaults(_GEMMA_3N)
    num_layers = config.num_layers()
    kinds = layer_kinds(config, num_layers, _every(5, num_layers, others=Kind.SLIDING))
    return attention_types(
        uniform_attention(config, options, kinds, window_field="sliding_window"),
        sources=shared_sources(config, kinds, config.count("num_kv_shared_layers")),
    )


def read_gemma4(config: Config, options: ReadOptions) -> list[LayerType]:
    """Gemma 4: windows and shared KV as in Gemma 3n.

    Layers with full attention, every sixth and the last, have wider heads. The number of KV heads
    may differ too.
    """
    config = config.with_defaults(_GEMMA_4)
    num_layers = config.num_layers()
    kinds = layer_kinds(config, num_layers, _every(6, num_layers, others=Kind.SLIDING))
    kinds[-1] = Kind.FULL
    if any(kind not in {Kind.FULL, Kind.SLIDING} for kind in kinds):
        config.refuse("layer_types", "full_attention and sliding_attention only")
    wide = {"head_dim": config.integer("global_head_dim")}
    if config.flag("attention_k_eq_v", default=False):
        num_kv_heads = config.integer("num_key_value_heads")
        wide["num_key_value_heads"] = config.integer(
            "num_global_key_value_heads", default=num_kv_heads
        )
    full = {str(index): wide for index, kind in enumerate(kinds) if kind is Kind.FULL}
    # transformers saves this field. The configurations that Google published have the fields
    # above instead.
    config = config.with_defaults({"per_layer_config": full})
    return attention_types(
        uniform_attention(config, options, kinds, window_field="sliding_window"),
        sources=shared_sources(config, kinds, config.count("num_kv_shared_layers", default=0)),
    )


def read_mimo_v2(config: Config, options: ReadOptions) -> list[LayerType]:
    """MiMo-V2: values narrower than keys, and other heads in layers with a window.

    Published configurations have fields for the heads of layers with a window (`swa_*`). Those
    that transformers saves lack them. Such layers then have twice the KV heads of the others.
    """
    num_layers = config.num_layers()
    if "hybrid_layer_pattern" in config:
        pattern = config.layer_counts("hybrid_layer_pattern", num_layers=num_layers)
        if max(pattern) > 1:
            config.refuse("hybrid_layer_pattern", f"a list of {num_layers} of 0 and 1")
        kinds = [Kind.SLIDING if has_window else Kind.FULL for has_window in pattern]
    else:
        kinds = layer_kinds(config, num_layers, None)
    own = {
        name: config.integer(f"swa_{name}", default=default)
        for name, default in (
            ("num_attention_heads", config.integer("num_attention_heads")),
            ("num_key_value_heads", 2 * config.integer("num_key_value_heads")),
            ("head_dim", config.integer("head_dim")),
            ("v_head_dim", config.integer("v_head_dim")),
        )
    }
    if "sliding_window_size" in config:
        own["sliding_window"] = config.integer("sliding_window_size")
    with_window = {str(index): own for index, kind in enumerate(kinds) if kind is Kind.SLIDING}
    config = config.with_defaults({"per_layer_config": with_window})
    return attention_types(
        uniform_attention(
            config, options, kinds, window_field="sliding_window", value_field="v_head_dim"
        )
    )


def read_llama4(config: Config, options: ReadOptions) -> list[LayerType]:
    """Llama 4: chunked attention in layers with rotary positions, full attention in the others."""
    num_layers = config.num_layers()
    if config.has_list("no_rope_layers"):
        has_rope = config.layer_counts("no_rope_layers", num_layers=num_layers)
        default = [Kind.CHUNKED if rope else Kind.FULL for rope in has_rope]
    else:
        interval = config.integer("no_rope_layer_interval", default=4)
        default = _every(interval, num_layers, others=Kind.CHUNKED)
    if not config.names("attention_chunk_size"):
        config = config.with_values({"attention_chunk_size": _LLAMA_4_CHUNK_TOKENS})
    kinds = layer_kinds(config, num_layers, default)
    if config.window("attention_chunk_size") is None:
        kinds = [Kind.FULL] * num_layers
    return attention_types(
        uniform_attention(config, options, kinds, window_field="attention_chunk_size")
    )


def read_mllama(config: Config, options: ReadOptions) -> list[LayerType]:
    """Llama 3.2 Vision: the listed layers attend to the image instead of the text."""
    num_layers = config.num_layers()
    cross_layers = config.indices("cross_attention_layers", num_layers=num_layers)
    slot_bytes = kv_slot_bytes(config, options)
    return [
        FullAttention(
            name="full",
            layers=_named(sorted(set(range(num_layers)) - set(cross_layers)), slot_bytes),
        ),
        CrossAttention(
            name="cross",
            layers=_named(cross_layers, slot_bytes),
            typical_tokens=_MLLAMA_TOKENS_PER_IMAGE,
        ),
    ]


def read_whisper(config: Config, options: ReadOptions) -> list[LayerType]:
    """Whisper: every decoder layer attends to the text and to the audio."""
    num_layers = config.num_layers("decoder_layers")
    num_heads = config.integer("decoder_attention_heads")
    width = config.integer("d_model")
    if width % num_heads:
        config.refuse("d_model", f"a multiple of decoder_attention_heads ({num_heads})")
    options.shard("attention heads", num_heads)
    slot_bytes = options.kv_slot_bytes(num_heads, width // num_heads)
    return [
        FullAttention(name="full", layers=_named(range(num_layers), slot_bytes)),
        CrossAttention(
            name="cross",
            layers=_named(range(num_layers), slot_bytes),
            typical_tokens=config.integer("max_source_positions", default=1500),
        ),
    ]


def _named(indices: Sequence[int], slot_bytes: int) -> tuple[Layer, ...]:
    return tuple(Layer(name=layer_name(index), slot_bytes=slot_bytes) for index in indices)
