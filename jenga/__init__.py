"""Memory management for serving hybrid large language models.

The package has floors, and each imports only from those below. From the bottom they are: `eviction`
and `policies`, `layer_type`, `spec` and `arena`, then `geometry`, `models` and `registration`,
`planning`, `tables`, `prefix`, `admission`, `manager`. The engines that use it, `vllm_plugin` and
`sim`, are on top.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jenga.errors import OutOfPagesError
    from jenga.geometry import Geometry
    from jenga.layer_type import Layer, LayerType
    from jenga.manager import Manager
    from jenga.models.known import known_model
    from jenga.planning.planner import plan
    from jenga.registration import register_layer_type
    from jenga.spec import ModelSpec

__all__ = [
    "Geometry",
    "Layer",
    "LayerType",
    "Manager",
    "ModelSpec",
    "OutOfPagesError",
    "known_model",
    "plan",
    "register_layer_type",
]

_HOMES = {
    "Geometry": "geometry",
    "Layer": "layer_type",
    "LayerType": "layer_type",
    "Manager": "manager",
    "ModelSpec": "spec",
    "OutOfPagesError": "errors",
    "known_model": "models.known",
    "plan": "planning.planner",
    "register_layer_type": "registration",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found = getattr(import_module(f"jenga.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
