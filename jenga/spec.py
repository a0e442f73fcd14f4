"""What each layer type of a model stores: bytes and tokens, nothing else.

A *slot* is one token's place in a token type, or one whole state in a state type. Every layer type
is one flat frozen dataclass; a model is a tuple of them. Nothing here knows pages, torch or vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def _check_positive(owner: str, field: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        msg = f"{owner}: {field} must be a positive integer, got {value!r}"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's storage.

    Attributes:
        name: The layer's name in its model, unique within the layer type.
        slot_bytes: Bytes one slot takes in this layer (keys and values of one token, or one state).
        readers: Names of other layers that read these same bytes (KV sharing); they store nothing.
    """

    name: str
    slot_bytes: int
    readers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(f"layer {self.name!r}", "slot_bytes", self.slot_bytes)


def _check_layers(name: str, layers: Sequence[Layer]) -> None:
    if not name:
        msg = "a layer type must have a name"
        raise ValueError(msg)
    if not layers:
        msg = f"layer type {name!r} must have at least one layer"
        raise ValueError(msg)
    names = [layer.name for layer in layers]
    if len(set(names)) != len(names):
        duplicate = next(n for n in names if names.count(n) > 1)
        msg = f"layer type {name!r} has two layers named {duplicate!r}"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Causal attention over the whole prefix: every token is kept."""

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Causal attention over a window.

    Attributes:
        window_tokens: Tokens a query reads: itself and the `window_tokens - 1` before it.
    """

    name: str
    layers: tuple[Layer, ...]
    window_tokens: int

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        _check_positive(f"layer type {self.name!r}", "window_tokens", self.window_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A recurrent layer's memory of fixed size: one slot per request and layer.

    Attributes:
        layers: `slot_bytes` of a layer is one whole state, convolution and recurrent part together.
    """

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)


LayerType = FullAttention | SlidingWindow | State
"""Every layer type the package knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layer types of one model, or of several models that share an arena."""

    name: str
    layer_types: tuple[LayerType, ...]

    def __post_init__(self) -> None:
        if not self.layer_types:
            msg = f"model {self.name!r} must have at least one layer type"
            raise ValueError(msg)
        names = [layer_type.name for layer_type in self.layer_types]
        if len(set(names)) != len(names):
            duplicate = next(n for n in names if names.count(n) > 1)
            msg = f"model {self.name!r} has two layer types named {duplicate!r}"
            raise ValueError(msg)
