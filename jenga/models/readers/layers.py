"""Functions that all readers share: they turn a list of layers into layer types."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from jenga.models.config import Config
from jenga.models.options import ReadOptions
from jenga.spec import (
    ChunkedLocal,
    FullAttention,
    ImageEmbedding,
    Layer,
    LayerType,
    ModelSpec,
    SlidingWindow,
    State,
    StatePart,
)


class Kind(Enum):
    """How a layer of a hybrid model stores past tokens."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"
    NOTHING = "nothing"


LAYER_KINDS = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "chunked_attention": Kind.CHUNKED,
    "linear_attention": Kind.STATE,
    "mamba": Kind.STATE,
    "mamba2": Kind.STATE,
    "moe": Kind.NOTHING,
    "mlp": Kind.NOTHING,
}
"""Values in the list `layer_types` of Hugging Face -> kind of layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One attention layer, as a reader finds it.

    Attributes:
        index: Place in the model, from 0.
        slot_bytes: Bytes of one token's keys and values.
        window_tokens: Tokens of a window or of a chunk; None for full attention.
        is_chunked: Whether `window_tokens` is the length of a chunk.
    """

    index: int
    slot_bytes: int
    window_tokens: int | None = None
    is_chunked: bool = False


def layer_name(index: int) -> str:
    """Return the name of a model's layer."""
    return f"layers.{index}"


def attention_types(
    layers: Iterable[AttentionLayer], *, sources: Mapping[int, int] | None = None
) -> list[LayerType]:
    """Group attention layers into layer types: layers that keep the same tokens are one type.

    Args:
        layers: Attention layers in the order of the model.
        sources: Index of a layer without keys and values of its own -> index of the layer whose
            keys and values it reads.
    """
    sources = sources or {}
    readers: dict[int, list[str]] = {}
    for reader, source in sources.items():
        readers.setdefault(source, []).append(layer_name(reader))
    groups: dict[tuple[bool, int | None], list[Layer]] = {}
    for layer in layers:
        if layer.index not in sources:
            groups.setdefault((layer.is_chunked, layer.window_tokens), []).append(
                Layer(
                    name=layer_name(layer.index),
                    slot_bytes=layer.slot_bytes,
                    readers=tuple(readers.get(layer.index, ())),
                )
            )
    num_windows = sum(window is not None for _, window in groups)
    types: list[LayerType] = []
    for (is_chunked, window_tokens), members in sorted(
        groups.items(), key=lambda item: (item[0][1] is not None, item[0][1] or 0)
    ):
        suffix = "" if num_windows <= 1 else f"_{window_tokens}"
        if window_tokens is None:
            types.append(FullAttention(name="full", layers=tuple(members)))
        elif is_chunked:
            name = f"chunked{suffix}"
            types.append(ChunkedLocal(name=name, layers=tuple(members), chunk_tokens=window_tokens))
        else:
            name = f"sliding{suffix}"
            types.append(
                SlidingWindow(name=name, layers=tuple(members), window_tokens=window_tokens)
            )
    return types


def layer_kinds(config: Config, num_layers: int, default: Sequence[Kind] | None) -> list[Kind]:
    """Return the kind of each layer: from `layer_types`, or `default` if that field is absent."""
    if not config.has_list("layer_types") and default is not None:
        return list(default)
    return config.kinds("layer_types", LAYER_KINDS, length=num_layers)


def same_kinds(config: Config, num_layers: int) -> list[Kind]:
    """Return the kind of each layer of a model whose code has no rule of its own.

    If `layer_types` is absent, every layer has the window of `sliding_window`, as in vLLM. A window
    that is at least as long as the longest text counts as full attention.
    """
    window_tokens, context_tokens = config.window(), config.context_tokens()
    is_cut = window_tokens is not None and (
        context_tokens is None or window_tokens < context_tokens
    )
    return layer_kinds(config, num_layers, [Kind.SLIDING if is_cut else Kind.FULL] * num_layers)


def uniform_attention(
    config: Config,
    options: ReadOptions,
    kinds: Sequence[Kind],
    *,
    window_field: str | None = None,
    value_field: str | None = None,
) -> list[AttentionLayer]:
    """Return attention layers that have the same heads, except as `per_layer_config` says.

    Args:
        config: The language model's fields.
        options: How the model is run.
        kinds: Kind of each layer; layers without attention are skipped.
        window_field: Name of the field with the length of a window or a chunk. None for a model
            without such layers. A length of 0 means full attention.
        value_field: Name of the field with the elements of a head's value. None means that a
            value has as many elements as a key.
    """
    layers: list[AttentionLayer] = []
    for index, kind in enumerate(kinds):
        own = config.of_layer(index)
        slot_bytes = kv_slot_bytes(own, options, value_field=value_field)
        is_windowless = window_field is not None and own.equals(window_field, 0)
        if kind is Kind.FULL or (kind in {Kind.SLIDING, Kind.CHUNKED} and is_windowless):
            layers.append(AttentionLayer(index=index, slot_bytes=slot_bytes))
        elif kind in {Kind.SLIDING, Kind.CHUNKED}:
            if window_field is None:
                config.refuse("layer_types", "free of layers with a window")
            layers.append(
                AttentionLayer(
                    index=index,
                    slot_bytes=slot_bytes,
                    window_tokens=own.integer(window_field),
                    is_chunked=kind is Kind.CHUNKED,
                )
            )
    return layers


def kv_slot_bytes(config: Config, options: ReadOptions, *, value_field: str | None = None) -> int:
    """Bytes of one token's keys and values in one layer, from fields with the usual names."""
    num_heads = config.integer("num_attention_heads")
    options.shard("attention heads", num_heads)
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    key_dim = head_dim(config)
    value_dim = key_dim if value_field is None else config.integer(value_field, default=key_dim)
    return options.kv_slot_bytes(num_kv_heads, key_dim, value_dim=value_dim)


def head_dim(config: Config) -> int:
    """Elements of an attention head: `head_dim`, or the hidden size divided by the heads."""
    if "head_dim" in config and not config.equals("head_dim", 0):
        return config.integer("head_dim")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    if hidden_size % num_heads:
        config.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    return hidden_size // num_heads


def shared_sources(config: Config, kinds: Sequence[Kind], num_shared_layers: int) -> dict[int, int]:
    """Return `sources` of `attention_types` for a model whose last layers store no keys and values.

    Each of them reads the last layer of its kind that stores its own.
    """
    num_own = len(kinds) - num_shared_layers
    sources: dict[int, int] = {}
    for index in range(num_own, len(kinds)):
        own = [i for i in range(num_own) if kinds[i] is kinds[index]]
        if not own:
            config.refuse("num_kv_shared_layers", "so few that every kind keeps a layer")
        sources[index] = own[-1]
    return sources


_COUNT_ELEMENTS = 4
"""Number of 32-bit elements of a slot that say how many tokens its state includes."""

MAX_DELTA_HISTORY_TOKENS = 64
"""Maximum tokens of a gated delta layer's history, as in `jenga_kernels.checks.histories`."""

HISTORY = "history"
"""First word in the names of the state parts that store a history: inputs of recent tokens."""


def state_type(indices: Iterable[int], parts: Sequence[StatePart], options: ReadOptions) -> State:
    """Return the layer type of recurrent layers that are all alike."""
    slot_bytes = sum(part.num_bytes for part in parts)
    has_history = any(part.name.startswith(HISTORY) for part in parts)
    return State(
        name="state",
        layers=tuple(
            Layer(name=layer_name(index), slot_bytes=slot_bytes, parts=tuple(parts))
            for index in indices
        ),
        draft_tokens=0 if has_history else options.draft_tokens,
    )


def keeps_history(model: ModelSpec) -> bool:
    """Whether a layer of a model keeps a history beside its state."""
    return any(
        part.name.startswith(HISTORY)
        for each in model.layer_types
        for layer in each.layers
        for part in layer.parts or ()
    )


def state_parts(
    options: ReadOptions,
    *,
    conv: tuple[int, int],
    recurrent: tuple[int, ...],
    state_dtype: str | None = None,
) -> list[StatePart]:
    """Return the convolution state [channels, taps] and the recurrent state of one layer.

    Args:
        options: How the model is run. Its `state_dtype` overrides the one below.
        conv: Shape of the convolution state.
        recurrent: Shape of the recurrent state.
        state_dtype: The architecture's default for the recurrent state; None takes the model's.
    """
    dtype = options.state_dtype or state_dtype or options.model_dtype
    return [
        StatePart(name="conv", shape=conv, dtype=options.model_dtype),
        StatePart(name="recurrent", shape=recurrent, dtype=dtype),
    ]


def history_parts(
    options: ReadOptions, rows: Mapping[str, tuple[int, int, str]], numbers: tuple[str, int]
) -> list[StatePart]:
    """Return the state parts of a history: the inputs of recent tokens, and their number.

    There are none if every step writes the state (`options.history_tokens` is 0).

    Args:
        options: How the model is run.
        rows: Name of a vector that each token leaves -> its heads, elements of a head, and dtype.
        numbers: Name of further float32 numbers that each token leaves, and their count.
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


def conv_taps(options: ReadOptions, kernel: int) -> int:
    """Columns of a convolution's state: one less than the kernel, and one per drafted token."""
    return kernel - 1 + options.draft_tokens


def delta_rule_parts(
    options: ReadOptions,
    *,
    keys: tuple[int, int],
    values: tuple[int, int],
    kernel: int,
    state_dtype: str,
    is_per_channel: bool,
) -> list[StatePart]:
    """Return the state parts of a gated delta layer, whose state is a matrix per value head.

    Args:
        options: How the model is run.
        keys: Number of key heads, and elements of a head. Queries have as many.
        values: Number of value heads, and elements of a head.
        kernel: Taps of the convolution over queries, keys and values.
        state_dtype: The architecture's default for the recurrent state.
        is_per_channel: Whether every key channel has a decay of its own, instead of every head.

    Raises:
        ValueError: The history is longer than the kernels take, or the ranks do not divide the
            heads or channels.
    """
    if options.history_tokens > MAX_DELTA_HISTORY_TOKENS:
        msg = (
            f"options: history_tokens must be at most {MAX_DELTA_HISTORY_TOKENS} for models of "
            f"gated delta layers, got {options.history_tokens}"
        )
        raise ValueError(msg)
    (num_key_heads, key_elements), (num_value_heads, value_elements) = keys, values
    channels = 2 * num_key_heads * key_elements + num_value_heads * value_elements
    own_heads = options.shard("linear-attention heads", num_value_heads)
    parts = state_parts(
        options,
        conv=(options.shard("convolution channels", channels), conv_taps(options, kernel)),
        recurrent=(own_heads, value_elements, key_elements),
        state_dtype=state_dtype,
    )
    dtype = options.state_dtype or state_dtype
    # A change is divided by the length of its key. It may overflow float16 even if the state fits.
    change_dtype = "float32" if dtype == "float16" else dtype
    own_key_heads = options.shard("linear-attention key heads", num_key_heads)
    rows = {
        "changes": (own_heads, value_elements, change_dtype),
        "keys": (own_key_heads, key_elements, options.model_dtype),
    }
    num_decays = own_heads * (key_elements if is_per_channel else 1)
    return parts + history_parts(options, rows, ("decays", num_decays))


def matrix_part(config: Config, options: ReadOptions) -> StatePart:
    """Return the state part of lightning attention: a matrix per head."""
    num_heads = options.shard("attention heads", config.integer("num_attention_heads"))
    elements = head_dim(config)
    return StatePart(
        name="recurrent",
        shape=(num_heads, elements, elements),
        dtype=options.state_dtype or options.model_dtype,
    )


def image_embedding(width: int, options: ReadOptions, *, typical_tokens: int) -> ImageEmbedding:
    """Return the layer type of a vision encoder's output.

    Args:
        width: Elements of one token's embedding.
        options: How the model is run.
        typical_tokens: Image tokens of one request; only the planner's expectation reads it.
    """
    layer = Layer(name="vision_encoder", slot_bytes=width * options.element_bytes)
    return ImageEmbedding(
        name="image",
        layers=(layer,),
        typical_tokens=typical_tokens,
    )
