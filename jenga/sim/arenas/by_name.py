"""Memory managers to compare, by name."""

from collections.abc import Callable

from jenga.admission.reserve import STEP_TOKENS
from jenga.eviction.policy import EvictionPolicy
from jenga.sim.arenas.baseline_geometries import gcd_pages, geometry_by_name, static_partition
from jenga.sim.arenas.jenga_arena import ManagedArena, PagedArena
from jenga.sim.arenas.partitioned import PartitionedArena
from jenga.sim.arenas.scattered import ScatteredArena
from jenga.sim.arenas.vllm_arena import StockArena
from jenga.sim.arenas.vllm_plan import DEFAULT_STOCK, StockOptions
from jenga.sim.batching.arena import Arena
from jenga.sim.batching.scheduler import CHUNK_TOKENS
from jenga.spec import ModelSpec

_GEOMETRIES = {"jenga": "planned", "paged": "homogeneous", "max": "max", "lcm": "lcm"}

EVICTING = (*_GEOMETRIES, "static")
"""Managers with a policy of `jenga.eviction`: those that are ours, with any geometry."""

HOSTING = tuple(_GEOMETRIES)
"""Managers that may have host memory in addition to the arena: ours, without a static partition."""

MANAGER_NAMES = (*EVICTING, "gcd", "vllm")
"""All names that `make_arena` knows."""


def make_arena(  # noqa: PLR0913  all in which two arenas may differ
    manager: str,
    model: ModelSpec,
    arena_bytes: int,
    *,
    prefix_caching: bool = True,
    eviction_policy: Callable[[], EvictionPolicy] | None = None,
    left_share: float | None = None,
    step_tokens: float = STEP_TOKENS,
    chunk_tokens: int = CHUNK_TOKENS,
    steps_in_flight: int = 1,
    history_query_tokens: int = 0,
    host_bytes: int = 0,
    stock: StockOptions = DEFAULT_STOCK,
) -> Arena:
    """Make an empty arena.

    Args:
        manager: One of these names:

            - "jenga": our manager with the planned geometry,
            - "lcm" or "max": our manager with the geometry of that rule,
            - "paged": our manager with all layers alike, as in PagedAttention,
            - "static": our manager, with a part of fixed size for each layer type,
            - "gcd": pages scattered over pieces of their greatest common divisor, without prefix
              caching, which it refuses,
            - "vllm": vLLM's manager and planner.
        model: Layers of one rank.
        arena_bytes: Bytes of the arena of one rank.
        prefix_caching: Whether pages are kept for later requests.
        eviction_policy: Function that makes the policy of our manager.
        left_share: Argument of our manager; see `jenga.manager.Manager`.
        step_tokens: Argument of our manager; see `jenga.manager.Manager`.
        chunk_tokens: Most tokens that a step computes, of all requests together.
        steps_in_flight: Number of steps that are scheduled at a time.
        history_query_tokens: Most tokens of a decode step, if the model keeps histories; see
            `jenga.state_keeper.StateKeeper`.
        host_bytes: Bytes of host memory of one rank. Only for managers in `HOSTING`.
        stock: Options of manager "vllm".

    Raises:
        ValueError: No manager has this name, or it cannot start with such a model or arena.
    """
    in_flight_tokens = steps_in_flight * chunk_tokens
    if manager in _GEOMETRIES:
        geometry = geometry_by_name(_GEOMETRIES[manager], model, arena_bytes=arena_bytes)
        if manager == "paged":
            return PagedArena(
                model,
                geometry,
                arena_bytes,
                prefix_caching=prefix_caching,
                eviction_policy=eviction_policy,
                left_share=left_share,
                step_tokens=step_tokens,
                in_flight_tokens=in_flight_tokens,
                host_bytes=host_bytes,
            )
        return ManagedArena(
            geometry,
            arena_bytes,
            prefix_caching=prefix_caching,
            eviction_policy=eviction_policy,
            left_share=left_share,
            step_tokens=step_tokens,
            in_flight_tokens=in_flight_tokens,
            history_query_tokens=history_query_tokens,
            host_bytes=host_bytes,
        )
    if host_bytes:
        msg = f"host_bytes must be 0 for manager {manager!r}, which has no host memory"
        raise ValueError(msg)
    match manager:
        case "static":
            return PartitionedArena(
                static_partition(model, arena_bytes=arena_bytes),
                prefix_caching=prefix_caching,
                eviction_policy=eviction_policy,
                left_share=left_share,
                step_tokens=step_tokens,
                in_flight_tokens=in_flight_tokens,
            )
        case "gcd":
            if prefix_caching:
                msg = "prefix_caching must be off for manager 'gcd', whose pages are one request's"
                raise ValueError(msg)
            return ScatteredArena(gcd_pages(model), arena_bytes, in_flight_tokens=in_flight_tokens)
        case "vllm":
            try:
                return StockArena(
                    model,
                    arena_bytes,
                    prefix_caching=prefix_caching,
                    chunk_tokens=chunk_tokens,
                    steps_in_flight=steps_in_flight,
                    options=stock,
                )
            except NotImplementedError as error:
                # vLLM's manager of cross attention raises it, because it caches no prefix.
                msg = f"model must be one that vLLM's manager takes, got {model.name!r}: {error}"
                if prefix_caching:
                    msg += "; without prefix caching it may take it"
                raise ValueError(msg) from error
        case _:
            msg = f"manager must be one of {', '.join(MANAGER_NAMES)}, got {manager!r}"
            raise ValueError(msg)
