"""What running requests hold of an arena: every question whose answer changes nothing."""

from jenga.arena.allocator import Allocator
from jenga.checks import check_count
from jenga.geometry import Geometry
from jenga.tables.capacity import Capacity
from jenga.tables.consistency import check_request, check_table
from jenga.tables.page_table import Table
from jenga.tables.request import Request
from jenga.tables.stats import LargePageCounts, MemoryReport, check_memory, table_memory


class Holdings:
    """Running requests with their page tables, as they are.

    Attributes:
        geometry: How the arena is cut.
        num_large_pages: Large pages of the arena, the null page included.
        capacity: What the arena can hold at all.
    """

    def __init__(self, geometry: Geometry, allocator: Allocator, tables: tuple[Table, ...]) -> None:
        """No request.

        Args:
            geometry: How the arena is cut.
            allocator: Books of its pages.
            tables: Its page tables.
        """
        self.geometry = geometry
        self.num_large_pages = allocator.large_pages.num_pages
        self.capacity = Capacity(geometry, [table.policy for table in tables], self.num_large_pages)
        self._allocator = allocator
        self._tables = tables
        self._requests: dict[str, Request] = {}

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
        """A request's small pages in order; the null page where given up.

        Raises:
            ValueError: There is no such request or page table.
        """
        return list(self._running(request_id).pages[self._table(table_index).index])

    def page_tables(self, request_id: str) -> tuple[list[int], ...]:
        """All page tables of a request."""
        return tuple(list(pages) for pages in self._running(request_id).pages)

    def is_running(self, request_id: str) -> bool:
        """Whether a request was admitted and has not ended."""
        return request_id in self._requests

    def request_tokens(self) -> dict[str, int]:
        """Running request -> tokens it has slots for."""
        return {request_id: request.num_tokens for request_id, request in self._requests.items()}

    @property
    def is_idle(self) -> bool:
        """Whether no request runs."""
        return not self._requests

    def committed_tokens(self, request_id: str) -> int:
        """Tokens of a request whose full pages others may find."""
        return self._running(request_id).committed_tokens

    @property
    def usage(self) -> float:
        """Share of the arena's large pages that hold something a running request uses."""
        usable = self.num_large_pages - 1
        return (usable - self._allocator.large_pages.num_available) / usable

    @property
    def growth_large_pages(self) -> int:
        """Large pages from which every running request could take one more page of each table.

        To leave to them when a request comes in again that was preempted: where it takes the last
        large page, the next request to grow sends it away, and all it computed is lost once more.
        """
        num_requests = len(self._requests)
        return sum(
            -(-num_requests // table.spec.small_pages_per_large_page)
            for table in self._tables
            if not table.policy.is_overwritten
        )

    def can_ever_fit(self, num_tokens: int, *, chunk_tokens: int) -> bool:
        """Whether a request could reach so many tokens with the arena to itself.

        Raises:
            ValueError: A number is no integer of at least 0.
        """
        return self.capacity.can_ever_fit(num_tokens, chunk_tokens=chunk_tokens)

    def memory(self) -> MemoryReport:
        """Where every byte of the arena is."""
        large_page_bytes = self.geometry.large_page_bytes
        return MemoryReport(
            tables=tuple(table_memory(table, self._requests.values()) for table in self._tables),
            empty_large_bytes=self._allocator.large_pages.num_empty * large_page_bytes,
            null_bytes=large_page_bytes,
        )

    def large_page_counts(self) -> LargePageCounts:
        """Large pages by state, the null page left out."""
        large_pages = self._allocator.large_pages
        num_free, num_cached = large_pages.num_empty, large_pages.reclaimable.num_queued
        num_held = self.num_large_pages - 1 - num_free - num_cached
        return LargePageCounts(free=num_free, held=num_held, cached=num_cached)

    def check(self) -> None:
        """Raise `InvariantError` unless the books of requests, allocator and cache agree."""
        self._allocator.check()
        for request in self._requests.values():
            check_request(request, self._tables)
        for table in self._tables:
            check_table(table, self._requests.values())
        check_memory(self.memory(), self.num_large_pages * self.geometry.large_page_bytes)
