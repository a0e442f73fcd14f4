"""Prefetch: pages that an admission reads are copied from host memory before the admission.

If pages are loaded in the step that admits a request, the copies come before the kernels of that
step, and all running requests wait for them. An admission that would load much is therefore put off
while other requests run. Its pages are copied while the kernels of their steps run. They are cached
in the arena, where the request finds them. In each step, as many are copied as its kernels will
probably cover.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from jenga.arena.allocator import Allocator
from jenga.arena.ranks import LOADED_RANK
from jenga.errors import InvariantError, NotLoadedError
from jenga.page_ids import HostPageId, OwnerId, SmallPageId
from jenga.policies import ALL_PAGES
from jenga.prefix.eviction_notices import EvictionNotices
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table
from jenga.tables.request import PageCopy, PrefixHit

STEP_BYTES = 256 << 20
"""Bytes that a bus moves in ten milliseconds, which few steps are shorter than.

So many bytes are loaded during any step. Fewer bytes are not worth delaying an admission by a step.
"""

WAITING_STEPS = 16
"""Number of steps after which loaded pages that no request has read lose their high rank."""

LOADED_TOKENS = 4
"""Number of tokens whose pages are loaded while one token is computed.

Reading stored keys and values is cheaper than computing them.
"""

_OWNER = OwnerId(1 << 62)
"""Owner for which pages are taken. It is no request, since requests have small numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Pages of one page table to load.

    Attributes:
        table: The page table.
        numbers: Numbers of the pages in the page table, rising.
        keys: Keys of their content.
        sources: Pages of host memory.
    """

    table: Table
    numbers: Sequence[int]
    keys: Sequence[Hashable]
    sources: Sequence[HostPageId]


class Prefetch:
    """Puts admissions off, and orders the copies of pages that they would load."""

    __slots__ = (
        "_allocator",
        "_at_once_bytes",
        "_eviction_notices",
        "_hit",
        "_host",
        "_last",
        "_loaded",
        "_requests",
        "_reserve_large_pages",
        "_step",
        "_tables",
        "_token_bytes",
    )

    def __init__(
        self,
        allocator: Allocator,
        tables: Sequence[Table],
        host: HostCache,
        eviction_notices: EvictionNotices,
        requests: Mapping[str, object],
        *,
        at_once_bytes: int,
    ) -> None:
        """Start without an admission that is put off.

        Args:
            allocator: Allocator of the arena.
            tables: Page tables of the arena.
            host: Host memory to load from.
            eviction_notices: Told when an allocation has evicted pages.
            requests: Running requests, by name.
            at_once_bytes: Most bytes that an admission may load while other requests run.
        """
        self._allocator = allocator
        self._tables = [table for table in tables if not table.policy.is_overwritten]
        self._host = host
        self._eviction_notices = eviction_notices
        self._requests = requests
        self._at_once_bytes = at_once_bytes
        self._token_bytes = sum(table.spec.slot_bytes for table in self._tables)
        self._hit: PrefixHit | None = None
        self._step = 0
        # Step in which pages were loaded, their page table, and the pages, oldest first.
        self._loaded: deque[tuple[int, Table, list[SmallPageId]]] = deque()
        self._reserve_large_pages = 0
        self._last: tuple[str, int] = "", 0  # request put off last, and its bytes

    def refuse_unloaded(self, request_id: str, hit: PrefixHit, reserve_large_pages: int) -> None:
        """Put off an admission that has room, if running requests would wait for its loads.

        A request that was put off last, and has no less to load now, is not put off again.

        Args:
            request_id: The request to admit.
            hit: Prefix that it starts from.
            reserve_large_pages: Number of large pages left to other requests.

        Raises:
            NotLoadedError: The admission is put off.
        """
        if not self._requests or not any(hit.has_missing):
            return
        num_bytes = sum(
            len(set(hit.host_pages[table.index].values())) * table.spec.small_page_bytes
            for table in self._tables
        )
        last_id, last_bytes = self._last
        self._last = request_id, num_bytes
        if num_bytes <= self._at_once_bytes or (request_id == last_id and num_bytes >= last_bytes):
            self._last = "", 0
            return
        self._hit = hit
        self._reserve_large_pages = reserve_large_pages
        raise NotLoadedError(request_id, host_bytes=num_bytes)

    def begin_step(self) -> None:
        """Record that a step begins. No admission has been put off in it yet."""
        self._hit = None
        self._step += 1
        while self._loaded and self._loaded[0][0] < self._step - WAITING_STEPS:
            _, table, pages = self._loaded.popleft()
            stamps, rank_of = table.pages.stamps, table.pages.rank
            pages = list(dict.fromkeys(pages))
            # A page without a key was given away since. Its number may belong to another page
            # table.
            left = [
                page
                for page, key in zip(pages, table.keys_of(pages), strict=True)
                if key is not None and stamps[page] >= 0 and rank_of(page) >= LOADED_RANK
            ]
            table.pages.rerank(left, table.clock.loose_ranks(len(left)))

    def prefetch_pages(self, num_tokens: int) -> list[PageCopy]:
        """Return copies for the admission put off in this step. Their content counts as cached now.

        Args:
            num_tokens: Number of tokens that the step computes.
        """
        hit, self._hit = self._hit, None
        if hit is None:
            return []
        loads = self._choose(hit, max(STEP_BYTES, LOADED_TOKENS * num_tokens * self._token_bytes))
        needs = [0] * len(self._allocator.tables)
        for load in loads:
            needs[load.table.index] = len(load.sources)
        reserve = self._reserve_large_pages
        if not loads or not self._allocator.room(needs, reserve_large_pages=reserve).suffices:
            return []
        for load in loads:
            self._host.pin_pages(load.table, load.sources)
        taken = self._allocator.take(needs, needs, owner=_OWNER, reserve_large_pages=reserve)
        if taken is None:
            msg = f"{needs} small pages can be had and cannot"
            raise InvariantError(msg)
        self._allocator.release_claim(_OWNER)
        self._eviction_notices.deliver()
        copies: list[PageCopy] = []
        for load in loads:
            table, pages = load.table, taken[load.table.index]
            copies += self._host.prefetch_pages(table, load.sources, pages)
            if table.cache is not None:
                # One by one, because they need not follow each other in the page table.
                for page, key in zip(pages, load.keys, strict=True):
                    table.cache.insert_page(page, key)
            pages = [page for page in pages if table.keys_of([page])[0] is not None]
            table.pages.release_cached(pages, table.clock.loaded_ranks(len(pages)))
            self._loaded.append((self._step, table, pages))
        return copies

    def _choose(self, hit: PrefixHit, most_bytes: int) -> list[_Load]:
        """Choose the pages of a hit to load, which are still only in host memory.

        Args:
            hit: Prefix of the admission that was put off.
            most_bytes: Limit of the bytes to load.
        """
        loads: list[_Load] = []
        for table in self._tables:
            host_pages = hit.host_pages[table.index]
            if not host_pages or table.cache is None:
                continue
            hashes = hit.prefix_hashes[: hit.asked_tokens // table.grain.hash_tokens]
            keys = table.policy.content_keys(hit.facts, hashes, table.grain, ALL_PAGES)
            # An image that a request shows twice is loaded once.
            number_of = {keys[number]: number for number in reversed(host_pages)}
            chosen: list[tuple[int, Hashable, HostPageId]] = []
            for key, number in reversed(number_of.items()):
                source = self._host.page_of(table, key)
                if source is None or table.cache.get(key) is not None:
                    continue
                most_bytes -= table.spec.small_page_bytes
                if most_bytes < 0:
                    break
                chosen.append((number, key, source))
            if chosen:
                numbers, new_keys, sources = zip(*sorted(chosen), strict=True)
                loads.append(_Load(table=table, numbers=numbers, keys=new_keys, sources=sources))
        return loads
