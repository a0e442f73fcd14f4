"""The bytes and tokens that each layer type of a model stores, and nothing else.

A *slot* is one token's place in a token type, or one whole state in a state type. Every layer type
is one flat frozen dataclass, and a model is a tuple of them. Nothing here knows pages, torch or
vLLM.

Multi-head latent attention needs no type of its own. A slot of `FullAttention` is then the latent
vector with its rotary part. An indexer that keeps its own keys is one more layer of that type.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from jenga.checks import check_count, check_positive

ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by dtype name as in torch and Hugging Face."""


def _check_distinct(owner: str, what: str, names: Sequence[str]) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        msg = f"{owner} has two {what} named {name!r}"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """One tensor of a recurrent layer's state.

    Attributes:
        name: Name of the part: "conv", "ssm", ...
        shape: Number of elements of each dimension on this rank.
        dtype: Element type, a key of `ELEMENT_BYTES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        owner = f"state part {self.name!r}"
        if not self.shape:
            msg = f"{owner}: shape must have at least one dimension"
            raise ValueError(msg)
        for elements in self.shape:
            check_positive(owner, "every dimension of shape", elements)
        if self.dtype not in ELEMENT_BYTES:
            msg = f"{owner}: dtype must be one of {sorted(ELEMENT_BYTES)}, got {self.dtype!r}"
            raise ValueError(msg)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The storage of one layer.

    Attributes:
        name: The layer's name in its model, unique within the layer type.
        slot_bytes: Bytes of one slot in this layer, on this rank: keys and values of one token,
            with their scales if these are stored inline, or one state.
        readers: Names of other layers that read these same bytes (KV sharing). They store nothing
            themselves.
        parts: Tensors of a state, in the order in which they are stored. Empty if a slot is one
            piece. Their bytes add up to `slot_bytes`.
    """

    name: str
    slot_bytes: int
    readers: tuple[str, ...] = ()
    parts: tuple[StatePart, ...] = ()

    def __post_init__(self) -> None:
        owner = f"layer {self.name!r}"
        check_positive(owner, "slot_bytes", self.slot_bytes)
        if self.readers:
            _check_distinct(owner, "readers", self.readers)
        if not self.parts:
            return
        _check_distinct(owner, "parts", [part.name for part in self.parts])
        parts_bytes = sum(part.num_bytes for part in self.parts)
        if parts_bytes != self.slot_bytes:
            msg = f"{owner}: slot_bytes must be the {parts_bytes} of its parts, {self.slot_bytes=}"
            raise ValueError(msg)


def _check_layers(name: str, layers: Sequence[Layer]) -> None:
    if not name:
        msg = "a layer type must have a name"
        raise ValueError(msg)
    if not layers:
        msg = f"layer type {name!r} must have at least one layer"
        raise ValueError(msg)
    names = [layer.name for layer in layers]
    readers = [reader for layer in layers for reader in layer.readers]
    _check_distinct(f"layer type {name!r}", "layers", names + readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Causal attention over the whole prefix. Every token is kept.

    Attributes:
        tokens_per_slot: Number of tokens that share one slot. It is above 1 if keys are compressed
            along the sequence.
        tokens_per_page: Page length that its kernel requires, a multiple of `tokens_per_slot`. None
            leaves the choice to the planner.
    """

    name: str
    layers: tuple[Layer, ...]
    tokens_per_slot: int = 1
    tokens_per_page: int | None = None

    def __post_init__(self) -> None:
        owner = f"layer type {self.name!r}"
        _check_layers(self.name, self.layers)
        check_positive(owner, "tokens_per_slot", self.tokens_per_slot)
        if self.tokens_per_page is None:
            return
        check_positive(owner, "tokens_per_page", self.tokens_per_page)
        if self.tokens_per_page % self.tokens_per_slot:
            msg = (
                f"{owner}: tokens_per_page must be a multiple of tokens_per_slot "
                f"({self.tokens_per_slot}), got {self.tokens_per_page}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Causal attention over a window.

    Attributes:
        window_tokens: Number of tokens that a query reads: its own and the `window_tokens - 1`
            before it.
        tokens_per_page: Page length that its kernel requires. Windows of a few tokens (those of
            DeepSeek-V4's compressors) would waste a page of 16. None leaves the choice to the
            planner.
    """

    name: str
    layers: tuple[Layer, ...]
    window_tokens: int
    tokens_per_page: int | None = None

    def __post_init__(self) -> None:
        owner = f"layer type {self.name!r}"
        _check_layers(self.name, self.layers)
        check_positive(owner, "window_tokens", self.window_tokens)
        if self.tokens_per_page is not None:
            check_positive(owner, "tokens_per_page", self.tokens_per_page)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal:
    """Causal attention within chunks of the sequence.

    Attributes:
        chunk_tokens: Number of tokens of a chunk. Token i is read by the tokens j >= i of its own
            chunk, `i // chunk_tokens`.
    """

    name: str
    layers: tuple[Layer, ...]
    chunk_tokens: int

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        check_positive(f"layer type {self.name!r}", "chunk_tokens", self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention:
    """Attention over an encoder's tokens. A slot belongs to a token of an image or of audio.

    Attributes:
        typical_tokens: Number of encoder tokens of a typical request. Only the planner's
            expectation reads it.
    """

    name: str
    layers: tuple[Layer, ...]
    typical_tokens: int = 1024

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        check_positive(f"layer type {self.name!r}", "typical_tokens", self.typical_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A recurrent layer's memory of fixed size, with one slot per request and layer.

    Attributes:
        layers: The layers. `slot_bytes` of a layer is one whole state, convolution and recurrent
            part together.
        draft_tokens: Number of tokens of a step that may be rejected. A request has as many further
            slots. The state after `n` tokens is in slot `n % slots_per_request`, so that the next
            step finds the state after the last accepted token.
    """

    name: str
    layers: tuple[Layer, ...]
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        check_count(f"layer type {self.name!r}: draft_tokens", self.draft_tokens)

    @property
    def slots_per_request(self) -> int:
        """Number of slots that a running request holds."""
        return 1 + self.draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Attention that keeps a number of prompt tokens, which falls from layer to layer.

    All tokens generated after the prompt are kept. Layers of one budget are one layer type.

    Attributes:
        mean_budget_tokens: Number of prompt tokens kept, averaged over the model's layers.
        recent_tokens: Number of last prompt tokens that every layer keeps. They are part of its
            budget.
        steepness: Divisor of the mean: the last layer keeps about `1 / steepness` of it.
        layer_index: Place of these layers among the model's layers, from 0.
        num_layers: Number of layers of the model that have a budget.

    Source: PyramidKV (arXiv 2406.02069), the arithmetic of its reference code.
    """

    name: str
    layers: tuple[Layer, ...]
    mean_budget_tokens: int
    recent_tokens: int
    steepness: int
    layer_index: int
    num_layers: int

    def __post_init__(self) -> None:
        owner = f"layer type {self.name!r}"
        _check_layers(self.name, self.layers)
        for field in ("mean_budget_tokens", "recent_tokens", "steepness", "num_layers"):
            check_positive(owner, field, getattr(self, field))
        if self.recent_tokens >= self.mean_budget_tokens:
            msg = (
                f"{owner}: recent_tokens must be below the mean_budget_tokens of "
                f"{self.mean_budget_tokens}, got {self.recent_tokens}"
            )
            raise ValueError(msg)
        check_count(f"{owner}: layer_index", self.layer_index)
        if self.layer_index >= self.num_layers:
            msg = f"{owner}: layer_index must be in [0, {self.num_layers}), got {self.layer_index}"
            raise ValueError(msg)

    def budget_tokens(self, prompt_tokens: int) -> int:
        """Return the number of prompt tokens that these layers keep."""
        if prompt_tokens <= self.mean_budget_tokens:
            return prompt_tokens
        chosen = self.mean_budget_tokens - self.recent_tokens
        least = chosen // self.steepness
        most = 2 * chosen - least
        if most >= prompt_tokens - self.recent_tokens:
            most = prompt_tokens - self.recent_tokens
            least = 2 * chosen - most
        step = (most - least) // max(1, self.num_layers - 1)
        return most - self.layer_index * step + self.recent_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEmbedding:
    """The vision encoder's output, kept until the language model has read it.

    Attributes:
        layers: One layer. Its `slot_bytes` is one token's embedding.
        host: Name of the `FullAttention` type in whose pages the embeddings live until the KV of
            the same tokens is written there (KV allocated in full before the first chunk). The
            embedding then has no pages of its own. None means own pages, freed as tokens are
            consumed (KV on demand).
        typical_tokens: Number of image tokens of a typical request. Only the planner's expectation
            reads it.

    Source: Jenga paper, section 6.2.
    """

    name: str
    layers: tuple[Layer, ...]
    host: str | None = None
    typical_tokens: int = 256

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        if len(self.layers) != 1:
            msg = f"layer type {self.name!r} must have one layer, got {len(self.layers)}"
            raise ValueError(msg)
        check_positive(f"layer type {self.name!r}", "typical_tokens", self.typical_tokens)


LayerType = (
    FullAttention
    | SlidingWindow
    | ChunkedLocal
    | CrossAttention
    | State
    | TokenBudget
    | ImageEmbedding
)
"""Any layer type that the package knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layer types of one model, or of several models that share an arena."""

    name: str
    layer_types: tuple[LayerType, ...]

    def __post_init__(self) -> None:
        if not self.layer_types:
            msg = f"model {self.name!r} must have at least one layer type"
            raise ValueError(msg)
        _check_distinct(
            f"model {self.name!r}", "layer types", [each.name for each in self.layer_types]
        )
        for layer_type in self.layer_types:
            if isinstance(layer_type, ImageEmbedding) and layer_type.host is not None:
                self._check_host(layer_type, layer_type.host)

    def _check_host(self, embedding: ImageEmbedding, host_name: str) -> None:
        owner = f"model {self.name!r}: layer type {embedding.name!r}"
        host = next((each for each in self.layer_types if each.name == host_name), None)
        if not isinstance(host, FullAttention) or host.tokens_per_slot != 1:
            msg = f"{owner}: host must name a full-attention layer type, got {host_name!r}"
            raise ValueError(msg)
        host_bytes = sum(layer.slot_bytes for layer in host.layers)
        needed_bytes = embedding.layers[0].slot_bytes
        if host_bytes < needed_bytes:
            msg = (
                f"{owner}: a slot of host {host_name!r} must hold the {needed_bytes} bytes of an "
                f"embedding, it has {host_bytes}"
            )
            raise ValueError(msg)


def combine(name: str, models: Iterable[ModelSpec]) -> ModelSpec:
    """Combine several models that share an arena: draft and target, or models served together.

    Args:
        name: Name of the combination.
        models: The models, with different names. Every layer type `t` of model `m` becomes `m/t`,
            and so does every layer and reader.

    Raises:
        ValueError: There is no model, or two have one name.
    """
    models = tuple(models)
    if not models:
        msg = f"model {name!r} must combine at least one model"
        raise ValueError(msg)
    _check_distinct(f"model {name!r}", "models", [model.name for model in models])
    return ModelSpec(
        name=name,
        layer_types=tuple(
            _prefixed(layer_type, model.name)
            for model in models
            for layer_type in model.layer_types
        ),
    )


def _prefixed(layer_type: LayerType, prefix: str) -> LayerType:
    layers = tuple(
        replace(
            layer,
            name=f"{prefix}/{layer.name}",
            readers=tuple(f"{prefix}/{reader}" for reader in layer.readers),
        )
        for layer in layer_type.layers
    )
    renamed = replace(layer_type, name=f"{prefix}/{layer_type.name}", layers=layers)
    if isinstance(renamed, ImageEmbedding) and renamed.host is not None:
        return replace(renamed, host=f"{prefix}/{renamed.host}")
    return renamed
