"""Translation of vLLM's cache specs into this package's layer types.

No other module does this. A group of vLLM becomes a page table, and a block becomes a small page.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from jenga.geometry import PageTable
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
)
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.settings.speculation import check_draft
from jenga.vllm_plugin.specs.image_rows import IMAGE_LAYER, image_layer, image_type

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec


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

    # In latent attention, a row is key and value at once.
    has_values = not isinstance(spec, MLAAttentionSpec)
    served = {KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR}
    if has_values:
        served |= {mode for mode in KVQuantMode if mode.is_per_token_head}
    widths = {spec.head_size, spec.head_size_v} if has_values else set()
    is_int4 = spec.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD
    # The backend itself sets this content, to add the scales of slots that have their own.
    has_slot_scales = has_values and spec.kv_quant_mode.is_per_token_head
    checks = {
        "padded pages": spec.page_size_padded is not None,
        "packed head slots": spec.num_head_slots is not None,
        "packed content": spec.state_content_bytes is not None and not has_slot_scales,
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


def _layer(  # noqa: PLR0911  one answer for each kind of cache
    name: str, spec: "KVCacheSpec"
) -> tuple[tuple[object, ...], Layer]:
    """Get a key that all layers of one layer type share, and the layer's storage.

    Raises:
        ValueError: The plugin cannot serve the layer's kind of cache. The message names the layer.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    if name == IMAGE_LAYER:
        return ("images", spec.block_size), image_layer(spec)
    if type(spec) is FullAttentionSpec and spec.sliding_window is None:
        _check_attention(name, spec)
        slot_bytes = spec.page_size_bytes // spec.block_size
        return ("full",), Layer(name=name, slot_bytes=slot_bytes)
    if type(spec) is MLAAttentionSpec:
        _check_attention(name, spec)
        slot_bytes = spec.page_size_bytes // spec.block_size
        return ("latent",), Layer(name=name, slot_bytes=slot_bytes)
    if type(spec) is SlidingWindowSpec:
        _check_attention(name, spec)
        slot_bytes = spec.page_size_bytes // spec.block_size
        kept = spec.sliding_window + spec.extra_retained_tokens
        return ("sliding", kept), Layer(name=name, slot_bytes=slot_bytes)
    if type(spec) is ChunkedLocalAttentionSpec:
        _check_attention(name, spec)
        slot_bytes = spec.page_size_bytes // spec.block_size
        return ("chunked", spec.attention_chunk_size), Layer(name=name, slot_bytes=slot_bytes)
    if type(spec) is CrossAttentionSpec:
        _check_attention(name, spec)
        slot_bytes = spec.page_size_bytes // spec.block_size
        return ("cross",), Layer(name=name, slot_bytes=slot_bytes)
    if type(spec) is MambaSpec and spec.mamba_cache_mode == "none":
        _check_states(name, spec)
        kind, draft_tokens = spec.mamba_type.name.lower(), spec.num_speculative_blocks
        key = ("state", kind, draft_tokens, spec.shapes, spec.dtypes)
        return key, Layer(name=name, slot_bytes=spec.state_content_size_bytes)
    msg = (
        f"layer {name!r} with a {type(spec).__name__}, where full, latent, sliding window, chunked "
        f"local and cross attention and Mamba states are served: {spec}"
    )
    raise Refusal.CACHE_LAYOUT.error(msg)


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
    types = [replace(layer_type, name=f"draft_{layer_type.name}") for layer_type in drafts]
    types += _layer_types({name: spec for name, spec in specs.items() if name not in draft_layers})
    # Image embeddings come last. Every other page table is a group of vLLM with the same index.
    types.sort(key=lambda layer_type: isinstance(layer_type, ImageEmbedding))
    return ModelSpec(name="model", layer_types=tuple(types))


def without_images(model: ModelSpec) -> ModelSpec:
    """Get a model whose image embeddings are not kept in the arena."""
    kept = tuple(each for each in model.layer_types if not isinstance(each, ImageEmbedding))
    return replace(model, layer_types=kept)


def _layer_types(specs: Mapping[str, "KVCacheSpec"]) -> list[LayerType]:
    """Group the layers of one model into layer types."""
    layers_by_key: dict[tuple[object, ...], list[Layer]] = {}
    for name, spec in specs.items():
        key, layer = _layer(name, spec)
        layers_by_key.setdefault(key, []).append(layer)
    names: dict[str, int] = {}
    layer_types: list[LayerType] = []
    for key, layers in layers_by_key.items():
        match key:
            case ("full",):
                layer_types.append(FullAttention(name="full", layers=tuple(layers)))
            case ("latent",):
                layer_types.append(FullAttention(name="latent", layers=tuple(layers)))
            case ("sliding", int(window_tokens)):
                name = f"sliding_{window_tokens}"
                layer_types.append(
                    SlidingWindow(name=name, layers=tuple(layers), window_tokens=window_tokens)
                )
            case ("chunked", int(chunk_tokens)):
                name = f"chunked_{chunk_tokens}"
                layer_types.append(
                    ChunkedLocal(name=name, layers=tuple(layers), chunk_tokens=chunk_tokens)
                )
            case ("images", int(largest_tokens)):
                layer_types.append(image_type(layers[0], largest_tokens))
            case ("cross",):
                layer_types.append(CrossAttention(name="cross", layers=tuple(layers)))
            case ("state", str(kind), int(draft_tokens), *_):
                # States of one kind with different shapes have different layer types.
                names[kind] = names.get(kind, 0) + 1
                name = kind if names[kind] == 1 else f"{kind}_{names[kind]}"
                layer_types.append(
                    State(name=name, layers=tuple(layers), draft_tokens=draft_tokens)
                )
            case _:
                msg = f"unknown key of a layer type: {key}"
                raise ValueError(msg)
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
