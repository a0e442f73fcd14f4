"""Telling the caches of evicted pages that they hold nothing any more."""

from collections.abc import Sequence

from jenga.arena.allocator import Allocator
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table


class Evictions:
    """Lets evicted pages no longer be found, unless in host memory."""

    __slots__ = ("_host", "_large_pages", "_num_noted", "_tables")

    def __init__(
        self, allocator: Allocator, tables: Sequence[Table], host: HostCache | None = None
    ) -> None:
        """Nothing was evicted.

        Args:
            allocator: Books of the arena.
            tables: Its page tables.
            host: Where pages go whose checkpoint went there before, if there is host memory.
        """
        self._host = host
        self._large_pages = allocator.large_pages
        self._tables = tables
        self._num_noted = 0

    def note(self) -> None:
        """Let what was evicted since the last call no longer be found."""
        num_evicted = self._large_pages.num_evicted
        if num_evicted != self._num_noted:
            self._num_noted = num_evicted
            for table in self._tables:
                if self._host is not None:
                    self._host.store(table, table.evicted_orphans())
                table.forget_evicted()
