"""Arenas under `jenga.manager.Manager`: on one geometry, or divided among the layer types."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

from jenga.admission import STEP_TOKENS
from jenga.errors import OutOfPagesError
from jenga.eviction.policy import EvictionPolicy
from jenga.geometry import Geometry
from jenga.manager import Manager
from jenga.policies import RequestFacts
from jenga.request import PrefixHit
from jenga.sim.arena import NOTHING_MOVED, ActiveRequest, ArenaBytes, MovedBytes
from jenga.sim.need import Need, encoder_tokens
from jenga.sim.rows import TableBytes
from jenga.spec import CrossAttention, ModelSpec, State

HASH_TOKENS = 16
"""Tokens of each further prefix hash, as in the plugin."""


class _Hashes(Sequence[bytes]):
    """Hashes of the tokens that a request has so far, made when they are read, as few ever are."""

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


class ManagedArena:
    """An arena on one geometry, driven as the plugin drives it.

    Pages become known to others once their step can lose no request any more. States are kept
    wherever the manager asks for them inside a chunk, as the package's kernels can.

    Attributes:
        manager: The manager, for questions.
    """

    def __init__(  # noqa: PLR0913  all in which two arenas may differ
        self,
        geometry: Geometry,
        arena_bytes: int,
        *,
        prefix_caching: bool = True,
        eviction_policy: Callable[[], EvictionPolicy] | None = None,
        left_share: float | None = None,
        step_tokens: float = STEP_TOKENS,
        host_bytes: int = 0,
    ) -> None:
        """An empty arena, with so many bytes of host memory beside it; see `Manager`."""
        num_host_large_pages = host_bytes // geometry.large_page_bytes
        if host_bytes and not num_host_large_pages:
            msg = (
                f"host_bytes must be 0 or hold a large page of {geometry.large_page_bytes} bytes, "
                f"got {host_bytes}"
            )
            raise ValueError(msg)
        self._prefix_caching = prefix_caching
        self._scheduled: dict[ActiveRequest, int] = {}  # of this step -> tokens it will have
        self._step_tokens = 0
        self.manager = Manager(
            geometry,
            num_large_pages=geometry.num_large_pages(arena_bytes),
            prefix_caching=prefix_caching,
            hash_tokens=HASH_TOKENS,
            eviction_policy=eviction_policy() if eviction_policy is not None else None,
            left_share=left_share,
            step_tokens=step_tokens,
            num_host_large_pages=num_host_large_pages,
        )
        self._answer_tokens = self.manager.answer_interval_tokens
        # The states after so many of the last tokens are in slots of their own.
        self._state_slots = min(
            (
                table.layer_type.slots_per_request
                for table in geometry.page_tables
                if isinstance(table.layer_type, State)
            ),
            default=0,
        )

    @property
    def num_evicted(self) -> int:
        """See `Arena`."""
        return sum(each.num_pages for each in self.manager.cache_report().evictions)

    @property
    def moved_bytes(self) -> MovedBytes:
        """See `Arena`."""
        report = self.manager.host_report()
        if report is None:
            return NOTHING_MOVED
        return MovedBytes(
            stored=report.stored_bytes, ahead=report.ahead_bytes, loaded=report.loaded_bytes
        )

    def new_step(self) -> None:
        """See `Arena`."""
        self._scheduled.clear()
        self._step_tokens = 0
        self.manager.new_step()

    def waits(self, active: ActiveRequest, *, first: bool = False) -> None:
        """See `Arena`."""
        if self._prefix_caching:
            self.manager.announce(
                active.name,
                _Hashes(active),
                num_tokens=active.num_tokens,
                facts=active.facts,
                first=first,
            )

    def refuse(self, active: ActiveRequest) -> None:
        """See `Arena`."""
        self.manager.withdraw(active.name)

    def find(self, active: ActiveRequest) -> int:
        """See `Arena`."""
        if not self._prefix_caching:
            return 0
        for scheduled, num_tokens in self._scheduled.items():
            self.manager.commit(scheduled.name, scheduled.hashes(HASH_TOKENS), num_tokens)
        self._scheduled.clear()
        most_tokens = 0 if self.manager.starts_over(active.name) else active.num_tokens - 1
        hit = self.manager.lookup(
            active.hashes(HASH_TOKENS), max_tokens=most_tokens, facts=active.facts
        )
        # A hit of no tokens says all the same where a state is worth keeping.
        active.found = hit
        return hit.num_tokens

    def chunk_tokens(self, _active: ActiveRequest, _start: int, num_tokens: int) -> int:
        """See `Arena`: any chunk will do."""
        return num_tokens

    def admit(self, active: ActiveRequest, hit_tokens: int, num_tokens: int) -> bool:
        """See `Arena`."""
        hit: PrefixHit | None = active.found
        try:
            self.manager.allocate(
                active.name,
                num_tokens=num_tokens,
                num_processed_tokens=hit_tokens,
                hit=hit,
                facts=active.facts,
                full_tokens=active.num_tokens,
                reserve_large_pages=(
                    self.manager.growth_large_pages if active.num_preemptions else 0
                ),
            )
        except OutOfPagesError:
            return False
        active.found = None
        self._scheduled[active] = num_tokens
        self._step_tokens += num_tokens - hit_tokens
        return True

    def grow(self, active: ActiveRequest, num_tokens: int) -> bool:
        """See `Arena`."""
        processed_tokens = active.num_computed
        if self._prefix_caching:
            # Before windows give up pages of the step before.
            self.manager.commit(active.name, active.hashes(HASH_TOKENS), processed_tokens)
            if self._answer_tokens and processed_tokens > active.prompt_tokens:
                self._keep_answer(active, processed_tokens)
        try:
            self.manager.allocate(
                active.name, num_tokens=num_tokens, num_processed_tokens=processed_tokens
            )
        except OutOfPagesError:
            return False
        self._scheduled[active] = min(num_tokens, active.num_tokens)
        self._step_tokens += num_tokens - processed_tokens
        return True

    def _keep_answer(self, active: ActiveRequest, num_tokens: int) -> None:
        """Keep the states of what a request generates, if a slot of it has one worth keeping."""
        past_tokens = num_tokens % self._answer_tokens
        if past_tokens < self._state_slots and num_tokens - past_tokens > active.prompt_tokens:
            kept_tokens = num_tokens - past_tokens
            prefix_hash = active.hashes(HASH_TOKENS)[kept_tokens // HASH_TOKENS - 1]
            self.manager.keep_state(active.name, prefix_hash, kept_tokens)
            self.manager.take_copies()

    def end_step(self) -> None:
        """See `Arena`."""
        self.manager.load_ahead(self._step_tokens)
        self.manager.save_ahead()

    def computed(self, active: ActiveRequest, start: int, end: int) -> None:
        """See `Arena`."""
        if not self._prefix_caching:
            return
        for num_tokens in self.manager.checkpoint_tokens(active.name):
            if start < num_tokens <= end:
                prefix_hash = active.hashes(HASH_TOKENS)[num_tokens // HASH_TOKENS - 1]
                self.manager.keep_state(active.name, prefix_hash, num_tokens)
        self.manager.take_copies()

    def free(self, active: ActiveRequest) -> None:
        """See `Arena`."""
        self._scheduled.pop(active, None)
        if self._prefix_caching:
            self.manager.commit(active.name, active.hashes(HASH_TOKENS), active.num_computed)
        self.manager.free(active.name)

    def memory(self, _running: list[ActiveRequest]) -> ArenaBytes:
        """See `Arena`."""
        return bytes_of([self.manager])

    def check(self) -> None:
        """See `Arena`."""
        self.manager.check()


class PagedArena(ManagedArena):
    """An arena of one page table that keeps every token of every layer.

    The manager knows no window and no state here, so what is of use is counted by the model's
    layers: tokens outside of a window are held for nothing. It knows no encoder either: where
    layers attend to an encoder's tokens, these take slots in every layer as all tokens do, and
    prefixes are not cached, as in the engine that the paper compares with.
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
        host_bytes: int = 0,
    ) -> None:
        """An empty arena; the geometry is `jenga.baselines.homogeneous`."""
        has_encoder = any(isinstance(each, CrossAttention) for each in model.layer_types)
        super().__init__(
            geometry,
            arena_bytes,
            prefix_caching=prefix_caching and not has_encoder,
            eviction_policy=eviction_policy,
            left_share=left_share,
            step_tokens=step_tokens,
            host_bytes=0 if has_encoder else host_bytes,
        )
        self._need = Need(model)
        self._encoder_tokens = encoder_tokens(model) if has_encoder else 0

    def admit(self, active: ActiveRequest, hit_tokens: int, num_tokens: int) -> bool:
        """See `Arena`."""
        further = self._encoder_tokens
        if not further:
            return super().admit(active, hit_tokens, num_tokens)
        return self._allocates(
            active,
            num_tokens=num_tokens + further,
            facts=RequestFacts(prompt_tokens=active.facts.prompt_tokens + further),
            full_tokens=active.num_tokens + further,
        )

    def grow(self, active: ActiveRequest, num_tokens: int) -> bool:
        """See `Arena`."""
        further = self._encoder_tokens
        if not further:
            return super().grow(active, num_tokens)
        return self._allocates(
            active,
            num_tokens=num_tokens + further,
            num_processed_tokens=active.num_computed + further,
        )

    def _allocates(self, active: ActiveRequest, **arguments: Any) -> bool:  # noqa: ANN401
        try:
            self.manager.allocate(active.name, **arguments)
        except OutOfPagesError:
            return False
        return True

    def memory(self, running: list[ActiveRequest]) -> ArenaBytes:
        """See `Arena`."""
        memory = super().memory(running)
        held_bytes = memory.used_bytes + memory.useless_bytes
        # A page shared by several requests is used once, and can only be counted by its bytes.
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
            return self._need.of_tokens(active.num_computed + max(1, active.num_scheduled))
        return self._need.of_step(active)


def bytes_of(managers: Sequence[Manager]) -> ArenaBytes:
    """What several managers, each with an arena of its own, hold together."""
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
