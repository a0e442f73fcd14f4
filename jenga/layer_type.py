"""The storage of layers, and the questions that every layer type answers.

A *slot* is one token's place in a token type, or one whole state in a state type. The types that
the package has are in `jenga.spec`. `jenga.registration` takes further ones.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import Field, dataclass
from math import prod
from typing import Any, ClassVar

from jenga.checks import check_positive
from jenga.policies import NEVER, LayerPolicy, RequestFacts

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


def check_distinct(owner: str, what: str, names: Sequence[str]) -> None:
    """Refuse two equal names.

    Raises:
        ValueError: Two are equal. The message names them.
    """
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
            check_distinct(owner, "readers", self.readers)
        if not self.parts:
            return
        check_distinct(owner, "parts", [part.name for part in self.parts])
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
    check_distinct(f"layer type {name!r}", "layers", names + readers)


_FACTS = RequestFacts()
"""Facts of a request without images."""


class LayerType(ABC):
    """Layers that store the same kind of slots, and what a request does with them.

    Every layer type is one flat frozen dataclass with the fields `name` and `layers` and its own:
    `@dataclass(frozen=True, slots=True, kw_only=True)`. The memory manager, the planner, plans and
    replays ask it the questions below, and nothing else. Most have a default answer.

    Attributes:
        name: Name of the type in its model, unique there.
        layers: The layers, at least one.
        kind: Name of the kind of layers in plans, such as "sliding window".
        tokens_per_slot: Number of tokens that share one slot.
        tokens_per_page: Page length that the type requires. None leaves the choice to the planner.
        typical_tokens: Number of encoder tokens of a typical request, if slots belong to images or
            audio. Only expectations read it. 0 if slots belong to the request's own tokens.
        host: Name of the layer type in whose pages the slots live. None means own pages.
        holds_images: Whether the embedding of an image's token lives in the token's slot until its
            keys and values are written there.
        is_state: Whether a slot is one state on a page of its own, whatever the number of tokens.
        is_consumed: Whether slots are given up once the prompt is read. A decoding request then
            holds none.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    name: str
    layers: tuple[Layer, ...]

    kind: str
    tokens_per_slot: int = 1
    tokens_per_page: int | None = None
    typical_tokens: int = 0
    host: str | None = None
    holds_images: bool = False
    is_state: bool = False
    is_consumed: bool = False

    def __post_init__(self) -> None:
        """Refuse fields that no layer type may have, then those that this one may not have."""
        _check_layers(self.name, self.layers)
        self.check_fields()

    def check_fields(self) -> None:
        """Refuse values of the type's own fields that are out of their range.

        Raises:
            ValueError: A value is. The message names the field and the value.
        """
        return

    @abstractmethod
    def policy(self, page_slots: int, /) -> LayerPolicy:
        """Return which slots requests touch, and which prefixes can be hit.

        Args:
            page_slots: Number of tokens of a small page.
        """

    @property
    @abstractmethod
    def keeps(self) -> str:
        """Description of what the type keeps of a request: "a window of 4,096 tokens"."""

    def needed_slots(self, num_tokens: int, /) -> range:
        """Return the slots, in tokens, that the last of `num_tokens` tokens reads or writes.

        This is an expectation for a typical request. The default asks the policy.
        """
        return self.policy(1).update_last_access(_FACTS, num_tokens - 1, num_tokens)

    @property
    def most_read_tokens(self) -> int:
        """Most tokens that one query reads. `jenga.policies.NEVER` or more if it reads all."""
        return self.policy(1).peak_slots(_FACTS, NEVER, 1)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(layer.slot_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in all layers, or of one state."""
        return self.slot_bytes / self.tokens_per_slot

    @property
    def has_pages(self) -> bool:
        """Whether the type has small pages of its own, and does not use those of a host."""
        return self.host is None

    @property
    def is_packed(self) -> bool:
        """Whether small pages of this type never reserve a large page for one request.

        A state is one page, and an image's embeddings come and go together.
        """
        return self.is_state or self.is_consumed

    @property
    def keeps_encoder_tokens(self) -> bool:
        """Whether a decoding request still reads what an encoder made, as in cross attention."""
        return self.typical_tokens > 0 and not self.is_consumed


_layer_types: dict[str, type[LayerType]] = {}


def register(layer_type: type[LayerType]) -> None:
    """Add a layer type whose policy was tried.

    Raises:
        ValueError: A layer type of this name is registered.
    """
    name = layer_type.__name__
    if name in _layer_types:
        msg = (
            f"layer type {name!r} is registered twice, by {_layer_types[name].__module__!r} and by "
            f"{layer_type.__module__!r}; each must have a name of its own and be registered once"
        )
        raise ValueError(msg)
    _layer_types[name] = layer_type


def layer_type_named(name: str) -> type[LayerType]:
    """Return the registered layer type with a class name.

    Raises:
        ValueError: None has this name.
    """
    if name not in _layer_types:
        msg = (
            f"layer type {name!r} must be registered in this process with "
            f"jenga.register_layer_type; registered are {', '.join(_layer_types)}"
        )
        raise ValueError(msg)
    return _layer_types[name]


def check_registered(layer_type: LayerType) -> None:
    """Refuse a layer type whose class is not registered.

    Raises:
        ValueError: Its class is not registered, or another class of that name is.
    """
    found = layer_type_named(type(layer_type).__name__)
    if found is not type(layer_type):
        msg = (
            f"layer type {layer_type.name!r} must be of the registered class {found!r}, got "
            f"{type(layer_type)!r}"
        )
        raise ValueError(msg)
