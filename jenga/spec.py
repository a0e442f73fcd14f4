"""The layer types of the package, and models made of them.

Every layer type is one flat frozen dataclass, and a model is a tuple of them. Nothing here knows
torch or vLLM.

Multi-head latent attention needs no type of its own. A slot of `FullAttention` is then the latent
vector with its rotary part. An indexer that keeps its own keys is one more layer of that type.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jenga.checks import check_count, check_positive
from jenga.layer_type import (
    ELEMENT_BYTES,
    Layer,
    LayerType,
    StatePart,
    check_distinct,
    check_registered,
    register,
)
from jenga.policies import LayerPolicy
from jenga.policies.chunked_local import ChunkedLocalPolicy
from jenga.policies.cross_attention import CrossAttentionPolicy
from jenga.policies.full_attention import FullAttentionPolicy, ImageHostPolicy
from jenga.policies.image_embedding import ImageEmbeddingPolicy
from jenga.policies.sliding_window import SlidingWindowPolicy
from jenga.policies.state import StatePolicy
from jenga.policies.token_budget import TokenBudgetPolicy

__all__ = [
    "ELEMENT_BYTES",
    "ChunkedLocal",
    "CrossAttention",
    "FullAttention",
    "ImageEmbedding",
    "Layer",
    "LayerType",
    "ModelSpec",
    "SlidingWindow",
    "State",
    "StatePart",
    "TokenBudget",
    "combine",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(LayerType):
    """Causal attention over the whole prefix. Every token is kept.

    Attributes:
        tokens_per_slot: Number of tokens that share one slot. It is above 1 if keys are compressed
            along the sequence.
        tokens_per_page: Page length that its kernel requires, a multiple of `tokens_per_slot`. None
            leaves the choice to the planner.
        holds_images: Whether embeddings of images live in its slots until keys and values are
            written there. A request then gets the slots of a whole image in the step that begins
            it. An `ImageEmbedding` must name this type as its host.
    """

    name: str
    layers: tuple[Layer, ...]
    tokens_per_slot: int = 1
    tokens_per_page: int | None = None
    holds_images: bool = False

    kind = "full attention"

    def check_fields(self) -> None:
        """Refuse values that are out of their range; see `LayerType`."""
        owner = f"layer type {self.name!r}"
        check_positive(owner, "tokens_per_slot", self.tokens_per_slot)
        if self.holds_images and self.tokens_per_slot != 1:
            msg = (
                f"{owner}: tokens_per_slot must be 1 where images live in the slots of their "
                f"tokens, got {self.tokens_per_slot}"
            )
            raise ValueError(msg)
        if self.tokens_per_page is None:
            return
        check_positive(owner, "tokens_per_page", self.tokens_per_page)
        if self.tokens_per_page % self.tokens_per_slot:
            msg = (
                f"{owner}: tokens_per_page must be a multiple of tokens_per_slot "
                f"({self.tokens_per_slot}), got {self.tokens_per_page}"
            )
            raise ValueError(msg)

    def policy(self, _page_slots: int, /) -> LayerPolicy:
        """Return the policy that keeps every token."""
        return ImageHostPolicy() if self.holds_images else FullAttentionPolicy()

    @property
    def keeps(self) -> str:
        """Description of what the type keeps."""
        if self.tokens_per_slot == 1:
            return "every token"
        return f"one slot for {self.tokens_per_slot} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(LayerType):
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

    kind = "sliding window"

    def check_fields(self) -> None:
        """Refuse values that are out of their range; see `LayerType`."""
        owner = f"layer type {self.name!r}"
        check_positive(owner, "window_tokens", self.window_tokens)
        if self.tokens_per_page is not None:
            check_positive(owner, "tokens_per_page", self.tokens_per_page)

    def policy(self, _page_slots: int, /) -> LayerPolicy:
        """Return the policy that keeps a window."""
        return SlidingWindowPolicy(self.window_tokens)

    @property
    def keeps(self) -> str:
        """Description of what the type keeps."""
        return f"a window of {self.window_tokens:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal(LayerType):
    """Causal attention within chunks of the sequence.

    Attributes:
        chunk_tokens: Number of tokens of a chunk. Token i is read by the tokens j >= i of its own
            chunk, `i // chunk_tokens`.
    """

    name: str
    layers: tuple[Layer, ...]
    chunk_tokens: int

    kind = "chunked local"

    def check_fields(self) -> None:
        """Refuse values that are out of their range; see `LayerType`."""
        check_positive(f"layer type {self.name!r}", "chunk_tokens", self.chunk_tokens)

    def policy(self, _page_slots: int, /) -> LayerPolicy:
        """Return the policy that keeps a chunk."""
        return ChunkedLocalPolicy(self.chunk_tokens)

    @property
    def keeps(self) -> str:
        """Description of what the type keeps."""
        return f"the current chunk of {self.chunk_tokens:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(LayerType):
    """Attention over an encoder's tokens. A slot belongs to a token of an image or of audio.

    Attributes:
        typical_tokens: Number of encoder tokens of a typical request. Only the planner's
            expectation reads it.
    """

    name: str
    layers: tuple[Layer, ...]
    typical_tokens: int = 1024

    kind = "cross attention"

    def check_fields(self) -> None:
        """Refuse values that are out of their range; see `LayerType`."""
        check_positive(f"layer type {self.name!r}", "typical_tokens", self.typical_tokens)

    def policy(self, page_slots: int, /) -> LayerPolicy:
        """Return the policy that keeps every image."""
        return CrossAttentionPolicy(page_slots)

    @property
    def keeps(self) -> str:
        """Description of what the type keeps."""
        return f"tokens of images or audio ({self.typical_tokens:,})"

    def needed_slots(self, _num_tokens: int, /) -> range:
        """Return the slots of the encoder's tokens in a typical request."""
        return range(self.typical_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class State(LayerType):
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

    kind = "state"
    tokens_per_page = 1
    is_state = True

    def check_fields(self) -> None:
        """Refuse values that are out of their range; see `LayerType`."""
        check_count(f"layer type {self.name!r}: draft_tokens", self.draft_tokens)

    def policy(self, _page_slots: int, /) -> LayerPolicy:
        """Return the policy that keeps the running state."""
        return StatePolicy(num_slots=self.slots_per_request)

    @property
    def keeps(self) -> str:
        """Description of what the type keeps."""
        slots = self.slots_per_request
        return "one state" if slots == 1 else f"{slots} states, for drafted tokens"

    @property
    def slots_per_request(self) -> int:
        """Number of slots that a running request holds."""
        return 1 + self.draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget(LayerType):
    """Attention that keeps a number of prompt tokens, which falls from layer to layer.

    Layers of one budget are one layer type. With a steepness of 1, every layer keeps
    `mean_budget_tokens` of a longer prompt. Whole pages are dropped, so up to a page less one slot
    fewer may stay. Tokens generated after the prompt are all kept, unless `output_tokens` is given.
    Then the layer drops tokens again whenever so many have been added, prompt tokens and others.

    Attributes:
        mean_budget_tokens: Number of prompt tokens kept, averaged over the model's layers.
        recent_tokens: Number of last prompt tokens that every layer keeps. They are part of its
            budget.
        steepness: Divisor of the mean: the last layer keeps about `1 / steepness` of it.
        layer_index: Place of these layers among the model's layers, from 0.
        num_layers: Number of layers of the model that have a budget.
        output_tokens: Number of tokens after the prompt, and after each later choice, at which the
            layer chooses again. None means that it chooses at the end of the prompt only.

    Source: PyramidKV (arXiv 2406.02069), the arithmetic of its reference code. It chooses at the
    end of the prompt only.
    """

    name: str
    layers: tuple[Layer, ...]
    mean_budget_tokens: int
    recent_tokens: int
    steepness: int
    layer_index: int
    num_layers: int
    output_tokens: int | None = None

    kind = "token budget"

    def check_fields(self) -> None:
        """Refuse values that are out of their range; see `LayerType`."""
        owner = f"layer type {self.name!r}"
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
        if self.output_tokens is None:
            return
        check_positive(owner, "output_tokens", self.output_tokens)
        if self.output_tokens < self.recent_tokens:
            msg = (
                f"{owner}: output_tokens must be at least the {self.recent_tokens} recent_tokens, "
                f"got {self.output_tokens}"
            )
            raise ValueError(msg)
        if self.steepness != 1:
            msg = (
                f"{owner}: output_tokens must be None unless steepness is 1, got "
                f"{self.output_tokens} and {self.steepness}"
            )
            raise ValueError(msg)

    def policy(self, page_slots: int, /) -> LayerPolicy:
        """Return the policy that keeps the budget once the prompt is processed."""
        return TokenBudgetPolicy(self.budget_tokens, page_slots, self.output_tokens)

    @property
    def keeps(self) -> str:
        """Description of what the type keeps."""
        if self.output_tokens is None:
            return f"about {self.mean_budget_tokens:,} tokens of a prompt"
        return f"about {self.mean_budget_tokens:,} tokens, and {self.output_tokens:,} more at most"

    def needed_slots(self, num_tokens: int, /) -> range:
        """Return the slots of the budget, as if all tokens were tokens of the prompt."""
        return range(self.budget_tokens(num_tokens))

    @property
    def most_read_tokens(self) -> int:
        """The budget, averaged over the model's layers, and the tokens added until a choice."""
        return self.mean_budget_tokens + (self.output_tokens or 0)

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
class ImageEmbedding(LayerType):
    """The vision encoder's output, kept until the language model has read it.

    Attributes:
        layers: One layer. Its `slot_bytes` is one token's embedding.
        host: Name of the `FullAttention` type in whose pages the embeddings live until the KV of
            the same tokens is written there. It must have `holds_images` set. The embedding then
            has no pages of its own. None means own pages, freed as tokens are consumed.
        typical_tokens: Number of image tokens of a typical request. Only the planner's expectation
            reads it.

    Source: Jenga paper, section 6.2.
    """

    name: str
    layers: tuple[Layer, ...]
    host: str | None = None
    typical_tokens: int = 256

    kind = "images"
    is_consumed = True

    def check_fields(self) -> None:
        """Refuse values that are out of their range; see `LayerType`."""
        if len(self.layers) != 1:
            msg = f"layer type {self.name!r} must have one layer, got {len(self.layers)}"
            raise ValueError(msg)
        check_positive(f"layer type {self.name!r}", "typical_tokens", self.typical_tokens)

    def policy(self, page_slots: int, /) -> LayerPolicy:
        """Return the policy that keeps embeddings until they are read."""
        return ImageEmbeddingPolicy(page_slots)

    @property
    def keeps(self) -> str:
        """Description of what the type keeps."""
        return f"an image until it is read ({self.typical_tokens:,})"

    def needed_slots(self, _num_tokens: int, /) -> range:
        """Return the slots of a typical image, at its peak."""
        return range(self.typical_tokens)


for _layer_type in (
    FullAttention,
    SlidingWindow,
    ChunkedLocal,
    CrossAttention,
    State,
    TokenBudget,
    ImageEmbedding,
):
    register(_layer_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layer types of one model, or of several models that share an arena."""

    name: str
    layer_types: tuple[LayerType, ...]

    def __post_init__(self) -> None:
        if not self.layer_types:
            msg = f"model {self.name!r} must have at least one layer type"
            raise ValueError(msg)
        check_distinct(
            f"model {self.name!r}", "layer types", [each.name for each in self.layer_types]
        )
        for layer_type in self.layer_types:
            check_registered(layer_type)
            if layer_type.host is not None:
                self._check_host(layer_type, layer_type.host)

    def with_images_in(self, host_name: str) -> "ModelSpec":
        """Return this model with embeddings of images in slots of a full-attention type.

        Args:
            host_name: Name of the full-attention type. A slot of it must hold an embedding.

        Raises:
            ValueError: There is no such full-attention type, or its slots are too small.
        """
        layer_types: list[LayerType] = []
        for each in self.layer_types:
            if isinstance(each, ImageEmbedding):
                layer_types.append(replace(each, host=host_name))
            elif isinstance(each, FullAttention) and each.name == host_name:
                layer_types.append(replace(each, holds_images=True))
            else:
                layer_types.append(each)
        return replace(self, layer_types=tuple(layer_types))

    def _check_host(self, embedding: LayerType, host_name: str) -> None:
        owner = f"model {self.name!r}: layer type {embedding.name!r}"
        host = next((each for each in self.layer_types if each.name == host_name), None)
        if not isinstance(host, FullAttention) or not host.holds_images:
            msg = (
                f"{owner}: host must name a full-attention layer type with holds_images, got "
                f"{host_name!r}"
            )
            raise ValueError(msg)
        host_bytes, needed_bytes = host.slot_bytes, embedding.slot_bytes
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
    check_distinct(f"model {name!r}", "models", [model.name for model in models])
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
    fields: dict[str, Any] = {"name": f"{prefix}/{layer_type.name}", "layers": layers}
    if layer_type.host is not None:
        fields["host"] = f"{prefix}/{layer_type.host}"
    return replace(layer_type, **fields)
