"""Tells the caches, which index pages by content, which pages were evicted."""

from collections.abc import Sequence

from jenga.arena.allocator import Allocator
from jenga.prefix.eviction_log import EvictionLog
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table


class EvictionNotices:
    """Removes evicted pages from the indexes, after copying orphans to host memory.

    Attributes:
        log: Record of losses. None, the default, records none.
    """

    __slots__ = ("_host", "_large_pages", "_num_delivered", "_tables", "log")

    def __init__(
        self, allocator: Allocator, tables: Sequence[Table], host: HostCache | None = None
    ) -> None:
        """Start without evictions.

        Args:
            allocator: Allocator of the arena.
            tables: Page tables of the arena.
            host: Host memory, which receives evicted pages whose checkpoint went there before. None
                if there is none.
        """
        self._host = host
        self._large_pages = allocator.large_pages
        self._tables = tables
        self._num_delivered = 0
        self.log: EvictionLog | None = None

    def deliver(self) -> None:
        """Make pages that were evicted since the last call impossible to find."""
        num_evicted = self._large_pages.num_evicted
        if num_evicted != self._num_delivered:
            self._num_delivered = num_evicted
            if self.log is not None:
                self.log.record_loose(self._tables)
            for table in self._tables:
                if self._host is not None:
                    self._host.store(table, table.evicted_orphans())
                table.forget_evicted()
