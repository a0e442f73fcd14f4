"""Write-back: pages that will be evicted soon are copied to host memory beforehand.

A copy that is made when its page is taken comes between the step and its kernels. A copy that is
made a step ahead runs concurrently with the kernels of that step, over a bus that is idle then.
Pages stay cached in the arena until they are evicted. If a page is hit before that, its copy was in
vain.
"""

from collections.abc import Sequence

from jenga.page_ids import SmallPageId
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table
from jenga.tables.request import PageCopy

_STEPS_BETWEEN = 8
"""Number of steps after which the next evictions are predicted again, however few there were."""


class _Expected:
    """Estimates the bytes that the next step will evict: as many as a recent step did."""

    __slots__ = ("_evicted_bytes", "_most_bytes", "_num_steps", "_since_bytes")

    def __init__(self) -> None:
        self._evicted_bytes = self._since_bytes = self._num_steps = self._most_bytes = 0

    def after_step(self, evicted_bytes: int) -> int:
        """Return the bytes to copy ahead after a step.

        It is 0 if less than a quarter of these bytes was evicted since the last other answer, and
        that is fewer than `_STEPS_BETWEEN` steps old.

        Args:
            evicted_bytes: Bytes evicted in all steps so far.
        """
        in_step = evicted_bytes - self._evicted_bytes
        self._evicted_bytes = evicted_bytes
        # Prompts come at intervals, so the bytes of one step are expected for some time. They are
        # not expected forever. Otherwise copies of content in the arena would displace content that
        # is only in host memory.
        self._most_bytes = max(in_step, self._most_bytes - -(-self._most_bytes // 32))
        self._since_bytes += in_step
        self._num_steps += 1
        if 4 * self._since_bytes < self._most_bytes and self._num_steps < _STEPS_BETWEEN:
            return 0
        self._since_bytes = self._num_steps = 0
        return self._most_bytes


class WriteBack:
    """Orders copies of pages that will be evicted next."""

    __slots__ = ("_expected", "_host", "_tables", "_tree")

    def __init__(self, tables: Sequence[Table], tree: CheckpointTree, host: HostCache) -> None:
        """Start before any eviction.

        Args:
            tables: Page tables of the arena.
            tree: Says which checkpoints are evicted next.
            host: Host memory, which receives evicted pages.
        """
        self._tables = tables
        self._tree = tree
        self._host = host
        self._expected = _Expected()

    def write_back_pages(self) -> list[PageCopy]:
        """Return copies of pages that the next step will probably evict, if new in host memory.

        Call this once in every step.
        """
        most_bytes = self._expected.after_step(self._tree.num_lost_bytes)
        if not most_bytes:
            return []
        leaving: dict[int, list[SmallPageId]] = {}
        for checkpoint, num_bytes in self._tree.pool.upcoming(most_bytes):
            for table, pages in self._tree.pool.pages_of(checkpoint, num_bytes):
                stamps = table.pages.stamps
                some = leaving.setdefault(table.index, [])
                some += [page for page in pages if stamps[page] >= 0 and table.pins[page] == 1]
        copies: list[PageCopy] = []
        for index, pages in leaving.items():
            copies += self._host.write_back_pages(self._tables[index], pages)
        return copies
