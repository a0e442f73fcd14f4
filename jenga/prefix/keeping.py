"""The part of the manager that keeps content for other requests: states, hits and reports."""

from jenga.arena.allocator import Allocator
from jenga.checks import check_bytes, check_count
from jenga.geometry import Geometry
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.checkpoints import Checkpoints
from jenga.prefix.eviction_notices import Evictions
from jenga.prefix.host_cache import HostCache, HostReport
from jenga.prefix.prefetch import LoadingAhead
from jenga.prefix.start_from_hit import Hits
from jenga.prefix.write_back import SavingAhead
from jenga.tables.content_index import CacheChange
from jenga.tables.occupancy import Holdings
from jenga.tables.page_table import Table
from jenga.tables.request import PageCopy, Version
from jenga.tables.stats import CacheReport, MemoryReport, check_memory, host_table_memory


class Keeping(Holdings):
    """Running requests, and content that is cached for other requests."""

    def __init__(  # noqa: PLR0913  all parts that keep content
        self,
        geometry: Geometry,
        allocator: Allocator,
        tables: tuple[Table, ...],
        *,
        tree: CheckpointTree,
        checkpoints: Checkpoints,
        evictions: Evictions,
        host: HostCache | None,
        load_at_once_bytes: int,
        copies: list[PageCopy],
        changes: list[CacheChange],
        hash_tokens: int,
        prefix_caching: bool,
    ) -> None:
        """Start with nothing cached.

        Args:
            geometry: Sizes of large and small pages, and the page tables.
            allocator: Allocator of the arena.
            tables: Page tables of the arena.
            tree: Tree of the checkpoints.
            checkpoints: Plans and makes the checkpoints of requests.
            evictions: Told when an allocation has evicted pages.
            host: Host memory, which receives evicted pages. None if there is none.
            load_at_once_bytes: Most bytes that an admission may load from host memory while other
                requests run.
            copies: List to which copies that must be made are appended.
            changes: List to which changes of cached content are appended, if they are recorded.
            hash_tokens: Number of tokens that each further prefix hash covers.
            prefix_caching: Whether anything is cached.
        """
        super().__init__(geometry, allocator, tables)
        self._tree = tree
        self._checkpoints = checkpoints
        self._host = host
        self._evictions = evictions
        self._saving: SavingAhead | None = None
        self._loading: LoadingAhead | None = None
        if host is not None:
            self._saving = SavingAhead(tables, tree, host)
            self._loading = LoadingAhead(
                allocator,
                tables,
                host,
                self._evictions,
                self._requests,
                at_once_bytes=load_at_once_bytes,
            )
        self._copies = copies
        self._changes = changes
        self._hash_tokens = hash_tokens
        self._prefix_caching = prefix_caching
        self._hits = Hits(tables, checkpoints)
        self._step: int = 0
        self._num_losses: int = 0
        self._cache_owner = object()

    @property
    def _version(self) -> Version:
        """Value that changes whenever cached pages are lost, and that no other manager has."""
        num_losses = self._num_losses + self._tree.num_lost_bytes + self._checkpoints.num_replaced
        if self._host is not None:
            num_losses += self._host.num_lost
        return self._cache_owner, self._allocator.large_pages.num_evicted, num_losses

    @property
    def answer_interval_tokens(self) -> int:
        """Tokens of an answer after which its states are worth keeping again. 0 means never."""
        has_states = self._prefix_caching and bool(self._checkpoints.states)
        return self._checkpoints.answer_tokens if has_states else 0

    def keep_state(
        self, request_id: str, prefix_hash: bytes, num_tokens: int, *, in_passing: bool = False
    ) -> bool:
        """Keep a copy of a request's running states for other requests to start from.

        A state of the request's output replaces the state of its output before.

        Args:
            request_id: The request that has the states. One of these must hold:
                - Its last step ended at exactly `num_tokens` tokens.
                - Its last step passed `num_tokens`, and computed no more tokens than a state has
                  slots.
                - The step about to run passes `num_tokens` and writes the states on its way. The
                  copies within the arena are then not made.
            prefix_hash: Hash of those tokens.
            num_tokens: Number of tokens, a multiple of `hash_tokens`, for which the request has
                slots.
            in_passing: Whether the step about to run writes the states on its way.

        Returns:
            Whether there is a page for every copy. `take_copies` then returns the copies.

        Raises:
            ValueError: One of these holds:
                - `num_tokens` is not a positive multiple of `hash_tokens`.
                - The request has slots for fewer tokens.
                - The hash is not bytes, or is not that of its tokens.
                - Prefix caching is off.
        """
        request = self._running(request_id)
        check_count("num_tokens", num_tokens)
        if not self._prefix_caching or not num_tokens or num_tokens % self._hash_tokens:
            msg = (
                f"num_tokens must be a positive multiple of {self._hash_tokens}, with prefix "
                f"caching on, got {num_tokens}"
            )
            raise ValueError(msg)
        check_bytes("prefix_hash", prefix_hash)
        if num_tokens > request.num_tokens:
            msg = (
                f"num_tokens must be at most the {request.num_tokens} that request {request_id!r} "
                f"has slots for, got {num_tokens}"
            )
            raise ValueError(msg)
        hashes, last = request.prefix_hashes, num_tokens // self._hash_tokens - 1
        if last < len(hashes) and hashes[last] != prefix_hash:
            msg = (
                f"prefix_hash must be {hashes[last]!r}, that of the first {num_tokens} tokens of "
                f"request {request_id!r}, got {prefix_hash!r}"
            )
            raise ValueError(msg)
        return self._checkpoints.keep_state(request, prefix_hash, num_tokens, in_passing=in_passing)

    def keep_written(self, request_id: str) -> None:
        """Let other requests find a request's states that the step before has written on its way.

        `Manager.new_step` does so for all requests. An engine may call this before it, for one
        request at a time. It then knows to which request the content in `take_changes` belongs.

        Raises:
            ValueError: The request is not running.
        """
        self._checkpoints.keep_written(self._running(request_id))

    def keeps_state(self, table_index: int, prefix_hash: bytes, page: int) -> bool:
        """Whether a page still holds the state kept in it. Another state may have taken it since.

        Raises:
            ValueError: There is no such page table.
        """
        table = self._table(table_index)
        is_pending = any(
            (table_index, page) in kept
            for request in self._requests.values()
            for kept in request.pending.values()
        )
        return is_pending or table.page_of(prefix_hash) == page

    def take_copies(self) -> list[PageCopy]:
        """Return copies to make before any kernel of the next step runs, in this order."""
        copies = self._copies[:]
        self._copies.clear()
        return copies

    def load_ahead(self, num_tokens: int) -> list[PageCopy]:
        """Return copies from host memory that may run during the kernels of the step about to run.

        They bring pages for an admission that was put off (`NotLoadedError`), as many as can
        probably be copied while so many tokens are computed. Call this at most once per step, when
        the whole step is known. Call it before `take_copies`, which returns the copies that make
        room for these. Make these copies in the same way as those of `save_ahead`, and before them.

        Args:
            num_tokens: Number of tokens that the step computes.

        Raises:
            ValueError: `num_tokens` is not an integer of at least 0.
        """
        check_count("num_tokens", num_tokens)
        return self._loading.order(num_tokens) if self._loading is not None else []

    def save_ahead(self) -> list[PageCopy]:
        """Return copies to host memory that may run during the kernels of the step about to run.

        They copy content that the step after it will probably evict. Call this at most once per
        step, when the whole step is known. Content that is not copied now is copied when it is
        evicted. Begin these copies when the copies of `take_copies` are made, and finish them
        before those of the next step begin.
        """
        return self._saving.order() if self._saving is not None else []

    def take_changes(self) -> list[CacheChange]:
        """Return which content can be found, or no longer found, since the last call, in order.

        Content counts as found as soon as a new request could hit it. The list is empty if changes
        are not recorded.
        """
        changes = self._changes[:]
        self._changes.clear()
        return changes

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. While requests run, return False and forget nothing."""
        if self._requests:
            return False
        for table in self._tables:
            if table.cache is not None:
                table.cache.clear()
        self._tree.clear()
        self._allocator.large_pages.surrender_all()
        self._copies.clear()
        if self._host is not None:
            self._host.clear()
        self._num_losses += 1
        return True

    def cache_report(self) -> CacheReport:
        """Return the use of the prefix cache since start-up."""
        return self._hits.report()

    def host_report(self) -> HostReport | None:
        """Return the content and traffic of host memory. None if there is none."""
        return self._host.report() if self._host is not None else None

    def host_memory(self) -> MemoryReport | None:
        """Return where every byte of host memory is. None if there is none."""
        if self._host is None:
            return None
        allocator, large_page_bytes = self._host.allocator, self.geometry.large_page_bytes
        return MemoryReport(
            tables=tuple(host_table_memory(table, allocator) for table in self._tables),
            empty_large_bytes=allocator.large_pages.num_empty * large_page_bytes,
            null_bytes=large_page_bytes,
        )

    def check(self) -> None:
        """Raise `InvariantError` unless the records agree, of the arena and of host memory."""
        super().check()
        if self._host is not None and (memory := self.host_memory()) is not None:
            self._host.check()
            num_large_pages = self._host.allocator.large_pages.num_pages
            check_memory(memory, num_large_pages * self.geometry.large_page_bytes)
