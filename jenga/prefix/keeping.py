"""What an arena keeps for other requests than those that run: states, hits, and what they cost."""

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
    """Running requests, and what is cached for others beside them."""

    def __init__(  # noqa: PLR0913  all that is kept, and where
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
        """Nothing kept.

        Args:
            geometry: How the arena is cut.
            allocator: Books of its pages.
            tables: Its page tables.
            tree: What is kept for others.
            checkpoints: Where requests leave it.
            evictions: Told of what makes room.
            host: Where evicted pages go, if they do not go for good.
            load_at_once_bytes: What an admission may load from there while others run.
            copies: To which copies are added that are to be made.
            changes: To which changes of what can be found are added, if they are.
            hash_tokens: Tokens that each further prefix hash covers.
            prefix_caching: Whether anything is kept.
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
        """Changes whenever cached pages are lost, and is no other manager's."""
        num_losses = self._num_losses + self._tree.num_lost_bytes + self._checkpoints.num_replaced
        if self._host is not None:
            num_losses += self._host.num_lost
        return self._cache_owner, self._allocator.large_pages.num_evicted, num_losses

    @property
    def answer_interval_tokens(self) -> int:
        """Tokens of an answer after which its states are worth keeping again; 0 if never."""
        has_states = self._prefix_caching and bool(self._checkpoints.states)
        return self._checkpoints.answer_tokens if has_states else 0

    def keep_state(
        self, request_id: str, prefix_hash: bytes, num_tokens: int, *, in_passing: bool = False
    ) -> bool:
        """Keep a copy of a request's running states for others to start from.

        A state of what it generates takes the place of the one before.

        Args:
            request_id: Whose states. Its last step ended at exactly `num_tokens` tokens, or passed
                there with no more tokens than a state has slots, or the one about to run passes
                there and writes them on its way; then the copies within the arena are not made.
            prefix_hash: Hash of those tokens.
            num_tokens: A multiple of `hash_tokens`, no more than the request has slots for.
            in_passing: Whether the step about to run writes them on its way.

        Returns:
            Whether there is a page for every copy; `take_copies` has them then.

        Raises:
            ValueError: The tokens are no multiple of `hash_tokens`, the request has slots for
                fewer, the hash is not bytes or not that of its tokens, or nothing is cached.
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
        """Let others find a request's states that the step before was to write on its way.

        `Manager.new_step` does so for all requests. Engines ask before it, one request at a time,
        where they have to know whose content `take_changes` names.

        Raises:
            ValueError: The request is not running.
        """
        self._checkpoints.keep_written(self._running(request_id))

    def keeps_state(self, table_index: int, prefix_hash: bytes, page: int) -> bool:
        """Whether a page still holds the state kept in it: another one may have taken it since.

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
        """Copies to make before any kernel of the next step runs, in this order."""
        copies = self._copies[:]
        self._copies.clear()
        return copies

    def load_ahead(self, num_tokens: int) -> list[PageCopy]:
        """Copies from host memory that may be made beside the kernels of the step about to run.

        Of what an admission reads that was put off for it (`NotLoadedError`), as much as is likely
        to be copied beside so many tokens: asked when all of a step is known, once at most, and
        before `take_copies`, which has what makes room for it. They are made as those of
        `save_ahead`, and before them.

        Args:
            num_tokens: That the step computes.

        Raises:
            ValueError: They are no integer of at least 0.
        """
        check_count("num_tokens", num_tokens)
        return self._loading.order(num_tokens) if self._loading is not None else []

    def save_ahead(self) -> list[PageCopy]:
        """Copies to host memory that may be made beside the kernels of the step about to run.

        Of what the step after it is likely to evict: asked when all of a step is known, once at
        most; what is not copied then is copied when it is evicted. They are to begin when the
        copies of `take_copies` are made, and to be over before those of the next step begin.
        """
        return self._saving.order() if self._saving is not None else []

    def take_changes(self) -> list[CacheChange]:
        """What can be found since the last call, and what no longer, in order.

        Content counts as found as soon as a request that comes in now could hit it. Where none is
        recorded, none is said to have changed.
        """
        changes = self._changes[:]
        self._changes.clear()
        return changes

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and nothing forgotten, while requests run."""
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
        """What prefix hits brought since start-up."""
        return self._hits.report()

    def host_report(self) -> HostReport | None:
        """What host memory holds and brought; None where there is none."""
        return self._host.report() if self._host is not None else None

    def host_memory(self) -> MemoryReport | None:
        """Where every byte of host memory is; None where there is none."""
        if self._host is None:
            return None
        allocator, large_page_bytes = self._host.allocator, self.geometry.large_page_bytes
        return MemoryReport(
            tables=tuple(host_table_memory(table, allocator) for table in self._tables),
            empty_large_bytes=allocator.large_pages.num_empty * large_page_bytes,
            null_bytes=large_page_bytes,
        )

    def check(self) -> None:
        """Raise `InvariantError` unless the books of the arena agree, and those of host memory."""
        super().check()
        if self._host is not None and (memory := self.host_memory()) is not None:
            self._host.check()
            num_large_pages = self._host.allocator.large_pages.num_pages
            check_memory(memory, num_large_pages * self.geometry.large_page_bytes)
