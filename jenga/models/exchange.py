"""Layer types and options as JSON, to pass from one process to another."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from jenga.layer_type import layer_type_named
from jenga.models.options import KvFormat, ReadOptions
from jenga.spec import Layer, LayerType, StatePart


def options_fields(options: ReadOptions) -> dict[str, Any]:
    """Get the fields of options, as types that JSON knows."""
    return asdict(options) | {"kv_format": options.kv_format.value}


def options_from(values: Mapping[str, Any]) -> ReadOptions:
    """Get the options from fields that `options_fields` made.

    Raises:
        ValueError: A value is out of its range.
    """
    fields: dict[str, Any] = {**values, "kv_format": KvFormat(values["kv_format"])}
    return ReadOptions(**fields)


def layer_type_fields(layer_type: LayerType) -> dict[str, Any]:
    """Get the fields of a layer type and the name of its class, as types that JSON knows."""
    return {"type": type(layer_type).__name__, **asdict(layer_type)}


def layer_type_from(values: Mapping[str, Any]) -> LayerType:
    """Get the layer type from fields that `layer_type_fields` made.

    Raises:
        ValueError: A value is out of its range, or no layer type of that name is registered.
    """
    chosen = layer_type_named(values["type"])
    layers = tuple(
        Layer(
            name=each["name"],
            slot_bytes=each["slot_bytes"],
            readers=tuple(each["readers"]),
            parts=tuple(
                StatePart(name=part["name"], shape=tuple(part["shape"]), dtype=part["dtype"])
                for part in each["parts"]
            ),
        )
        for each in values["layers"]
    )
    own: dict[str, Any] = {field.name: values[field.name] for field in fields(chosen)}
    own["layers"] = layers
    return chosen(**own)
