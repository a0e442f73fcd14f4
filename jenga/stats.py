"""What the manager reports: where every byte of the arena is."""

from dataclasses import dataclass


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
