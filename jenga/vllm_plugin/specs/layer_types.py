"""Translation of vLLM's cache specs into this package's layer types.

No other module does this. A group of vLLM becomes a page table, and a block becomes a small page.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from math import prod
from typing import TYPE_CHECKING, Any

from jenga.geometry import PageTable
from jenga.registration import CacheSpec, registered_cache_spec
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    Layer,
    LayerType,
    ModelSpec,
    SlidingWindow,
    State,
    TokenBudget,
)
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.settings.speculation import check_draft
from jenga.vllm_plugin.specs.image_rows import IMAGE_LAYER, image_layer

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec

    from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec


STATE_MODELS: dict[str, frozenset[str] | None] = {
    "MAMBA1": None,
    "MAMBA2": None,
    "GDN_ATTN": frozenset(
        {
            "BailingMoeV3ForCausalLM",
            "BailingMoeV3VLForConditionalGeneration",
            "KimiLinearForCausalLM",
            "OlmoHybridForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        }
    ),
    "LINEAR": frozenset({"BailingMoeV2_5ForCausalLM"}),
    "SHORT_CONV": frozenset(
        {"Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"}
    ),
}
"""Kinds of recurrent layers -> models in which they run on our kernels, in vLLM's names.

None means all models. For the other kinds, vLLM has more than one class, each with its own
operations.
"""

PER_CHANNEL_DELTA_MODELS = frozenset(
    {
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "KimiLinearForCausalLM",
    }
)
"""Models whose gated delta layers decay each key channel of a state separately."""


def served_states(architecture: str | None) -> frozenset[str]:
    """Get the kinds of recurrent layers that run on our kernels in a model.

    Other kinds run on vLLM's kernels.

    Args:
        architecture: vLLM's name of the model's class.
    """
    return frozenset(
        kind for kind, models in STATE_MODELS.items() if models is None or architecture in models
    )


HEAD_DIMS = range(64, 512 + 1, 16)
"""Numbers of elements that a key may have. vLLM asks the backend for them."""

VALUE_DIMS = range(16, 512 + 1, 16)
"""Numbers of elements that a value may have. vLLM does not ask for them."""

INT4_ROW_ELEMENTS = 32
"""Number of four-bit elements in 16 bytes. Rows begin at multiples of 16 bytes in the kernels."""

_FULL = "full"
"""Name of the layer type of full attention over keys and values."""

_DRAFT = "draft_"
"""Prefix of the names of a draft model's layer types."""

_STATE_ALIGNMENT_BYTES = 16
"""Alignment of a state within its page: the widest load of one thread."""


def kinds_of_states(specs: Mapping[str, "KVCacheSpec"]) -> frozenset[str]:
    """Get vLLM's names of the kinds of a model's recurrent layers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return frozenset(spec.mamba_type.name for spec in specs.values() if isinstance(spec, MambaSpec))


def _check_states(name: str, spec: "MambaSpec") -> None:
    """Refuse states whose size would misalign the next state for the kernels' loads.

    Raises:
        ValueError: The first state's size is not a multiple of the alignment.
    """
    first_bytes = prod(spec.shapes[0]) * spec.dtypes[0].itemsize
    if spec.mamba_type.name in STATE_MODELS and first_bytes % _STATE_ALIGNMENT_BYTES:
        msg = f"{first_bytes} bytes in layer {name!r}"
        raise Refusal.STATE_ALIGNMENT.error(msg)


def _check_attention(name: str, spec: "AttentionSpec") -> None:
    """Refuse page layouts that the kernels cannot read.

    Raises:
        ValueError: The layer has such a layout. The message lists the reasons.
    """
    from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

    from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec

    # In latent attention, a row is key and value at once.
    has_values = not isinstance(spec, MLAAttentionSpec)
    served = {KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR}
    if has_values:
        served |= {mode for mode in KVQuantMode if mode.is_per_token_head}
    widths = {spec.head_size, spec.head_size_v} if has_values else set()
    is_int4 = spec.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD
    # The plugin itself sets this content, to add scales or attention weights to each slot.
    has_weights = isinstance(spec, TokenBudgetSpec) and spec.output_tokens is not None
    has_slot_words = has_weights or (has_values and spec.kv_quant_mode.is_per_token_head)
    checks = {
        "padded pages": spec.page_size_padded is not None,
        "packed head slots": spec.num_head_slots is not None,
        "packed content": spec.state_content_bytes is not None and not has_slot_words,
        "compressed tokens": spec.tokens_per_state != 1,
        f"quantised KV ({spec.kv_quant_mode.name})": spec.kv_quant_mode not in served,
        f"values of {spec.head_size_v} elements": has_values and spec.head_size_v not in VALUE_DIMS,
        f"four bits an element of heads of {sorted(widths)} elements, which must be multiples of "
        f"{INT4_ROW_ELEMENTS}": is_int4 and any(width % INT4_ROW_ELEMENTS for width in widths),
        "non-causal attention": getattr(spec, "non_causal", False),
    }
    reasons = [reason for reason, found in checks.items() if found]
    if reasons:
        msg = f"layer {name!r} with {', '.join(reasons)}"
        raise Refusal.CACHE_LAYOUT.error(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Common part of all layers of one layer type.

    Attributes:
        layer_type: Class of the layer type.
        name: Name of the layer type.
        fields: Values of the class's own fields.
        apart: Further difference between kinds of one name. They are then numbered.
    """

    layer_type: type[LayerType]
    name: str
    fields: tuple[tuple[str, Any], ...] = ()
    apart: Hashable = None


def _kind(name: str, spec: "KVCacheSpec") -> _Kind:
    """Get the kind of a layer.

    Raises:
        ValueError: The plugin cannot serve the layer's kind of cache. The message names the layer.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

    from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec

    if name == IMAGE_LAYER and isinstance(spec, AttentionSpec):
        fields = (("typical_tokens", spec.block_size),)
        return _Kind(layer_type=ImageEmbedding, name="images", fields=fields)
    if isinstance(spec, TokenBudgetSpec):
        return _budget_kind(spec)
    registered = registered_cache_spec(type(spec))
    if registered is not None:
        return _registered_kind(name, spec, registered)
    if isinstance(spec, AttentionSpec) and (kind := _attention_kind(spec)) is not None:
        return kind
    if type(spec) is MambaSpec and spec.mamba_cache_mode == "none":
        return _Kind(
            layer_type=State,
            name=spec.mamba_type.name.lower(),
            fields=(("draft_tokens", spec.num_speculative_blocks),),
            apart=(spec.shapes, spec.dtypes),
        )
    msg = (
        f"layer {name!r} with a {type(spec).__name__}, where full, latent, sliding window, chunked "
        f"local and cross attention, Mamba states, and specs that jenga.register_layer_type was "
        f"given are served: {spec}"
    )
    raise Refusal.CACHE_LAYOUT.error(msg)


def _attention_kind(spec: "AttentionSpec") -> _Kind | None:
    """Get the kind of an attention layer of vLLM's own, None if the plugin does not serve it."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from jenga.vllm_plugin.specs.image_features import ImageAttentionSpec

    if type(spec) is FullAttentionSpec and spec.sliding_window is None:
        return _Kind(layer_type=FullAttention, name=_FULL)
    if type(spec) is MLAAttentionSpec:
        return _Kind(layer_type=FullAttention, name="latent")
    if type(spec) is SlidingWindowSpec:
        kept = spec.sliding_window + spec.extra_retained_tokens
        fields = (("window_tokens", kept),)
        return _Kind(layer_type=SlidingWindow, name=f"sliding_{kept}", fields=fields)
    if type(spec) is ChunkedLocalAttentionSpec:
        chunk_tokens = spec.attention_chunk_size
        fields = (("chunk_tokens", chunk_tokens),)
        return _Kind(layer_type=ChunkedLocal, name=f"chunked_{chunk_tokens}", fields=fields)
    if type(spec) is CrossAttentionSpec or type(spec) is ImageAttentionSpec:
        return _Kind(layer_type=CrossAttention, name="cross")
    return None


def _budget_kind(spec: "TokenBudgetSpec") -> _Kind:
    """Get the kind of a layer with a token budget."""
    fields = (
        ("mean_budget_tokens", spec.budget_tokens),
        ("recent_tokens", spec.recent_tokens),
        ("steepness", 1),
        ("layer_index", 0),
        ("num_layers", 1),
        ("output_tokens", spec.output_tokens),
    )
    return _Kind(layer_type=TokenBudget, name=f"budget_{spec.budget_tokens}", fields=fields)


def _registered_kind(name: str, spec: "KVCacheSpec", registered: CacheSpec) -> _Kind:
    """Get the kind of a layer whose type was registered.

    Raises:
        ValueError: It is no attention layer, or its fields are unknown or not hashable.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    if not isinstance(spec, AttentionSpec):
        msg = f"layer {name!r}: {type(spec).__name__} must inherit one of vLLM's attention specs"
        raise ValueError(msg)  # noqa: TRY004  every mistake of a caller is one kind of error
    fields = tuple(sorted(registered.fields_of(spec).items()))
    own = {field.name for field in dataclass_fields(registered.layer_type)} - {"name", "layers"}
    if unknown := dict(fields).keys() - own:
        msg = (
            f"layer {name!r}: fields_of {type(spec).__name__!r} must return the fields of "
            f"{registered.layer_type.__name__!r}, {sorted(own)}, got {sorted(unknown)}"
        )
        raise ValueError(msg)
    try:
        hash(fields)
    except TypeError as error:
        msg = (
            f"layer {name!r}: fields_of {type(spec).__name__!r} must return values that are "
            f"hashable, got {dict(fields)}"
        )
        raise ValueError(msg) from error
    words = [*registered.layer_type.kind.split(), *(f"{value}" for _, value in fields)]
    return _Kind(layer_type=registered.layer_type, name="_".join(words), fields=fields)


def _layer(name: str, spec: "KVCacheSpec") -> Layer:
    """Get the storage of a layer.

    Raises:
        ValueError: The kernels cannot read its cache. The message names the layer.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

    if name == IMAGE_LAYER:
        return image_layer(spec)
    if isinstance(spec, MambaSpec):
        _check_states(name, spec)
        return Layer(name=name, slot_bytes=spec.state_content_size_bytes)
    if isinstance(spec, AttentionSpec):
        _check_attention(name, spec)
    return Layer(name=name, slot_bytes=spec.page_size_bytes // spec.block_size)


def model_spec(
    specs: Mapping[str, "KVCacheSpec"], *, draft_layers: Set[str] = frozenset()
) -> ModelSpec:
    """Describe a model and its draft model to the memory manager.

    Args:
        specs: vLLM's cache spec of each layer that stores a cache, by layer name.
        draft_layers: Names of the draft model's layers. They get layer types of their own.

    Raises:
        ValueError: The plugin cannot serve a layer's kind of cache. The message names the layer.
    """
    drafts = _layer_types({name: spec for name, spec in specs.items() if name in draft_layers})
    check_draft(layer_type.name for layer_type in drafts)
    # Draft layers come first, since vLLM's runner gives a draft model the first group's page table.
    types = [replace(layer_type, name=f"{_DRAFT}{layer_type.name}") for layer_type in drafts]
    types += _layer_types({name: spec for name, spec in specs.items() if name not in draft_layers})
    # Image embeddings come last. Every other page table is a group of vLLM with the same index.
    types.sort(key=lambda layer_type: isinstance(layer_type, ImageEmbedding))
    return ModelSpec(name="model", layer_types=tuple(types))


def without_images(model: ModelSpec) -> ModelSpec:
    """Get a model whose image embeddings are not kept in the arena."""
    kept = tuple(each for each in model.layer_types if not isinstance(each, ImageEmbedding))
    return replace(model, layer_types=kept)


def with_images_in_kv_pages(model: ModelSpec, longest_tokens: int) -> ModelSpec:
    """Get a model whose image embeddings live in slots of full attention.

    Without full attention they live in those of a window that no request outgrows. It keeps every
    token, so it becomes full attention.

    Args:
        model: The model, with embeddings of images.
        longest_tokens: Number of tokens of the longest request.

    Raises:
        ValueError: The model has neither over keys and values, or its slots are smaller than an
            embedding.
    """
    types = model.layer_types

    def keeps_all(each: LayerType) -> bool:
        return isinstance(each, SlidingWindow) and each.window_tokens >= longest_tokens

    whole = next(
        (each for each in types if keeps_all(each) and not each.name.startswith(_DRAFT)), None
    )
    if whole is not None and all(each.name != _FULL for each in types):
        host = FullAttention(name=_FULL, layers=whole.layers)
        types = tuple(host if each is whole else each for each in types)
    try:
        return replace(model, layer_types=types).with_images_in(_FULL)
    except ValueError as error:
        raise Refusal.EMBEDDINGS_IN_KV_PAGES.error(str(error)) from error


def _layer_types(specs: Mapping[str, "KVCacheSpec"]) -> list[LayerType]:
    """Group the layers of one model into layer types."""
    layers_by_kind: dict[_Kind, list[Layer]] = {}
    for name, spec in specs.items():
        layers_by_kind.setdefault(_kind(name, spec), []).append(_layer(name, spec))
    num_named: Counter[str] = Counter()
    layer_types: list[LayerType] = []
    for kind, layers in layers_by_kind.items():
        num_named[kind.name] += 1
        number = num_named[kind.name]
        name = kind.name if number == 1 else f"{kind.name}_{number}"
        made: dict[str, Any] = {"name": name, "layers": tuple(layers), **dict(kind.fields)}
        layer_types.append(kind.layer_type(**made))
    return layer_types


def layer_names(table: PageTable) -> list[str]:
    """Get the names of the layers in a page table's small pages, in their order in the page."""
    return [layer.name for layer in table.layer_type.layers[table.layer_start : table.layer_end]]


def table_spec(table: PageTable, specs: Mapping[str, "KVCacheSpec"]) -> "KVCacheSpec":
    """Get one spec of vLLM for the layers of a page table, with our number of tokens per page."""
    return common_spec(
        {
            name: specs[name]
            if table.is_state
            else replace(specs[name], block_size=table.tokens_per_page)
            for name in layer_names(table)
        }
    )


def common_spec(specs: Mapping[str, "KVCacheSpec"]) -> "KVCacheSpec":
    """Get one spec of vLLM for layers that share a page table: their own spec if all are equal."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    first, *others = specs.values()
    if all(other == first for other in others):
        return first
    return UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=dict(specs))
