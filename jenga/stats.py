"""What the manager reports: where every byte of the arena is, and what the cache was worth."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jenga.geometry import PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Bytes of the large pages that one page table holds.

    Attributes:
        name: The page table's name.
        used_bytes: Slots that the next token of a running request reads or writes.
        useless_bytes: The rest of used small pages: padding, slots not yet written, slots out of
            every window.
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
        """All large pages of the page table."""
        return self.used_bytes + self.useless_bytes + self.evictable_bytes + self.empty_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of the arena; they add up to `arena_bytes` exactly.

    Attributes:
        tables: What each page table holds.
        empty_large_bytes: Large pages that no page table holds.
        null_bytes: The large page that is never handed out.
    """

    tables: tuple[TableMemory, ...]
    empty_large_bytes: int
    null_bytes: int

    @property
    def arena_bytes(self) -> int:
        """All large pages."""
        held_bytes = sum(table.held_bytes for table in self.tables)
        return held_bytes + self.empty_large_bytes + self.null_bytes

    @property
    def used_bytes(self) -> int:
        """Slots that the next tokens need, in all page tables."""
        return sum(table.used_bytes for table in self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictions:
    """Small pages of one page table that lost their cached content, by cause.

    Attributes:
        name: The page table's name.
        alone: One by one, for a page of the same page table.
        own_large: With their large page, for the same page table.
        foreign_large: With their large page, for another page table.
    """

    name: str
    alone: int
    own_large: int
    foreign_large: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """What prefix hits brought since start-up.

    Attributes:
        asked_tokens: Tokens that admitted requests looked for.
        hit_tokens: Tokens they found.
        limited_tokens: Page table -> tokens missed where it allowed no longer prefix.
        evictions: Per page table.
    """

    asked_tokens: int
    hit_tokens: int
    limited_tokens: Mapping[str, int]
    evictions: tuple[Evictions, ...]


@dataclass(frozen=True, slots=True)
class TouchedPages:
    """Where one request ends in one page table.

    Attributes:
        pages: Its small pages in order.
        first: The first one not given up.
        slots: The slots its next step touches.
    """

    pages: Sequence[int]
    first: int
    slots: range


def count_dead_slots(
    requests: Iterable[TouchedPages], shares: Mapping[int, int], page_slots: int
) -> int:
    """Slots of used small pages that no running request touches.

    Only the pages at the ends of a page table have any; a shared page is touched wherever one of
    its users touches it.

    Args:
        requests: All running requests.
        shares: Used small page -> its users beyond the first.
        page_slots: Slots of a page.
    """
    dead_slots: dict[int, list[int]] = {}
    for request in requests:
        pages, first = request.pages, request.first
        if first == len(pages):
            continue
        last = len(pages) - 1
        ends = {first: request.slots.start - first * page_slots}
        ends[last] = ends.get(last, 0) + len(pages) * page_slots - request.slots.stop
        for number, dead in ends.items():
            dead_slots.setdefault(pages[number], []).append(dead)
    return sum(min(dead) for page, dead in dead_slots.items() if len(dead) > shares.get(page, 0))


def table_memory(
    table: PageTable, *, num_used: int, num_evictable: int, num_empty: int, num_dead_slots: int
) -> TableMemory:
    """Bytes of a page table from counts of its small pages.

    Args:
        table: Whose.
        num_used: Small pages used.
        num_evictable: Small pages evictable.
        num_empty: Small pages empty, in large pages held.
        num_dead_slots: Slots of used pages that nobody touches.
    """
    slot_bytes = table.payload_bytes // table.tokens_per_page
    used_bytes = (num_used * table.tokens_per_page - num_dead_slots) * slot_bytes
    return TableMemory(
        name=table.name,
        used_bytes=used_bytes,
        useless_bytes=num_used * table.small_page_bytes - used_bytes,
        evictable_bytes=num_evictable * table.small_page_bytes,
        empty_bytes=num_empty * table.small_page_bytes,
    )
