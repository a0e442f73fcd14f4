"""What goes next from the arena, copied to host memory before it has to go.

A copy that is made when a page is taken stands between the step and its kernels. One that is made
a step ahead runs beside the kernels of that step, over a bus that nothing else uses then. Pages
stay cached in the arena until they are evicted; whoever hits one before that has it copied in vain.
"""

from collections.abc import Sequence

from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table
from jenga.tables.request import PageCopy

_STEPS_BETWEEN = 8
"""Steps after which it is looked again at what goes next, however little went."""


class _Expected:
    """How many bytes the next step is likely to evict: as many as one did lately."""

    __slots__ = ("_evicted_bytes", "_most_bytes", "_num_steps", "_since_bytes")

    def __init__(self) -> None:
        self._evicted_bytes = self._since_bytes = self._num_steps = self._most_bytes = 0

    def after_step(self, evicted_bytes: int) -> int:
        """Bytes to look at after a step; 0 if few went since it was looked a few steps ago.

        Args:
            evicted_bytes: In all steps.
        """
        in_step = evicted_bytes - self._evicted_bytes
        self._evicted_bytes = evicted_bytes
        # Prompts come by turns, so what a step takes is expected for some time; but not for ever,
        # since what lies there alone would give way to copies of what lies here.
        self._most_bytes = max(in_step, self._most_bytes - -(-self._most_bytes // 32))
        self._since_bytes += in_step
        self._num_steps += 1
        if 4 * self._since_bytes < self._most_bytes and self._num_steps < _STEPS_BETWEEN:
            return 0
        self._since_bytes = self._num_steps = 0
        return self._most_bytes


class SavingAhead:
    """Orders copies of what goes next."""

    __slots__ = ("_expected", "_host", "_tables", "_tree")

    def __init__(self, tables: Sequence[Table], tree: CheckpointTree, host: HostCache) -> None:
        """Nothing was evicted.

        Args:
            tables: Page tables of the arena.
            tree: Tells which checkpoints go next.
            host: Where what is evicted goes.
        """
        self._tables = tables
        self._tree = tree
        self._host = host
        self._expected = _Expected()

    def order(self) -> list[PageCopy]:
        """Copies of what the next step is likely to evict, as far as it is new there.

        Asked once in every step.
        """
        most_bytes = self._expected.after_step(self._tree.num_lost_bytes)
        if not most_bytes:
            return []
        leaving: dict[int, list[int]] = {}
        for checkpoint, num_bytes in self._tree.upcoming(most_bytes):
            for table, pages in self._tree.pages_of(checkpoint, num_bytes):
                stamps = table.pages.stamps
                some = leaving.setdefault(table.index, [])
                some += [page for page in pages if stamps[page] >= 0 and table.pins[page] == 1]
        copies: list[PageCopy] = []
        for index, pages in leaving.items():
            copies += self._host.store_ahead(self._tables[index], pages)
        return copies
