"""The baseline in which an arena is divided once among the layer types."""

from collections.abc import Callable, Sequence

from jenga.admission.reserve import STEP_TOKENS
from jenga.errors import OutOfPagesError
from jenga.eviction.policy import EvictionPolicy
from jenga.geometry import Geometry, PageContent
from jenga.manager import Manager
from jenga.prefix.eviction_log import Eviction
from jenga.prefix.miss_log import Miss
from jenga.sim.arenas.baseline_geometries import StaticPartition
from jenga.sim.arenas.jenga_arena import HASH_TOKENS, bytes_of
from jenga.sim.batching.arena import NOTHING_MOVED, ActiveRequest, ArenaBytes, MovedBytes
from jenga.tables.request import PrefixHit


class PartitionedArena:
    """One manager per layer type, each with a part of the arena that no other manager can use.

    A prefix hit is as long as all managers agree on. A request runs if each manager admits it.
    """

    leaves_room = True

    def __init__(
        self,
        partition: StaticPartition,
        *,
        prefix_caching: bool = True,
        eviction_policy: Callable[[], EvictionPolicy] | None = None,
        left_share: float | None = None,
        step_tokens: float = STEP_TOKENS,
        in_flight_tokens: int = 0,
    ) -> None:
        """Make all parts, empty."""
        self._prefix_caching = prefix_caching
        self._scheduled: dict[ActiveRequest, int] = {}  # of this step -> tokens it will have
        self._passages: dict[ActiveRequest, range] = {}  # of this step -> tokens that it computes
        self._managers = [
            Manager(
                _one_type(region.content),
                num_large_pages=region.num_pages,
                prefix_caching=prefix_caching,
                hash_tokens=HASH_TOKENS,
                eviction_policy=eviction_policy() if eviction_policy else None,
                left_share=left_share,
                step_tokens=step_tokens,
                in_flight_tokens=in_flight_tokens,
            )
            for region in partition.regions
        ]
        self._others = [
            manager
            for manager, region in zip(self._managers, partition.regions, strict=True)
            if not region.content.layer_type.is_state
        ]

    @property
    def num_evicted(self) -> int:
        """See `Arena`."""
        return sum(
            each.num_pages
            for manager in self._managers
            for each in manager.cache_report().evictions
        )

    def record_evictions(self) -> None:
        """See `Memory`."""
        for manager in self._managers:
            manager.record_evictions()

    def take_evictions(self) -> list[Eviction]:
        """See `Memory`."""
        return [each for manager in self._managers for each in manager.take_evictions()]

    def take_misses(self) -> list[Miss]:
        """See `Memory`. Each part knows only its own layer type, so nothing is returned."""
        for manager in self._managers:
            manager.take_misses()
        return []

    @property
    def moved_bytes(self) -> MovedBytes:
        """See `Arena`. There is no host memory."""
        return NOTHING_MOVED

    def new_step(self) -> None:
        """See `Arena`."""
        self._scheduled.clear()
        self._passages.clear()
        for manager in self._managers:
            manager.new_step()

    def waits(self, active: ActiveRequest, *, first: bool = False) -> None:
        """See `Arena`. Nothing depends on it."""

    def refuse(self, active: ActiveRequest) -> None:
        """See `Arena`. Nothing depends on it."""

    def find(self, active: ActiveRequest) -> int:
        """See `Arena`."""
        active.found = None
        if not self._prefix_caching:
            return 0
        for scheduled, num_tokens in self._scheduled.items():
            self.settle(scheduled, num_tokens)
        self._scheduled.clear()
        # A state is worth keeping at the branch, where the other layer types' longest hit ends. A
        # longer prefix of states is of no use, so they are looked up only to there.
        branch_tokens = self._agreed(active, self._others, active.num_tokens - 1)
        hit_tokens = self._agreed(active, self._managers, branch_tokens)
        hashes = active.hashes(HASH_TOKENS)
        found: list[PrefixHit] = []
        for manager in self._managers:
            most_tokens = hit_tokens if manager in self._others else branch_tokens
            hit = manager.lookup(hashes, max_tokens=most_tokens, facts=active.facts)
            if hit.num_tokens > hit_tokens:
                # Its state lies beyond what the other layer types can go on from.
                hit = manager.lookup(hashes, max_tokens=hit_tokens, facts=active.facts)
            found.append(hit)
        active.found = found
        return hit_tokens

    def _agreed(self, active: ActiveRequest, managers: Sequence[Manager], most_tokens: int) -> int:
        """Return the longest prefix that all of some managers can go on from."""
        num_tokens, num_agreed = most_tokens, 0
        while num_agreed < len(managers):
            for manager in managers:
                hit = manager.lookup(
                    active.hashes(HASH_TOKENS), max_tokens=num_tokens, facts=active.facts
                )
                if hit.num_tokens < num_tokens:
                    num_tokens, num_agreed = hit.num_tokens, 1
                else:
                    num_agreed += 1
                if num_agreed == len(managers):
                    break
        return num_tokens

    def chunk_tokens(self, _active: ActiveRequest, _start: int, num_tokens: int) -> int:
        """See `Arena`. A chunk may have any length."""
        return num_tokens

    def rest_tokens(self, active: ActiveRequest) -> int | None:
        """See `Arena`."""
        if any(manager.was_refused(active.name) for manager in self._managers):
            return None
        if not self._prefix_caching:
            return active.num_tokens
        return active.num_tokens - self._agreed(active, self._managers, active.num_tokens - 1)

    def admit(
        self,
        active: ActiveRequest,
        hit_tokens: int,
        num_tokens: int,
        lookahead_tokens: int = 0,
    ) -> bool:
        """See `Arena`."""
        none: list[PrefixHit | None] = [None] * len(self._managers)
        hits: list[PrefixHit | None] = active.found or none
        for index, (manager, hit) in enumerate(zip(self._managers, hits, strict=True)):
            try:
                manager.allocate(
                    active.name,
                    num_tokens=num_tokens + lookahead_tokens,
                    num_processed_tokens=hit_tokens,
                    hit=hit,
                    facts=active.facts,
                    full_tokens=active.num_tokens,
                )
            except OutOfPagesError:
                for before in self._managers[:index]:
                    before.free(active.name)
                    before.take_copies()
                return False
        active.found = None
        self._scheduled[active] = num_tokens
        self._passages[active] = range(hit_tokens, num_tokens)
        return True

    def grow(self, active: ActiveRequest, num_tokens: int, lookahead_tokens: int = 0) -> bool:
        """See `Arena`."""
        start_tokens = active.num_computed
        self.settle(active, min(start_tokens, active.num_tokens))
        for manager in self._managers:
            try:
                manager.allocate(
                    active.name,
                    num_tokens=num_tokens + lookahead_tokens,
                    num_processed_tokens=active.num_processed,
                )
            except OutOfPagesError:
                return False
        self._scheduled[active] = min(num_tokens, active.num_tokens)
        if start_tokens < active.num_tokens - 1:
            self._passages[active] = range(start_tokens, num_tokens)
        return True

    def settle(self, active: ActiveRequest, num_tokens: int, *, ends_prompt: bool = False) -> None:
        """See `Arena`."""
        if self._prefix_caching:
            for manager in self._managers:
                if ends_prompt:
                    manager.keep_written(active.name)
                manager.commit(active.name, active.hashes(HASH_TOKENS), num_tokens)

    def end_step(self) -> None:
        """See `Arena`."""
        if not self._prefix_caching:
            return
        for active, passage in self._passages.items():
            for manager in self._managers:
                for num_tokens in manager.checkpoint_tokens(active.name):
                    if passage.start < num_tokens <= passage.stop:
                        prefix_hash = active.hashes(HASH_TOKENS)[num_tokens // HASH_TOKENS - 1]
                        manager.keep_state(active.name, prefix_hash, num_tokens, in_passing=True)
        for manager in self._managers:
            manager.take_copies()

    def free(self, active: ActiveRequest) -> None:
        """See `Arena`."""
        self._scheduled.pop(active, None)
        self._passages.pop(active, None)
        self.settle(active, min(active.num_computed, active.num_tokens))
        for manager in self._managers:
            manager.free(active.name)

    def memory(self, _running: list[ActiveRequest]) -> ArenaBytes:
        """See `Arena`."""
        return bytes_of(self._managers)

    def check(self) -> None:
        """See `Arena`."""
        for manager in self._managers:
            manager.check()


def _one_type(content: PageContent) -> Geometry:
    """Return a geometry whose large pages hold one small page each."""
    table = content.page_table(large_page_bytes=content.content_bytes, small_pages_per_large_page=1)
    return Geometry(name="static", large_page_bytes=content.content_bytes, page_tables=(table,))
