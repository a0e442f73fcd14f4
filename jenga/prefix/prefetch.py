"""What an admission reads from host memory, brought to the arena before the request comes in.

What is loaded for a request in the step that admits it stands between that step and its kernels,
and all that run wait for it. So an admission that would load much is put off while others run. Its
pages are copied beside the kernels of their steps, to where they are cached and the request finds
them; as many in each step as its kernels are likely to take the time for.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from jenga.arena.allocator import Allocator
from jenga.arena.ranks import LOADED_RANK
from jenga.errors import InvariantError, NotLoadedError
from jenga.policies import ALL_PAGES
from jenga.prefix.eviction_notices import Evictions
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table
from jenga.tables.request import PageCopy, PrefixHit, is_on_host

STEP_BYTES = 256 << 20
"""What a bus moves in ten milliseconds, which few steps take less than.

So much is loaded beside any step, and less than that is not worth a step's delay.
"""

WAITING_STEPS = 16
"""Steps after which loaded pages that no request has read are not kept for one any more."""

LOADED_TOKENS = 4
"""Tokens whose pages are loaded while one is computed: to read what layers store is cheaper."""

_OWNER = 1 << 62
"""For whom pages are taken: no request, which have small numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What is loaded of one page table.

    Attributes:
        table: The page table.
        numbers: Of the pages, rising.
        keys: Of their content.
        sources: The pages of host memory.
    """

    table: Table
    numbers: Sequence[int]
    keys: Sequence[Hashable]
    sources: Sequence[int]


class LoadingAhead:
    """Puts admissions off, and orders what they would load."""

    __slots__ = (
        "_allocator",
        "_at_once_bytes",
        "_evictions",
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
        evictions: Evictions,
        requests: Mapping[str, object],
        *,
        at_once_bytes: int,
    ) -> None:
        """Nobody was put off.

        Args:
            allocator: Books of the arena.
            tables: Its page tables.
            host: What is loaded from.
            evictions: Told of what makes room.
            requests: Those that run.
            at_once_bytes: What an admission may load while others run.
        """
        self._allocator = allocator
        self._tables = [table for table in tables if not table.policy.is_overwritten]
        self._host = host
        self._evictions = evictions
        self._requests = requests
        self._at_once_bytes = at_once_bytes
        self._token_bytes = sum(table.spec.slot_bytes for table in self._tables)
        self._hit: PrefixHit | None = None
        self._step = 0
        # What was loaded lately, and in which step.
        self._loaded: deque[tuple[int, Table, list[int]]] = deque()
        self._reserve_large_pages = 0
        self._last: tuple[str, int] = "", 0  # who was put off last, and how much it was to load

    def check(self, request_id: str, hit: PrefixHit, reserve_large_pages: int) -> None:
        """Put an admission off for which there is room, if others would wait for what it loads.

        One that was put off and has no less to load now is not put off again.

        Args:
            request_id: Who comes in.
            hit: What it starts from.
            reserve_large_pages: Large pages left to others.

        Raises:
            NotLoadedError: It is put off.
        """
        if not self._requests or not any(hit.has_missing):
            return
        num_bytes = sum(
            sum(map(is_on_host, set(hit.pages[table.index]))) * table.spec.small_page_bytes
            for table in self._tables
            if hit.has_missing[table.index]
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
        """Record that a step begins, for which nobody was put off."""
        self._hit = None
        self._step += 1
        while self._loaded and self._loaded[0][0] < self._step - WAITING_STEPS:
            _, table, pages = self._loaded.popleft()
            stamps, rank_of = table.pages.stamps, table.pages.rank
            pages = list(dict.fromkeys(pages))
            # A page without a key was given away since: its number may be of another page table.
            left = [
                page
                for page, key in zip(pages, table.keys_of(pages), strict=True)
                if key is not None and stamps[page] >= 0 and rank_of(page) >= LOADED_RANK
            ]
            table.pages.rerank(left, table.clock.loose(len(left)))

    def order(self, num_tokens: int) -> list[PageCopy]:
        """Copies of what was put off in this step, or of a part of it; cached from now on.

        Args:
            num_tokens: That the step computes.
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
            self._host.hold(load.table, load.sources)
        taken = self._allocator.take(needs, needs, owner=_OWNER, reserve_large_pages=reserve)
        if taken is None:
            msg = f"{needs} small pages can be had and cannot"
            raise InvariantError(msg)
        self._allocator.disown(_OWNER)
        self._evictions.note()
        copies: list[PageCopy] = []
        for load in loads:
            table, pages = load.table, taken[load.table.index]
            copies += self._host.load_ahead(table, load.sources, pages)
            if table.cache is not None:
                # One by one: they need not be pages in a row.
                for page, key in zip(pages, load.keys, strict=True):
                    table.cache.enter_page(page, key)
            pages = [page for page in pages if table.keys_of([page])[0] is not None]
            table.pages.retire(pages, table.clock.loaded(len(pages)))
            self._loaded.append((self._step, table, pages))
        return copies

    def _choose(self, hit: PrefixHit, most_bytes: int) -> list[_Load]:
        """What to load of a hit: what is still there, and nowhere else by now."""
        loads: list[_Load] = []
        for table in self._tables:
            marks = hit.pages[table.index]
            if not hit.has_missing[table.index] or table.cache is None:
                continue
            hashes = hit.prefix_hashes[: hit.asked_tokens // table.grain.hash_tokens]
            keys = table.policy.content_keys(hit.facts, hashes, table.grain, ALL_PAGES)
            # An image that a request shows twice is loaded once.
            number_of = {
                keys[number]: number
                for number in reversed(range(len(marks)))
                if is_on_host(marks[number])
            }
            chosen: list[tuple[int, Hashable, int]] = []
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
