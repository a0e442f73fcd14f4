"""The arena of vLLM's own KVCacheManager and planner, for the layers of one of our models.

All decisions are made by vLLM's code: the planner, the manager with its prefix cache, and the split
of prefill chunks at which states of recurrent layers are cached. Ours are only the description of
the layers by their bytes, and the scheduler around the manager.

Two things differ from vLLM. Image embeddings are left out, because vLLM keeps them in a cache of
their own outside of the arena. Token budgets are left out, because vLLM does not know them: such
layers keep every token.
"""

import os
from collections.abc import Callable
from functools import partial
from math import gcd
from types import SimpleNamespace
from typing import Any

from jenga.prefix.eviction_log import Eviction
from jenga.prefix.miss_log import Miss
from jenga.sim.arenas.vllm_plan import (
    DEFAULT_STOCK,
    NEVER,
    StockOptions,
    StockPlan,
    layer_name,
    plan_stock,
)
from jenga.sim.batching.arena import NOTHING_MOVED, ActiveRequest, ArenaBytes, MovedBytes
from jenga.sim.batching.need import Need, encoder_tokens
from jenga.sim.batching.scheduler import CHUNK_TOKENS
from jenga.sim.results.rows import TableBytes
from jenga.spec import ModelSpec

_GROUP_BYTES = 4
"""Bytes of the number of a group, at the end of the key of a cached block."""

_LATE_TOKENS = 4
"""Most tokens by which vLLM's manager acts after a request has reached the end of a block.

It takes a block one token later, frees a state up to two later, and with asynchronous scheduling
learns one step later what was generated.
"""


class _StockRequest:
    """A request with the attributes that vLLM's manager reads."""

    lora_request = None
    skip_reading_prefix_cache = False

    __slots__ = ("_active", "block_hashes", "num_single", "shared_prefix_boundary", "status")

    def __init__(self, active: ActiveRequest, status: object, hashes: list[bytes]) -> None:
        self._active = active
        self.block_hashes = hashes
        self.num_single = 0  # calls in a row that asked for one slot
        self.shared_prefix_boundary = 0
        self.status = status

    @property
    def request_id(self) -> str:
        return self._active.name

    @property
    def num_prompt_tokens(self) -> int:
        return self._active.prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self._active.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self._active.num_computed

    @property
    def num_in_flight_tokens(self) -> int:
        return self._active.num_in_flight

    @property
    def num_preemptions(self) -> int:
        return self._active.num_preemptions


class _Evictions:
    """Counter of evicted blocks, in the place where vLLM has a collector of metrics."""

    def __init__(self) -> None:
        self.count = 0

    def on_block_allocated(self, _block: object) -> None:
        """Count nothing."""

    def on_block_accessed(self, _block: object) -> None:
        """Count nothing."""

    def on_block_evicted(self, _block: object) -> None:
        """Count a block."""
        self.count += 1

    def reset(self) -> None:
        """Count from 0 again."""
        self.count = 0


class StockMemory:
    """Account of the bytes of an arena under vLLM's manager.

    Attributes:
        plan: vLLM's plan of the arena.
    """

    def __init__(self, model: ModelSpec, plan: StockPlan, manager: Any) -> None:  # noqa: ANN401
        """Begin without evictions.

        Args:
            model: Model with the layers.
            plan: vLLM's plan of the arena.
            manager: A `KVCacheManager` of vLLM. Its evictions are counted from now on.
        """
        self.plan = plan
        self._manager = manager
        self._need = Need(model)
        self._group_bytes = _group_bytes(model, plan)
        self._evictions = _Evictions()
        manager.block_pool.metrics_collector = self._evictions

    @property
    def num_evicted(self) -> int:
        """See `Memory`."""
        return self._evictions.count

    def record_evictions(self) -> None:
        """See `Memory`. There are no checkpoints."""

    def take_evictions(self) -> list[Eviction]:
        """See `Memory`. There are no checkpoints."""
        return []

    def take_misses(self) -> list[Miss]:
        """See `Memory`. There are no checkpoints."""
        return []

    @property
    def moved_bytes(self) -> MovedBytes:
        """See `Memory`. There is no host memory."""
        return NOTHING_MOVED

    def memory(self, running: list[ActiveRequest]) -> ArenaBytes:
        """See `Memory`. Whole blocks are held, and their unused bytes are useless.

        A block of keys and values that several requests share is counted as used once.
        """
        pool = self._manager.block_pool
        num_cached = 0
        shared_bytes = 0.0
        for block in pool.blocks:
            if block.block_hash is not None:
                if not block.ref_cnt:
                    num_cached += 1
                elif block.ref_cnt > 1:
                    group = int.from_bytes(block.block_hash[-_GROUP_BYTES:], "big")
                    shared_bytes += (block.ref_cnt - 1) * self._group_bytes[group]
        num_free = pool.get_num_free_blocks()
        # vLLM's null block is neither held nor free.
        num_held = self.plan.kv_cache_config.num_blocks - 1 - num_free
        needed_bytes = sum(map(self._need.of_step, running))
        held_bytes = num_held * self.plan.block_bytes
        used_bytes = min(held_bytes, round(needed_bytes - shared_bytes))
        useless_bytes = held_bytes - used_bytes
        cached_bytes = num_cached * self.plan.block_bytes
        return ArenaBytes(
            used_bytes=used_bytes,
            useless_bytes=useless_bytes,
            cached_bytes=cached_bytes,
            empty_bytes=0,
            unallocated_bytes=num_free * self.plan.block_bytes - cached_bytes,
            tables={
                "blocks": TableBytes(
                    used_bytes=used_bytes, useless_bytes=useless_bytes, cached_bytes=cached_bytes
                )
            },
        )

    def check(self) -> None:
        """See `Memory`. vLLM has no such check."""


class StockArena(StockMemory):
    """An arena under vLLM's manager, cut by vLLM's planner."""

    leaves_room = False

    def __init__(
        self,
        model: ModelSpec,
        arena_bytes: int,
        *,
        prefix_caching: bool = True,
        chunk_tokens: int = CHUNK_TOKENS,
        steps_in_flight: int = 1,
        options: StockOptions = DEFAULT_STOCK,
    ) -> None:
        """Make an empty arena.

        Args:
            model: Model with the layers.
            arena_bytes: Bytes of all blocks.
            prefix_caching: Whether blocks are kept for later requests. States of recurrent layers
                are then kept as in vLLM's mode "align", its default.
            chunk_tokens: Most tokens that a step computes, of all requests together.
            steps_in_flight: Number of steps that are scheduled at a time.
            options: Options of vLLM.

        Raises:
            ValueError: vLLM is not installed, or see `plan_stock`.
        """
        # vLLM logs to standard error what its GPU build would do here. Errors are raised anyway.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm.v1.core.kv_cache_manager import KVCacheManager
            from vllm.v1.request import RequestStatus
        except ImportError as error:
            msg = (
                "manager 'vllm' must have vLLM 0.32 or 0.33 installed: its own manager is replayed"
            )
            raise ValueError(msg) from error

        plan = plan_stock(model, arena_bytes, prefix_caching=prefix_caching, options=options)
        self._encoder_tokens = 0
        if any(each.keeps_encoder_tokens for each in model.layer_types):
            self._encoder_tokens = encoder_tokens(model)
        self._prefix_caching = prefix_caching
        manager: Any = KVCacheManager(
            plan.kv_cache_config,
            max_model_len=NEVER,
            max_in_flight_tokens=steps_in_flight * chunk_tokens,
            scheduler_block_size=plan.scheduler_tokens,
            hash_block_size=plan.hash_tokens,
            enable_caching=prefix_caching,
        )
        super().__init__(model, plan, manager)
        self._waiting_status = RequestStatus.WAITING
        self._running_status = RequestStatus.RUNNING
        self._requests: dict[str, _StockRequest] = {}
        self._ends = _BlockEnds(plan, prefix_caching=prefix_caching)
        self._split = self._state_splitter(chunk_tokens) if prefix_caching else None

    def _state_splitter(self, chunk_tokens: int) -> "Callable[..., int] | None":
        """Return vLLM's own rule for the ends of chunks, or None if the model has no states."""
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import MambaSpec

        plan = self.plan
        specs = [group.kv_cache_spec for group in plan.kv_cache_config.kv_cache_groups]
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        if not states:
            return None
        # Attributes that the method reads of the scheduler to which it belongs.
        scheduler = SimpleNamespace(
            cache_config=plan.vllm_config.cache_config,
            block_size=plan.scheduler_tokens,
            hash_block_size=plan.hash_tokens,
            max_num_scheduled_tokens=chunk_tokens,
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            use_eagle_block_drop=False,
            num_hash_lookahead_tokens=0,
            mamba_partial_cache_hit=plan.hash_tokens < plan.scheduler_tokens
            and self._manager.coordinator.enable_partial_hash_hits,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=all(
                spec.num_prefill_checkpoint_blocks > 0 for spec in states
            ),
            mamba_prefill_checkpoint_alignment=states[0].prefill_checkpoint_alignment,
        )
        split: Any = Scheduler._mamba_block_aligned_split  # pyright: ignore[reportPrivateUsage]
        return partial(split, scheduler)

    def new_step(self) -> None:
        """See `Arena`."""
        self._manager.new_step_starts()

    def waits(self, active: ActiveRequest, *, first: bool = False) -> None:
        """See `Arena`. Nothing depends on it."""

    def refuse(self, active: ActiveRequest) -> None:
        """See `Arena`. Nothing depends on it."""

    def find(self, active: ActiveRequest) -> int:
        """See `Arena`."""
        hashes = active.hashes(self.plan.hash_tokens) if self._prefix_caching else []
        stock = _StockRequest(active, self._waiting_status, hashes)
        blocks, num_tokens, stock.shared_prefix_boundary = self._manager.get_computed_blocks(stock)
        active.found = (stock, blocks)
        return num_tokens

    def chunk_tokens(self, active: ActiveRequest, start: int, num_tokens: int) -> int:
        """See `Arena`. In models with states, chunks end where vLLM caches a state."""
        if self._split is None:
            return num_tokens
        stock = self._requests.get(active.name)
        if stock is None:
            return self._split(active.found[0], num_tokens, start)
        return self._split(stock, num_tokens, 0)

    def rest_tokens(self, _active: ActiveRequest) -> int | None:
        """See `Arena`."""
        return None

    def admit(
        self,
        active: ActiveRequest,
        hit_tokens: int,
        num_tokens: int,
        lookahead_tokens: int = 0,
    ) -> bool:
        """See `Arena`."""
        stock, blocks = active.found
        slots = self._manager.allocate_slots(
            stock,
            num_tokens - hit_tokens,
            num_new_computed_tokens=hit_tokens,
            new_computed_blocks=blocks,
            num_lookahead_tokens=lookahead_tokens,
            num_encoder_tokens=self._encoder_tokens,
            full_sequence_must_fit=True,
            has_scheduled_reqs=bool(self._requests),
        )
        if slots is None:
            return False
        active.found = None
        stock.status = self._running_status
        self._requests[active.name] = stock
        return True

    def grow(self, active: ActiveRequest, num_tokens: int, lookahead_tokens: int = 0) -> bool:
        """See `Arena`. vLLM's manager is not asked where its answer is known to change nothing."""
        stock = self._requests[active.name]
        num_new = num_tokens - active.num_computed
        if num_new == 1 and not lookahead_tokens:
            stock.num_single += 1
            if stock.num_single > _LATE_TOKENS and not self._ends.is_near(num_tokens):
                return True
        else:
            stock.num_single = 0
        slots = self._manager.allocate_slots(stock, num_new, num_lookahead_tokens=lookahead_tokens)
        return slots is not None

    def end_step(self) -> None:
        """See `Arena`. Take what vLLM's scheduler takes from its manager after `schedule`."""
        self._manager.take_boundary_state_offloads()
        _, retained_blocks = self._manager.take_kv_cache_block_copies()
        self._manager.block_pool.free_blocks(retained_blocks)
        self._manager.take_new_block_ids()

    def settle(
        self,
        active: ActiveRequest,
        num_tokens: int,
        *,
        ends_prompt: bool = False,  # noqa: ARG002  ours alone
    ) -> None:
        """See `Arena`."""
        if self._prefix_caching:
            self._manager.cache_blocks(self._requests[active.name], num_tokens)

    def free(self, active: ActiveRequest) -> None:
        """See `Arena`."""
        self._manager.free(self._requests.pop(active.name))


class _BlockEnds:
    """Lengths of a request at which vLLM's manager takes, frees or caches a block of it.

    Between them a decoding request changes nothing, however often the manager is asked.
    """

    def __init__(self, plan: StockPlan, *, prefix_caching: bool) -> None:
        """Collect the lengths.

        Args:
            plan: vLLM's plan of the arena.
            prefix_caching: Whether blocks are kept for later requests.
        """
        specs = [group.kv_cache_spec for group in plan.kv_cache_config.kv_cache_groups]
        chunks = [getattr(spec, "attention_chunk_size", 0) or 0 for spec in specs]
        windows = [getattr(spec, "sliding_window", 0) or 0 for spec in specs]
        hash_tokens = plan.hash_tokens if prefix_caching else 0
        self._tokens = gcd(hash_tokens, *(spec.block_size for spec in specs), *chunks)
        self._first = sorted({0, *(tokens % self._tokens for tokens in windows)})

    def is_near(self, num_tokens: int) -> bool:
        """Whether a request with so many tokens has reached such a length a few tokens ago."""
        return any((num_tokens - first) % self._tokens <= _LATE_TOKENS for first in self._first)


def _group_bytes(model: ModelSpec, plan: StockPlan) -> list[float]:
    """Bytes of keys and values of each group's layers in a block. States count as 0."""
    token_bytes = {
        layer_name(layer_type, layer): (
            0.0 if layer_type.is_state else layer.slot_bytes / layer_type.tokens_per_slot
        )
        for layer_type in model.layer_types
        for layer in layer_type.layers
    }
    return [
        group.kv_cache_spec.block_size * sum(token_bytes[name] for name in group.layer_names)
        for group in plan.kv_cache_config.kv_cache_groups
    ]
