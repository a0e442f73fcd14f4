"""The memory that running requests hold: all questions that change nothing."""

from collections.abc import Mapping, Sequence

from jenga.arena.allocator import Allocator
from jenga.geometry import Geometry
from jenga.tables.consistency import check_request, check_table
from jenga.tables.page_table import Table
from jenga.tables.request import Request
from jenga.tables.stats import LargePageCounts, MemoryReport, check_memory, table_memory


class Occupancy:
    """Reads the records of running requests, page tables and large pages."""

    __slots__ = ("_allocator", "_large_page_bytes", "_requests", "_tables")

    def __init__(
        self,
        geometry: Geometry,
        allocator: Allocator,
        tables: Sequence[Table],
        requests: Mapping[str, Request],
    ) -> None:
        """Create it for one arena.

        Args:
            geometry: Sizes of large and small pages, and the page tables.
            allocator: Allocator of the arena.
            tables: Page tables of the arena.
            requests: Running requests, by name. Only the manager changes them.
        """
        self._large_page_bytes = geometry.large_page_bytes
        self._allocator = allocator
        self._tables = tables
        self._requests = requests

    @property
    def num_large_pages(self) -> int:
        """Number of large pages that can be held now, and the null page."""
        return self._allocator.large_pages.num_owned + 1

    @property
    def usage(self) -> float:
        """Share of the arena's large pages in which a running request uses a small page."""
        usable = self.num_large_pages - 1
        return (usable - self._allocator.large_pages.num_available) / usable

    @property
    def growth_large_pages(self) -> int:
        """Number of large pages that let every running request take one more page of each table.

        Leave this many free when a preempted request is admitted again. If it took the last large
        page, the next request to grow would preempt it, and all that it computed would be lost once
        more.
        """
        num_requests = len(self._requests)
        return sum(
            -(-num_requests // table.spec.small_pages_per_large_page)
            for table in self._tables
            if not table.policy.is_overwritten
        )

    def memory(self) -> MemoryReport:
        """Return where every byte of the arena is."""
        return MemoryReport(
            tables=tuple(table_memory(table, self._requests.values()) for table in self._tables),
            empty_large_bytes=self._allocator.large_pages.num_empty * self._large_page_bytes,
            null_bytes=self._large_page_bytes,
        )

    def large_page_counts(self) -> LargePageCounts:
        """Return the number of large pages in each state, without the null page."""
        large_pages = self._allocator.large_pages
        num_free, num_cached = large_pages.num_empty, large_pages.reclaimable.num_queued
        num_held = self.num_large_pages - 1 - num_free - num_cached
        return LargePageCounts(free=num_free, held=num_held, cached=num_cached)

    def check(self) -> None:
        """Raise `InvariantError` unless requests, allocator and cache agree."""
        self._allocator.check()
        for request in self._requests.values():
            check_request(request, self._tables)
        for table in self._tables:
            check_table(table, self._requests.values())
        check_memory(self.memory(), self.num_large_pages * self._large_page_bytes)
