"""Layers of each rank of a pipeline, which are known here while pages are planned.

vLLM asks for the groups of all layers of a model without saying which rank has which layer.
"""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from jenga.vllm_plugin.specs.image_rows import IMAGE_LAYER

if TYPE_CHECKING:
    from collections.abc import Generator

    from vllm.v1.kv_cache_interface import KVCacheSpec

Specs = Sequence[Mapping[str, "KVCacheSpec"]]
"""For each worker, vLLM's cache spec of each layer, by layer name."""

_layers: ContextVar[tuple[frozenset[str], ...]] = ContextVar("_layers", default=())
_images: ContextVar["KVCacheSpec | None"] = ContextVar("_images", default=None)
_workers: ContextVar[tuple[Specs, Sequence[int]] | None] = ContextVar("_workers", default=None)


@contextmanager
def planned_for(
    kv_cache_specs: Specs, available_memory: Sequence[int] | None = None
) -> "Generator[None]":
    """Make the layers of all workers known in this context.

    Workers of one pipeline rank have the same layers.

    Args:
        kv_cache_specs: For each worker, vLLM's cache spec of each layer, by layer name.
        available_memory: For each worker, bytes for its cache. None if they are not known.
    """
    ranks = dict.fromkeys(frozenset(specs) for specs in kv_cache_specs)
    layers = _layers.set(tuple(ranks))
    rows = (specs[IMAGE_LAYER] for specs in kv_cache_specs if IMAGE_LAYER in specs)
    images = _images.set(next(rows, None))
    workers = _workers.set(None if available_memory is None else (kv_cache_specs, available_memory))
    try:
        yield
    finally:
        _workers.reset(workers)
        _images.reset(images)
        _layers.reset(layers)


def without_image_rows(kv_cache_specs: Specs) -> list[dict[str, "KVCacheSpec"]]:
    """Get the specs of layers alone, which vLLM expects each in a group."""
    return [
        {name: spec for name, spec in specs.items() if name != IMAGE_LAYER}
        for specs in kv_cache_specs
    ]


def image_rows() -> dict[str, "KVCacheSpec"]:
    """Get the report of image embeddings of the workers that are planned for, if there is one."""
    rows = _images.get()
    return {} if rows is None else {IMAGE_LAYER: rows}


def workers() -> tuple[Specs, Sequence[int]] | None:
    """Get the arguments of `planned_for`. None outside of it, or if the bytes are not known."""
    return _workers.get()


def layers_of_ranks(kv_cache_spec: Mapping[str, "KVCacheSpec"]) -> tuple[frozenset[str], ...]:
    """Get the names of the layers of each rank of the pipeline that is being planned.

    Args:
        kv_cache_spec: vLLM's cache spec of each layer, by layer name. It is used only outside of
            `planned_for`, and then all its layers count as one rank. A worker that profiles calls
            this with only its own layers.
    """
    return _layers.get() or (frozenset(kv_cache_spec),)
