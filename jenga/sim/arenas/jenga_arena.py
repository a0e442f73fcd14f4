"""Arenas under `jenga.manager.Manager`: on a geometry, or with one page table for all layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

from jenga.admission.reserve import STEP_TOKENS
from jenga.arena.borrowed_pages import Lender
from jenga.errors import OutOfPagesError
from jenga.eviction.policy import EvictionPolicy
from jenga.geometry import Geometry
from jenga.manager import Manager
from jenga.policies import RequestFacts
from jenga.policies.token_budget import next_choice
from jenga.prefix.eviction_log import Eviction
from jenga.prefix.miss_log import Miss
from jenga.sim.batching.arena import NOTHING_MOVED, ActiveRequest, ArenaBytes, MovedBytes
from jenga.sim.batching.need import Need, encoder_tokens
from jenga.sim.results.rows import TableBytes
from jenga.spec import ModelSpec, TokenBudget
from jenga.state_keeper import StateKeeper, end_step
from jenga.tables.request import PrefixHit

HASH_TOKENS = 16
"""Tokens between two prefix hashes, as in the plugin."""


class _Hashes(Sequence[bytes]):
    """Hashes of a request's known tokens. They are made when read, because few ever are."""

    __slots__ = ("_active",)

    def __init__(self, active: ActiveRequest) -> None:
        self._active = active

    def __len__(self) -> int:
        return self._active.num_tokens // HASH_TOKENS

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self._active.hashes(HASH_TOKENS)[index]


class _Request:
    """A request with the attributes that `jenga.state_keeper` reads."""

    __slots__ = ("_active", "block_hashes")

    def __init__(self, active: ActiveRequest) -> None:
        self._active = active
        self.block_hashes = _Hashes(active)

    @property
    def request_id(self) -> str:
        return self._active.name

    @property
    def num_tokens(self) -> int:
        return self._active.num_tokens

    @property
    def num_in_flight_tokens(self) -> int:
        return self._active.num_in_flight


class ManagedMemory:
    """Account of the bytes of an arena under `jenga.manager.Manager`.

    Attributes:
        manager: The manager, for further questions.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager

    @property
    def num_evicted(self) -> int:
        """See `Memory`."""
        return sum(each.num_pages for each in self.manager.cache_report().evictions)

    def record_evictions(self) -> None:
        """See `Memory`."""
        self.manager.record_evictions()

    def take_evictions(self) -> list[Eviction]:
        """See `Memory`."""
        return self.manager.take_evictions()

    def take_misses(self) -> list[Miss]:
        """See `Memory`."""
        return self.manager.take_misses()

    @property
    def moved_bytes(self) -> MovedBytes:
        """See `Memory`."""
        report = self.manager.host_report()
        if report is None:
            return NOTHING_MOVED
        return MovedBytes(
            stored=report.stored_bytes, ahead=report.ahead_bytes, loaded=report.loaded_bytes
        )

    def memory(self, _running: list[ActiveRequest]) -> ArenaBytes:
        """See `Memory`."""
        return bytes_of([self.manager])

    def check(self) -> None:
        """See `Memory`."""
        self.manager.check()


class ManagedArena(ManagedMemory):
    """An arena on one geometry, driven as `jenga.vllm_plugin.scheduler.cache_manager` drives it.

    Pages of a step are committed once that step can no longer preempt a request.
    """

    leaves_room = True

    def __init__(  # noqa: PLR0913  all in which two arenas may differ
        self,
        geometry: Geometry,
        arena_bytes: int,
        *,
        prefix_caching: bool = True,
        eviction_policy: Callable[[], EvictionPolicy] | None = None,
        left_share: float | None = None,
        step_tokens: float = STEP_TOKENS,
        in_flight_tokens: int = 0,
        history_query_tokens: int = 0,
        host_bytes: int = 0,
        lender: Lender | None = None,
    ) -> None:
        """Make an empty arena with `host_bytes` of host memory.

        See `Manager` and `StateKeeper` for the other arguments.
        """
        num_host_large_pages = host_bytes // geometry.large_page_bytes
        if host_bytes and not num_host_large_pages:
            msg = (
                f"host_bytes must be 0 or hold a large page of {geometry.large_page_bytes} bytes, "
                f"got {host_bytes}"
            )
            raise ValueError(msg)
        self._prefix_caching = prefix_caching
        self._requests: dict[ActiveRequest, _Request] = {}  # running requests
        self._scheduled: dict[ActiveRequest, int] = {}  # of this step -> tokens it will have
        self._step_tokens = 0
        manager = Manager(
            geometry,
            num_large_pages=geometry.num_large_pages(arena_bytes),
            prefix_caching=prefix_caching,
            hash_tokens=HASH_TOKENS,
            eviction_policy=eviction_policy() if eviction_policy is not None else None,
            left_share=left_share,
            step_tokens=step_tokens,
            in_flight_tokens=in_flight_tokens,
            num_host_large_pages=num_host_large_pages,
            lender=lender,
        )
        super().__init__(manager)
        self._states: StateKeeper | None = None
        if prefix_caching and any(table.is_state for table in geometry.page_tables):
            self._states = StateKeeper(
                manager, hash_tokens=HASH_TOKENS, history_query_tokens=history_query_tokens
            )
        # Tokens of an output at which layers with a budget choose again, None if they never do.
        self._output_tokens: int | None = None
        for table in geometry.page_tables:
            if isinstance(table.layer_type, TokenBudget):
                self._output_tokens = table.layer_type.output_tokens or self._output_tokens

    def new_step(self) -> None:
        """See `Arena`."""
        self.manager.new_step()
        self._scheduled.clear()
        self._step_tokens = 0
        if self._states is not None:
            self._states.step_starts()

    def waits(self, active: ActiveRequest, *, first: bool = False) -> None:
        """See `Arena`."""
        if self._prefix_caching:
            self.manager.announce(
                active.name,
                _Hashes(active),
                num_tokens=active.num_tokens,
                facts=self._facts(active),
                first=first,
            )

    def _facts(self, active: ActiveRequest) -> RequestFacts:
        """Return the facts that the plugin gives: layers that choose again know the prompt's end.

        They then choose at the same tokens after a preemption.
        """
        if self._output_tokens is None:
            return active.facts
        return replace(active.facts, prompt_tokens=active.prompt_tokens)

    def refuse(self, active: ActiveRequest) -> None:
        """See `Arena`."""
        self.manager.withdraw(active.name)

    def find(self, active: ActiveRequest) -> int:
        """See `Arena`."""
        if not self._prefix_caching:
            return 0
        for scheduled, num_tokens in self._scheduled.items():
            self.settle(scheduled, num_tokens)
        self._scheduled.clear()
        most_tokens = 0 if self.manager.starts_over(active.name) else active.num_tokens - 1
        facts = self._facts(active)
        hit = self.manager.lookup(_Hashes(active), max_tokens=most_tokens, facts=facts)
        # Even a hit of no tokens says where a state is worth keeping, so it is kept, too.
        active.found = hit
        return hit.num_tokens

    def chunk_tokens(self, active: ActiveRequest, start: int, num_tokens: int) -> int:
        """See `Arena`. A chunk may have any length, but none goes past a choice of tokens."""
        if self._output_tokens is None:
            return num_tokens
        return min(
            num_tokens, next_choice(active.prompt_tokens, start, self._output_tokens) - start
        )

    def rest_tokens(self, active: ActiveRequest) -> int | None:
        """See `Arena`."""
        if not self._prefix_caching:
            return None if self.manager.was_refused(active.name) else active.num_tokens
        return self.manager.rest_tokens(
            active.name, _Hashes(active), num_tokens=active.num_tokens, facts=self._facts(active)
        )

    def admit(
        self,
        active: ActiveRequest,
        hit_tokens: int,
        num_tokens: int,
        lookahead_tokens: int = 0,
    ) -> bool:
        """See `Arena`."""
        hit: PrefixHit | None = active.found
        is_back = bool(active.num_preemptions and self._requests)
        if not self._allocates(
            active,
            num_tokens=num_tokens + lookahead_tokens,
            num_processed_tokens=hit_tokens,
            hit=hit,
            facts=self._facts(active),
            full_tokens=active.num_tokens,
            reserve_large_pages=self.manager.growth_large_pages if is_back else 0,
        ):
            return False
        active.found = None
        self._requests[active] = _Request(active)
        self._schedule(active, hit_tokens, num_tokens)
        return True

    def grow(self, active: ActiveRequest, num_tokens: int, lookahead_tokens: int = 0) -> bool:
        """See `Arena`."""
        start_tokens = active.num_computed
        # Commit pages of the step before, while windows still hold them.
        self.settle(active, min(start_tokens, active.num_tokens))
        if not self._allocates(
            active,
            num_tokens=num_tokens + lookahead_tokens,
            num_processed_tokens=active.num_processed,
        ):
            return False
        self._schedule(active, start_tokens, num_tokens)
        return True

    def _allocates(self, active: ActiveRequest, **arguments: Any) -> bool:  # noqa: ANN401
        try:
            self.manager.allocate(active.name, **arguments)
        except OutOfPagesError:
            return False
        return True

    def _schedule(self, active: ActiveRequest, start_tokens: int, end_tokens: int) -> None:
        """Record that the step computes these tokens of a request."""
        self._step_tokens += end_tokens - start_tokens
        self.settle(active, min(start_tokens, active.num_tokens))
        # This step's own tokens are committed later, because the step may still preempt a request.
        self._scheduled[active] = min(end_tokens, active.num_tokens)
        if self._states is not None:
            self._states.schedule(self._requests[active], start_tokens, end_tokens)

    def end_step(self) -> None:
        """See `Arena`."""
        end_step(self.manager, self._states, num_tokens=self._step_tokens)

    def settle(self, active: ActiveRequest, num_tokens: int, *, ends_prompt: bool = False) -> None:
        """See `Arena`."""
        if self._prefix_caching:
            if ends_prompt:
                self.manager.keep_written(active.name)
            self.manager.commit(active.name, _Hashes(active), num_tokens)

    def free(self, active: ActiveRequest) -> None:
        """See `Arena`."""
        self._scheduled.pop(active, None)
        self._requests.pop(active, None)
        self.settle(active, min(active.num_computed, active.num_tokens))
        self.manager.free(active.name)
        if self._states is not None:
            self._states.forget(active.name)


class PagedArena(ManagedArena):
    """An arena with one page table, which keeps every token in every layer.

    The manager knows no window and no state here. Used bytes are therefore counted by the model's
    layers, and tokens outside of a window count as useless.

    The manager knows no encoder either. If layers attend to an encoder's tokens, these take slots
    in every layer as all tokens do, and prefixes are not cached. The engine that the paper compares
    with does the same.
    """

    def __init__(  # noqa: PLR0913  all in which two arenas may differ
        self,
        model: ModelSpec,
        geometry: Geometry,
        arena_bytes: int,
        *,
        prefix_caching: bool = True,
        eviction_policy: Callable[[], EvictionPolicy] | None = None,
        left_share: float | None = None,
        step_tokens: float = STEP_TOKENS,
        in_flight_tokens: int = 0,
        host_bytes: int = 0,
    ) -> None:
        """Make an empty arena, for `jenga.sim.arenas.baseline_geometries.homogeneous`."""
        has_encoder = any(each.keeps_encoder_tokens for each in model.layer_types)
        super().__init__(
            geometry,
            arena_bytes,
            prefix_caching=prefix_caching and not has_encoder,
            eviction_policy=eviction_policy,
            left_share=left_share,
            step_tokens=step_tokens,
            in_flight_tokens=in_flight_tokens,
            host_bytes=0 if has_encoder else host_bytes,
        )
        self._need = Need(model)
        self._encoder_tokens = encoder_tokens(model) if has_encoder else 0

    def admit(
        self,
        active: ActiveRequest,
        hit_tokens: int,
        num_tokens: int,
        lookahead_tokens: int = 0,
    ) -> bool:
        """See `Arena`."""
        further = self._encoder_tokens
        if not further:
            return super().admit(active, hit_tokens, num_tokens, lookahead_tokens)
        return self._allocates(
            active,
            num_tokens=num_tokens + lookahead_tokens + further,
            facts=RequestFacts(prompt_tokens=active.facts.prompt_tokens + further),
            full_tokens=active.num_tokens + further,
        )

    def grow(self, active: ActiveRequest, num_tokens: int, lookahead_tokens: int = 0) -> bool:
        """See `Arena`."""
        further = self._encoder_tokens
        if not further:
            return super().grow(active, num_tokens, lookahead_tokens)
        return self._allocates(
            active,
            num_tokens=num_tokens + lookahead_tokens + further,
            num_processed_tokens=active.num_processed + further,
        )

    def memory(self, running: list[ActiveRequest]) -> ArenaBytes:
        """See `Arena`."""
        memory = super().memory(running)
        held_bytes = memory.used_bytes + memory.useless_bytes
        # A page that several requests share is used once. It is counted by its bytes.
        needed = sum(map(self._needed_bytes, running))
        used_bytes = min(held_bytes, round(needed))
        useless_bytes = held_bytes - used_bytes
        tables = {
            name: replace(table, used_bytes=used_bytes, useless_bytes=useless_bytes)
            for name, table in memory.tables.items()
        }
        return replace(memory, used_bytes=used_bytes, useless_bytes=useless_bytes, tables=tables)

    def _needed_bytes(self, active: ActiveRequest) -> float:
        if self._encoder_tokens:
            return self._need.of_tokens(max(active.num_computed, active.num_processed + 1))
        return self._need.of_step(active)


def bytes_of(managers: Sequence[Manager]) -> ArenaBytes:
    """Return the bytes that several managers, each with an arena of its own, hold together."""
    reports = [manager.memory() for manager in managers]
    tables = {
        table.name: TableBytes(
            used_bytes=table.used_bytes,
            useless_bytes=table.useless_bytes,
            cached_bytes=table.evictable_bytes,
            empty_bytes=table.empty_bytes,
        )
        for report in reports
        for table in report.tables
    }
    return ArenaBytes(
        used_bytes=sum(table.used_bytes for table in tables.values()),
        useless_bytes=sum(table.useless_bytes for table in tables.values()),
        cached_bytes=sum(table.cached_bytes for table in tables.values()),
        empty_bytes=sum(table.empty_bytes for table in tables.values()),
        unallocated_bytes=sum(report.empty_large_bytes for report in reports),
        tables=tables,
    )
