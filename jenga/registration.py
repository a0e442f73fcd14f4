"""Layer types that models may use: those of the package, and those that others register.

A layer type from outside the package is registered in every process that uses it. In vLLM, the
place for that is a plugin of the group `vllm.general_plugins`, which vLLM loads in each process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jenga.checks import check_multiple, check_positive
from jenga.layer_type import Layer, LayerType, register
from jenga.policies.policy_check import check_policy
from jenga.spec import State

_EXAMPLE_PAGE_SLOTS = (1, 4, 16)
"""Numbers of slots of a page with which the policy of a registered type is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The cache spec with which layers of an engine declare that they are of a layer type.

    Attributes:
        layer_type: The layer type.
        cache_spec: The engine's class.
        fields_of: Returns the values of the type's own fields, from an instance of `cache_spec`.
    """

    layer_type: type[LayerType]
    cache_spec: type
    fields_of: Callable[[Any], Mapping[str, Any]]


_cache_specs: dict[type, CacheSpec] = {}


def register_layer_type(
    layer_type: type,
    *,
    example: Mapping[str, Any],
    cache_spec: type | None = None,
    fields_of: Callable[[Any], Mapping[str, Any]] | None = None,
) -> None:
    """Let models use a layer type that is not part of the package.

    Args:
        layer_type: A frozen dataclass that inherits `LayerType`.
        example: Small values of its own fields, without `name` and `layers`. The policy of this
            example is tried on short requests.
        cache_spec: vLLM's class of cache specs for such layers, a subclass of one of its attention
            specs that is registered with vLLM too (`KVCacheSpecRegistry`). The plugin then serves
            layers whose spec is of exactly this class. None without an engine.
        fields_of: Returns the values of the own fields, from an instance of `cache_spec`. Layers
            with equal values belong to one layer type.

    Raises:
        ValueError: The class is no layer type, a type of its name or its cache spec is registered,
            or the policy's answers contradict each other. The message names the first.
    """
    owner = f"layer type {layer_type.__name__!r}"
    if not issubclass(layer_type, LayerType):
        msg = f"{owner} must inherit jenga.LayerType"
        raise ValueError(msg)  # noqa: TRY004  every mistake of a caller is one kind of error
    if not getattr(vars(layer_type).get("__dataclass_params__"), "frozen", False):
        msg = f"{owner} must be a frozen dataclass with the fields name and layers"
        raise ValueError(msg)
    if (cache_spec is None) != (fields_of is None):
        msg = f"{owner}: cache_spec and fields_of must be given together"
        raise ValueError(msg)
    if cache_spec in _cache_specs:
        taken = _cache_specs[cache_spec].layer_type.__name__
        msg = f"{owner}: cache_spec {cache_spec.__name__!r} is registered for {taken!r}"
        raise ValueError(msg)
    _check_example(layer_type, example)
    register(layer_type)
    if cache_spec is not None and fields_of is not None:
        _cache_specs[cache_spec] = CacheSpec(
            layer_type=layer_type, cache_spec=cache_spec, fields_of=fields_of
        )


def registered_cache_spec(cache_spec: type) -> CacheSpec | None:
    """Return what was registered with an engine's class of cache specs, or None."""
    return _cache_specs.get(cache_spec)


def _check_example(layer_type: type[LayerType], example: Mapping[str, Any]) -> None:
    """Try an example of a layer type.

    Raises:
        ValueError: It cannot be made, or its answers contradict each other.
    """
    owner = f"layer type {layer_type.__name__!r}"
    own = {field.name for field in fields(layer_type)} - {"name", "layers"}
    if unknown := example.keys() - own:
        msg = f"{owner}: example must give values of {sorted(own)}, got {sorted(unknown)}"
        raise ValueError(msg)
    made: dict[str, Any] = {
        "name": layer_type.__name__,
        "layers": (Layer(name="layer", slot_bytes=64),),
        **example,
    }
    try:
        one = layer_type(**made)
    except TypeError as error:
        msg = f"{owner}: example must make one of the type, got {dict(example)}: {error}"
        raise ValueError(msg) from error
    check_layer_type(one)


def check_layer_type(layer_type: LayerType) -> None:
    """Try the answers of a layer type and of its policy on short requests.

    Raises:
        ValueError: Two of them contradict each other, or a number of tokens is out of its range.
            The message names them.
    """
    owner = f"layer type {type(layer_type).__name__!r}"
    check_positive(owner, "tokens_per_slot", layer_type.tokens_per_slot)
    if layer_type.tokens_per_page is not None:
        check_multiple(
            f"{owner}: tokens_per_page",
            layer_type.tokens_per_page,
            unit_name="tokens_per_slot",
            unit=layer_type.tokens_per_slot,
        )
        check_positive(owner, "tokens_per_page", layer_type.tokens_per_page)
    policy = layer_type.policy(1)
    facts = {
        "a type with is_state must inherit jenga.spec.State": (
            not layer_type.is_state or isinstance(layer_type, State)
        ),
        "kind must be a text": bool(getattr(layer_type, "kind", "")),
        "keeps must be a text": bool(layer_type.keeps),
        "is_state must be the policy's is_overwritten": (
            layer_type.is_state == policy.is_overwritten
        ),
        "typical_tokens must be above 0 if and only if the policy names_images": (
            (layer_type.typical_tokens > 0) == policy.names_images
        ),
    }
    if wrong := [rule for rule, holds in facts.items() if not holds]:
        msg = f"{owner}: {'; '.join(wrong)}"
        raise ValueError(msg)
    for page_slots in _EXAMPLE_PAGE_SLOTS:
        if layer_type.is_state and page_slots != 1:
            continue
        check_policy(owner, layer_type.policy(page_slots), page_slots)
