"""From a list of layers to layer types: what the readers of all architectures share."""

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
    SlidingWindow,
    State,
    StatePart,
)


class Kind(Enum):
    """What a layer of a hybrid model does with the past."""

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
"""Hugging Face's `layer_types`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One attention layer as a reader finds it.

    Attributes:
        index: Its place in the model.
        slot_bytes: Bytes of a token.
        window_tokens: Tokens a query reads, or of a chunk; None for all.
        is_chunked: Whether `window_tokens` are those of a chunk.
    """

    index: int
    slot_bytes: int
    window_tokens: int | None = None
    is_chunked: bool = False


def layer_name(index: int) -> str:
    """The name of a model's layer."""
    return f"layers.{index}"


def attention_types(
    layers: Iterable[AttentionLayer], *, sources: Mapping[int, int] | None = None
) -> list[LayerType]:
    """Layer types of attention layers: those that remember the same tokens are one type.

    Args:
        layers: In the order of the model.
        sources: Layer whose keys and values a layer reads instead of its own.
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
    """What each layer does: `layer_types`, or the architecture's rule where it is absent."""
    if not config.has_list("layer_types") and default is not None:
        return list(default)
    return config.kinds("layer_types", LAYER_KINDS, length=num_layers)


def same_kinds(config: Config, num_layers: int) -> list[Kind]:
    """What each layer does where `layer_types` may be absent and the model's code has no rule.

    vLLM then gives `sliding_window`, where there is one, to every layer. A window that no text is
    longer than is none.
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
    """Attention layers that have the same heads, but for what `per_layer_config` says of some.

    Args:
        config: The language model's fields.
        options: How it is run.
        kinds: What each layer does; layers without attention are skipped.
        window_field: Names the window, or the chunk, of the layers that have one.
        value_field: Names the elements of a head's value, where they are not those of its key.
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
    """Bytes of one token in one layer, from the usual names of the fields."""
    num_heads = config.integer("num_attention_heads")
    options.shard("attention heads", num_heads)
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    key_dim = head_dim(config)
    value_dim = key_dim if value_field is None else config.integer(value_field, default=key_dim)
    return options.kv_slot_bytes(num_kv_heads, key_dim, value_dim=value_dim)


def head_dim(config: Config) -> int:
    """Elements of an attention head."""
    if "head_dim" in config and not config.equals("head_dim", 0):
        return config.integer("head_dim")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    if hidden_size % num_heads:
        config.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    return hidden_size // num_heads


def shared_sources(config: Config, kinds: Sequence[Kind], num_shared_layers: int) -> dict[int, int]:
    """Sources where the last layers read the last layer of their kind that keeps its own."""
    num_own = len(kinds) - num_shared_layers
    sources: dict[int, int] = {}
    for index in range(num_own, len(kinds)):
        own = [i for i in range(num_own) if kinds[i] is kinds[index]]
        if not own:
            config.refuse("num_kv_shared_layers", "so few that every kind keeps a layer")
        sources[index] = own[-1]
    return sources


_COUNT_ELEMENTS = 4
"""Of 32 bits, in which a page says how many tokens are in its states."""

MAX_DELTA_HISTORY_TOKENS = 64
"""Most tokens of a gated delta layer's history, as in `jenga_kernels.checks.histories`."""

HISTORY = "history"
"""How the names of those parts of a state begin that are the inputs of its latest tokens."""


def state_type(indices: Iterable[int], parts: Sequence[StatePart], options: ReadOptions) -> State:
    """The layer type of recurrent layers that are all alike."""
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


def state_parts(
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


def history_parts(
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


def conv_taps(options: ReadOptions, kernel: int) -> int:
    """Columns of a convolution's state: those that drafted tokens may take are a part of each."""
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
    """The gated delta rule: a matrix per head of values.

    Args:
        options: How the model is run.
        keys: Number of heads, elements of a head; queries have as many.
        values: Number of heads, elements of a head.
        kernel: Taps of the convolution over queries, keys and values.
        state_dtype: The architecture's default for the recurrent state.
        is_per_channel: Whether every key channel decays on its own.

    Raises:
        ValueError: The history is longer than the kernels take, or heads cannot be divided.
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
    # A change is divided by its key's length: float16 may not hold it where it holds the state.
    change_dtype = "float32" if dtype == "float16" else dtype
    own_key_heads = options.shard("linear-attention key heads", num_key_heads)
    rows = {
        "changes": (own_heads, value_elements, change_dtype),
        "keys": (own_key_heads, key_elements, options.model_dtype),
    }
    num_decays = own_heads * (key_elements if is_per_channel else 1)
    return parts + history_parts(options, rows, ("decays", num_decays))


def matrix_part(config: Config, options: ReadOptions) -> StatePart:
    """Lightning attention: a matrix per head."""
    num_heads = options.shard("attention heads", config.integer("num_attention_heads"))
    elements = head_dim(config)
    return StatePart(
        name="recurrent",
        shape=(num_heads, elements, elements),
        dtype=options.state_dtype or options.model_dtype,
    )


def image_embedding(width: int, options: ReadOptions, *, typical_tokens: int) -> ImageEmbedding:
    """The layer type of a vision encoder's output, of so many elements a token."""
    layer = Layer(name="vision_encoder", slot_bytes=width * options.element_bytes)
    return ImageEmbedding(
        name="image",
        layers=(layer,),
        host="full" if options.embeddings_in_kv_pages else None,
        typical_tokens=typical_tokens,
    )
