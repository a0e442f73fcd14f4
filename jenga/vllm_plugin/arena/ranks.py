"""Which rank of a pipeline has which layers, while their pages are planned.

vLLM asks for the groups of all layers of a model without saying on which rank each is.
"""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from vllm.v1.kv_cache_interface import KVCacheSpec

Specs = Sequence[Mapping[str, "KVCacheSpec"]]
"""Of each worker vLLM's cache spec of each layer, by layer name."""

_layers: ContextVar[tuple[frozenset[str], ...]] = ContextVar("_layers", default=())
_workers: ContextVar[tuple[Specs, Sequence[int]] | None] = ContextVar("_workers", default=None)


@contextmanager
def planned_for(
    kv_cache_specs: Specs, available_memory: Sequence[int] | None = None
) -> "Generator[None]":
    """Plan for workers with these layers; those of one rank of a pipeline have the same.

    Args:
        kv_cache_specs: Of each worker.
        available_memory: Of each worker, in bytes, where it is known.
    """
    ranks = dict.fromkeys(frozenset(specs) for specs in kv_cache_specs)
    layers = _layers.set(tuple(ranks))
    workers = _workers.set(None if available_memory is None else (kv_cache_specs, available_memory))
    try:
        yield
    finally:
        _workers.reset(workers)
        _layers.reset(layers)


def workers() -> tuple[Specs, Sequence[int]] | None:
    """Get the specs and bytes of the workers planned for, where both are known."""
    return _workers.get()


def layers_of_ranks(kv_cache_spec: Mapping[str, "KVCacheSpec"]) -> tuple[frozenset[str], ...]:
    """Get the names of the layers of each rank of the pipeline that is planned for.

    Args:
        kv_cache_spec: Of all layers; all are of one rank where nothing else is said, as in a worker
            that measures with its own layers alone.
    """
    return _layers.get() or (frozenset(kv_cache_spec),)
