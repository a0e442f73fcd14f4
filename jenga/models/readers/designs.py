"""Readers of published designs that have no published configuration; field names are our own."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jenga.models.config import Config
from jenga.models.options import ReadOptions
from jenga.models.readers.layers import (
    AttentionLayer,
    Kind,
    attention_types,
    head_dim,
    kv_slot_bytes,
    layer_name,
)
from jenga.spec import Layer, LayerType, TokenBudget

_SHARED_KINDS = {"full_attention": Kind.FULL, "sliding_attention": Kind.SLIDING}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayers:
    """The windows and the shared keys and values of a model's layers.

    Attributes:
        window_tokens: For each layer, tokens of its window; None means full attention.
        sources: Index of a layer without keys and values of its own -> index of the layer whose
            keys and values it reads.
    """

    window_tokens: tuple[int | None, ...]
    sources: Mapping[int, int]


def shared_layers(config: Config) -> SharedLayers:
    """Read what each layer does, from `layer_types`, `sliding_window` and `kv_sharing`.

    All layers have the same heads. So a layer can read the keys and values of any earlier layer
    that keeps the same tokens.

    Raises:
        ValueError: A field is missing or wrong, or a layer names one that it cannot read.
    """
    if "per_layer_config" in config:
        config.refuse("per_layer_config", "absent, because all layers have the same heads")
    kinds = config.kinds("layer_types", _SHARED_KINDS, length=config.num_layers())
    window_tokens = config.integer("sliding_window") if Kind.SLIDING in kinds else None
    windows = tuple(window_tokens if kind is Kind.SLIDING else None for kind in kinds)
    sources: dict[int, int] = {}
    targets = config.section("kv_sharing").as_dict() if "kv_sharing" in config else {}
    for reader, target in targets.items():
        number = str(reader)
        if not number.isdecimal() or not int(number) < len(windows):
            config.refuse("kv_sharing", f"an object whose names are layers below {len(windows)}")
        sources[int(number)] = _source(config, int(number), target, windows)
    for reader, source in sources.items():
        if source in sources:
            keeper = sources[source]
            expected = f"a layer with its own keys and values, as {source} reads those of {keeper}"
            raise _wrong_source(config, reader, expected, source)
    return SharedLayers(window_tokens=windows, sources=MappingProxyType(sources))


def _source(config: Config, reader: int, target: object, windows: tuple[int | None, ...]) -> int:
    """Check that a layer can read the keys and values of another, and return that layer."""
    if not isinstance(target, int) or isinstance(target, bool) or not 0 <= target < len(windows):
        raise _wrong_source(config, reader, f"a layer below {len(windows)}", target)
    if target >= reader:
        raise _wrong_source(config, reader, f"an earlier layer than {reader}", target)
    if windows[target] != windows[reader]:
        own, other = (
            "full attention" if window is None else f"a window of {window} tokens"
            for window in (windows[reader], windows[target])
        )
        expected = f"a layer with {own} as {reader}"
        raise _wrong_source(config, reader, expected, f"{target} with {other}")
    return target


def _wrong_source(config: Config, reader: int, expected: str, target: object) -> ValueError:
    msg = f"{config.source}: field 'kv_sharing[{reader}]' must be {expected}, got {target}"
    return ValueError(msg)


def read_character_llama(config: Config, options: ReadOptions) -> list[LayerType]:
    """The same design as `jenga.vllm_plugin.models.character_llama` serves it."""
    layers = shared_layers(config)
    slot_bytes = kv_slot_bytes(config, options)
    return attention_types(
        [
            AttentionLayer(index=index, slot_bytes=slot_bytes, window_tokens=window_tokens)
            for index, window_tokens in enumerate(layers.window_tokens)
        ],
        sources=layers.sources,
    )


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
