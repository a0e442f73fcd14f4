"""Reports of the manager: where every byte of the arena is, and what the cache saved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jenga.arena.allocator import Allocator
from jenga.errors import InvariantError
from jenga.page_ids import SmallPageId
from jenga.tables.page_table import Table
from jenga.tables.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Bytes of the large pages that one page table holds.

    Attributes:
        name: Name of the page table.
        used_bytes: Slots that the next token of a running request reads or writes.
        useless_bytes: Rest of the used small pages: padding, slots not written yet, and slots
            outside every window.
        evictable_bytes: Cached small pages that no running request uses.
        empty_bytes: Small pages that hold nothing.
    """

    name: str
    used_bytes: int
    useless_bytes: int
    evictable_bytes: int
    empty_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes of all large pages that the page table holds."""
        return self.used_bytes + self.useless_bytes + self.evictable_bytes + self.empty_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of the arena. They add up to `arena_bytes` exactly.

    Attributes:
        tables: Bytes that each page table holds.
        empty_large_bytes: Large pages that no page table holds.
        null_bytes: The null page, which is never handed out.
    """

    tables: tuple[TableMemory, ...]
    empty_large_bytes: int
    null_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Bytes of all large pages."""
        held_bytes = sum(table.held_bytes for table in self.tables)
        return held_bytes + self.empty_large_bytes + self.null_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that the next tokens need, in all page tables."""
        return sum(table.used_bytes for table in self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargePageCounts:
    """Number of large pages in each state. With the null page they make up the arena.

    Attributes:
        free: Large pages that no page table holds.
        held: Large pages in which a running request uses a small page.
        cached: Large pages that a page table holds, and in which no running request uses a small
            page.
    """

    free: int
    held: int
    cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictions:
    """Number of small pages of one page table that lost their cached content, by cause.

    Attributes:
        name: Name of the page table.
        alone: Evicted one by one, for a page of the same page table.
        own_large: Evicted with their large page, for the same page table.
        foreign_large: Evicted with their large page, for another page table.
        with_checkpoint: Emptied with the last checkpoint that needed them.
    """

    name: str
    alone: int
    own_large: int
    foreign_large: int
    with_checkpoint: int

    @property
    def num_pages(self) -> int:
        """Number of small pages of all causes."""
        return self.alone + self.own_large + self.foreign_large + self.with_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Use of the prefix cache since start-up.

    Attributes:
        asked_tokens: Number of tokens that admitted requests looked up.
        hit_tokens: Number of these tokens that were found.
        limited_tokens: Name of a page table -> tokens missed because it allowed no longer prefix.
        kept_states: Number of times that a request's states were copied for other requests.
        read_states: Number of times that a request started from such a copy.
        evictions: Evicted small pages of each page table.
    """

    asked_tokens: int
    hit_tokens: int
    limited_tokens: Mapping[str, int]
    kept_states: int
    read_states: int
    evictions: tuple[Evictions, ...]


def check_memory(memory: MemoryReport, arena_bytes: int) -> None:
    """Raise `InvariantError` unless a report's bytes add up to the arena and none are negative.

    Args:
        memory: The report.
        arena_bytes: Bytes of the whole arena.
    """
    parts = [memory.empty_large_bytes, memory.null_bytes]
    for table in memory.tables:
        parts += [table.used_bytes, table.useless_bytes, table.evictable_bytes, table.empty_bytes]
    if sum(parts) != arena_bytes or min(parts) < 0:
        msg = f"the memory report does not divide the {arena_bytes} bytes of the arena: {memory}"
        raise InvariantError(msg)


def table_memory(table: Table, requests: Iterable[Request]) -> TableMemory:
    """Return where the bytes of a page table's large pages are.

    Args:
        table: The page table.
        requests: All running requests.
    """
    spec, pages = table.spec, table.pages
    slot_bytes = spec.payload_bytes // spec.tokens_per_page
    num_slots = pages.num_used * spec.tokens_per_page - _count_dead_slots(table, requests)
    num_empty = pages.num_large * pages.pages_per_large - pages.num_used - pages.num_evictable
    return TableMemory(
        name=spec.name,
        used_bytes=num_slots * slot_bytes,
        useless_bytes=pages.num_used * spec.small_page_bytes - num_slots * slot_bytes,
        evictable_bytes=pages.num_evictable * spec.small_page_bytes,
        empty_bytes=num_empty * spec.small_page_bytes,
    )


def host_table_memory(table: Table, allocator: Allocator) -> TableMemory:
    """Return where the bytes of a page table's large pages in host memory are.

    Pages that wait there to be loaded count as used.

    Args:
        table: The page table.
        allocator: Allocator of host memory.
    """
    pages, page_bytes = allocator.tables[table.index], table.spec.small_page_bytes
    num_empty = pages.num_large * pages.pages_per_large - pages.num_used - pages.num_evictable
    return TableMemory(
        name=table.spec.name,
        used_bytes=pages.num_used * page_bytes,
        useless_bytes=0,
        evictable_bytes=pages.num_evictable * page_bytes,
        empty_bytes=num_empty * page_bytes,
    )


def _count_dead_slots(table: Table, requests: Iterable[Request]) -> int:
    """Count the slots of used small pages that no running request touches.

    Only the pages at both ends of a page table, and those that its policy leaves unfilled, have
    such slots. A slot of a shared page is touched if one of the page's users touches it.
    """
    page_slots, extra_users = table.grain.page_slots, table.pages.extra_users
    dead_slots: dict[SmallPageId, list[int]] = {}
    for request in requests:
        pages, first = (
            request.pages.small_pages[table.index],
            request.pages.num_given_up[table.index],
        )
        if first == len(pages):
            continue
        touched = table.policy.update_last_access(
            request.facts, request.num_processed_tokens, request.num_tokens
        )
        ends = {first: touched.start - first * page_slots}
        last = len(pages) - 1
        ends[last] = ends.get(last, 0) + len(pages) * page_slots - touched.stop
        unfilled = table.policy.unfilled_slots(request.facts, range(first, len(pages)))
        for number, dead in unfilled.items():
            ends[number] = ends.get(number, 0) + dead
        for number, dead in ends.items():
            dead_slots.setdefault(pages[number], []).append(dead)
    return sum(
        min(dead) for page, dead in dead_slots.items() if len(dead) > extra_users.get(page, 0)
    )


def table_evictions(table: Table) -> Evictions:
    """Return how many small pages of a page table lost their cached content."""
    pages = table.pages
    return Evictions(
        name=table.spec.name,
        alone=pages.num_evicted_alone,
        own_large=pages.num_evicted_own,
        foreign_large=pages.num_evicted_foreign,
        with_checkpoint=pages.num_evicted_with_checkpoint,
    )
