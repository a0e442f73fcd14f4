"""The memory that running requests hold: all questions that change nothing."""

from jenga.arena.allocator import Allocator
from jenga.checks import check_count
from jenga.geometry import Geometry
from jenga.tables.capacity import Capacity
from jenga.tables.consistency import check_request, check_table
from jenga.tables.page_table import Table
from jenga.tables.request import Request
from jenga.tables.stats import LargePageCounts, MemoryReport, check_memory, table_memory


class Holdings:
    """Running requests and their page tables, read only.

    Attributes:
        geometry: Sizes of large and small pages, and the page tables.
        capacity: Computes the largest requests that the arena can hold.
    """

    def __init__(self, geometry: Geometry, allocator: Allocator, tables: tuple[Table, ...]) -> None:
        """Create it without requests.

        Args:
            geometry: Sizes of large and small pages, and the page tables.
            allocator: Allocator of the arena.
            tables: Page tables of the arena.
        """
        self.geometry = geometry
        num_certain = allocator.large_pages.num_certain
        self.capacity = Capacity(geometry, [table.policy for table in tables], num_certain + 1)
        self._allocator = allocator
        self._tables = tables
        self._requests: dict[str, Request] = {}

    @property
    def num_large_pages(self) -> int:
        """Number of large pages that can be held now, and the null page."""
        return self._allocator.large_pages.num_owned + 1

    def _running(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            msg = f"request_id must name a running request, got {request_id!r}"
            raise ValueError(msg)
        return request

    def _table(self, table_index: int) -> Table:
        check_count("table_index", table_index)
        if table_index >= len(self._tables):
            msg = f"table_index must be less than {len(self._tables)}, got {table_index}"
            raise ValueError(msg)
        return self._tables[table_index]

    def page_table(self, request_id: str, table_index: int) -> list[int]:
        """Return a request's small pages in order, with the null page where a page was given up.

        Raises:
            ValueError: There is no such request or page table.
        """
        return list(self._running(request_id).pages[self._table(table_index).index])

    def page_tables(self, request_id: str) -> tuple[list[int], ...]:
        """Return all page tables of a request."""
        return tuple(list(pages) for pages in self._running(request_id).pages)

    def is_running(self, request_id: str) -> bool:
        """Whether a request was admitted and has not ended."""
        return request_id in self._requests

    def request_tokens(self) -> dict[str, int]:
        """Return the number of tokens that each running request has slots for."""
        return {request_id: request.num_tokens for request_id, request in self._requests.items()}

    @property
    def is_idle(self) -> bool:
        """Whether no request runs."""
        return not self._requests

    def committed_tokens(self, request_id: str) -> int:
        """Return the number of tokens of a request whose full pages other requests can find."""
        return self._running(request_id).committed_tokens

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

    def can_ever_fit(self, num_tokens: int, *, chunk_tokens: int) -> bool:
        """Whether a request could reach `num_tokens` tokens with the arena to itself.

        Raises:
            ValueError: A number is not an integer of at least 0.
        """
        return self.capacity.can_ever_fit(num_tokens, chunk_tokens=chunk_tokens)

    def memory(self) -> MemoryReport:
        """Return where every byte of the arena is."""
        large_page_bytes = self.geometry.large_page_bytes
        return MemoryReport(
            tables=tuple(table_memory(table, self._requests.values()) for table in self._tables),
            empty_large_bytes=self._allocator.large_pages.num_empty * large_page_bytes,
            null_bytes=large_page_bytes,
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
        check_memory(self.memory(), self.num_large_pages * self.geometry.large_page_bytes)
