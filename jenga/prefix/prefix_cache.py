"""The prefix cache: all content that outlives its request, in the arena and in host memory."""

from collections.abc import Mapping, Sequence

from jenga.arena.allocator import Allocator
from jenga.checks import check_bytes
from jenga.eviction.policy import EvictionPolicy
from jenga.geometry import Geometry
from jenga.policies import RequestFacts
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.checkpoints import Checkpoints
from jenga.prefix.copy_orders import CopyOrders
from jenga.prefix.eviction_log import EvictionLog
from jenga.prefix.eviction_notices import EvictionNotices
from jenga.prefix.host_cache import HostCache
from jenga.prefix.lookup import longest_prefix
from jenga.prefix.miss_log import MissLog
from jenga.prefix.prefetch import Prefetch
from jenga.prefix.start_from_hit import HitStarts
from jenga.prefix.write_back import WriteBack
from jenga.tables.content_index import ChangeLog
from jenga.tables.page_table import Table
from jenga.tables.request import PrefixHit, Request, Version


class PrefixCache:
    """Finds cached prefixes, and keeps the content of requests for others.

    Attributes:
        is_on: Whether anything is cached.
        copies: Copies that must be made before the next step.
        host: Host memory, which receives evicted pages. None if there is none.
        tree: Tree of the checkpoints.
        eviction_notices: Told when an allocation has evicted pages.
        checkpoints: Plans and makes the checkpoints of requests.
        hits: Gives requests the pages of their hits.
        write_back: Copies pages to host memory before they are evicted. None without host memory.
        prefetch: Loads pages of host memory before an admission. None without host memory.
    """

    __slots__ = (
        "_ahead_tokens",
        "_hash_tokens",
        "_large_pages",
        "_num_losses",
        "_owner",
        "_tables",
        "checkpoints",
        "copies",
        "eviction_notices",
        "hits",
        "host",
        "is_on",
        "prefetch",
        "tree",
        "write_back",
    )

    def __init__(  # noqa: PLR0913  all options of a cache
        self,
        geometry: Geometry,
        allocator: Allocator,
        tables: Sequence[Table],
        requests: Mapping[str, Request],
        *,
        is_on: bool,
        eviction_policy: EvictionPolicy,
        hash_tokens: int,
        ahead_tokens: int,
        answer_tokens: int,
        num_host_large_pages: int,
        load_at_once_bytes: int,
        changes: ChangeLog | None,
    ) -> None:
        """Start with nothing cached.

        Args:
            geometry: Sizes of large and small pages, and the page tables.
            allocator: Allocator of the arena. It evicts checkpoints of this cache.
            tables: Page tables of the arena.
            requests: Running requests, by name. Only the manager changes them.
            is_on: Whether anything is cached.
            eviction_policy: Says what checkpoints are worth.
            hash_tokens: Number of tokens that each further prefix hash covers.
            ahead_tokens: Number of tokens after a prefix that must be cached with it.
            answer_tokens: Number of tokens between two kept states of an answer. 0 keeps none.
            num_host_large_pages: Number of large pages of host memory. 0 means no host memory.
            load_at_once_bytes: Most bytes that an admission may load from host memory while other
                requests run.
            changes: Records changes of cached content. None records no changes.

        Raises:
            ValueError: Host memory is given, but `is_on` is false, or it is too small.
        """
        self.is_on = is_on
        self._hash_tokens = hash_tokens
        self._ahead_tokens = ahead_tokens
        self._tables = tables
        self._large_pages = allocator.large_pages
        self._num_losses = 0
        self._owner = object()
        self.copies = CopyOrders()
        self.host: HostCache | None = None
        if num_host_large_pages:
            if not is_on:
                msg = "num_host_large_pages must be 0 where prefix_caching is off"
                raise ValueError(msg)
            self.host = HostCache(
                tables, self.copies, num_large_pages=num_host_large_pages, changes=changes
            )
        self.tree = CheckpointTree(
            tables,
            eviction_policy,
            hash_tokens=hash_tokens,
            ahead_tokens=ahead_tokens,
            arena_bytes=allocator.large_pages.num_pages * geometry.large_page_bytes,
            host=self.host,
        )
        allocator.large_pages.evictor = self.tree.evict_one
        self.eviction_notices = EvictionNotices(allocator, tables, self.host)
        self.checkpoints = Checkpoints(
            tables,
            allocator,
            self.tree,
            self.eviction_notices,
            self.copies,
            hash_tokens=hash_tokens,
            answer_tokens=answer_tokens,
            ahead_tokens=ahead_tokens,
            host=self.host,
        )
        self.hits = HitStarts(tables, self.checkpoints)
        self.write_back: WriteBack | None = None
        self.prefetch: Prefetch | None = None
        if self.host is not None:
            self.write_back = WriteBack(tables, self.tree, self.host)
            self.prefetch = Prefetch(
                allocator,
                tables,
                self.host,
                self.eviction_notices,
                requests,
                at_once_bytes=load_at_once_bytes,
            )

    def begin_step(self) -> None:
        """Record that the engine begins a step."""
        self.checkpoints.begin_step()
        if self.prefetch is not None:
            self.prefetch.begin_step()

    # HitStarts

    @property
    def _version(self) -> Version:
        """Value that changes whenever cached pages are lost, and that no other cache has."""
        num_losses = self._num_losses + self.tree.num_lost_bytes + self.checkpoints.num_replaced
        if self.host is not None:
            num_losses += self.host.num_lost
        return Version(self._owner, self._large_pages.num_evicted, num_losses)

    def find_prefix(
        self, prefix_hashes: Sequence[bytes], facts: RequestFacts, *, max_tokens: int
    ) -> PrefixHit:
        """Find the longest cached prefix, as `Manager.lookup` does with checked arguments."""
        return longest_prefix(
            self._tables,
            prefix_hashes if self.is_on else (),
            facts,
            max_tokens=max_tokens,
            ahead_tokens=self._ahead_tokens,
            host=self.host,
            version=self._version,
        )

    def check_hit(self, hit: PrefixHit) -> None:
        """Refuse a hit whose pages are no longer those that a lookup finds.

        Raises:
            ValueError: The hit is of another manager, or its pages were lost since.
        """
        if hit.version.cache is not self._owner:
            msg = "hit must have been looked up in this manager, got one of another"
            raise ValueError(msg)
        if hit.version != self._version:
            again = self.find_prefix(hit.prefix_hashes, hit.facts, max_tokens=hit.asked_tokens)
            if (again.num_tokens, again.pages, again.host_pages) != (
                hit.num_tokens,
                hit.pages,
                hit.host_pages,
            ):
                msg = (
                    f"hit must be looked up again: of its {hit.num_tokens} tokens "
                    f"{again.num_tokens} are still cached, or in other pages"
                )
                raise ValueError(msg)

    def record_loss(self) -> None:
        """Record that cached pages were lost, so that earlier hits are looked up again."""
        self._num_losses += 1

    # Content of running requests

    @property
    def answer_interval_tokens(self) -> int:
        """Tokens of an answer after which its states are worth keeping again. 0 means never."""
        return self.checkpoints.answer_tokens if self.is_on and self.checkpoints.states else 0

    def index_pages(
        self, request: Request, prefix_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        """Let other requests find the full pages of a request's first tokens.

        Args:
            request: The request.
            prefix_hashes: Hash i covers its first `(i + 1) * hash_tokens` tokens.
            num_tokens: Number of tokens whose content is final.
        """
        # Images have keys of their own. They are found even if few tokens are hashed.
        facts, committed = request.facts, request.pages.num_committed
        for index, table in enumerate(self._tables):
            end = table.policy.final_pages(facts, num_tokens, table.grain)
            start = committed[index]
            if end > start:
                if table.commit_pages(request, prefix_hashes, end):
                    self._num_losses += 1
                if table.policy.names_images:
                    self.checkpoints.keep_images(request, table, start)

    def keep_state(
        self,
        request_id: str,
        request: Request,
        prefix_hash: bytes,
        num_tokens: int,
        *,
        in_passing: bool,
    ) -> bool:
        """Keep a copy of a request's running states. See `Manager.keep_state`."""
        unit = self.tree.align_tokens
        if not self.is_on or not num_tokens or num_tokens % unit:
            msg = (
                f"num_tokens must be a positive multiple of {unit}, of hash_tokens and of whole "
                f"pages, with prefix caching on, got {num_tokens}"
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
        return self.checkpoints.keep_state(request, prefix_hash, num_tokens, in_passing=in_passing)

    # The cache as a whole

    def record_evictions(self) -> None:
        """Record lost checkpoints and look-ups from now on."""
        if self.tree.log is None:
            misses = MissLog(self._tables, self.host, hash_tokens=self._hash_tokens)
            self.tree.log = self.eviction_notices.log = EvictionLog(misses)

    def clear(self) -> None:
        """Forget all cached content. No request may run."""
        for table in self._tables:
            if table.cache is not None:
                table.cache.clear()
        self.tree.clear()
        self._large_pages.close_reclaimable()
        self.copies.cancel_copies()
        if self.host is not None:
            self.host.clear()
        if self.tree.log is not None:
            self.tree.log.misses.clear()
        self._num_losses += 1

    def check(self) -> None:
        """Raise `InvariantError` unless the tree agrees with its pages, and host memory too."""
        if self.host is not None:
            self.host.check()
        if self.is_on:
            self.tree.check()
