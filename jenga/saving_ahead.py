"""What goes next from the arena, copied to host memory before it has to go.

A copy that is made when a page is taken stands between the step and its kernels. One that is made
a step ahead runs beside the kernels of that step, over a bus that nothing else uses then. Pages
stay cached in the arena until they are evicted; whoever hits one before that has it copied in vain.
"""

from collections.abc import Sequence
from itertools import islice

from jenga.allocator import Allocator
from jenga.host_cache import HostCache
from jenga.request import PageCopy
from jenga.table import Table
from jenga.victims import NOT_QUEUED

_STEPS_BETWEEN = 8
"""Steps after which it is looked again at what goes next, however little went."""


class _Expected:
    """How many pages of a kind the next step is likely to evict: as many as one did lately."""

    __slots__ = ("_most_pages", "_num_evicted", "_num_since", "_num_steps")

    def __init__(self) -> None:
        self._num_evicted = self._num_since = self._num_steps = self._most_pages = 0

    def after_step(self, num_evicted: int) -> int:
        """Pages to look at after a step; 0 if few went since it was looked a few steps ago.

        Args:
            num_evicted: In all steps.
        """
        in_step = num_evicted - self._num_evicted
        self._num_evicted = num_evicted
        # Prompts come by turns, so what a step takes is expected for some time; but not for ever,
        # since what lies there alone would give way to copies of what lies here.
        self._most_pages = max(in_step, self._most_pages - -(-self._most_pages // 32))
        self._num_since += in_step
        self._num_steps += 1
        if 4 * self._num_since < self._most_pages and self._num_steps < _STEPS_BETWEEN:
            return 0
        self._num_since = self._num_steps = 0
        return self._most_pages


class SavingAhead:
    """Orders copies of what goes next."""

    __slots__ = ("_allocator", "_alone", "_host", "_large", "_looked_at", "_tables")

    def __init__(self, allocator: Allocator, tables: Sequence[Table], host: HostCache) -> None:
        """Nothing was evicted.

        Args:
            allocator: Books of the arena.
            tables: Its page tables.
            host: Where what is evicted goes.
        """
        self._allocator = allocator
        self._tables = tables
        self._host = host
        self._large = _Expected()
        self._alone = [_Expected() for _ in tables]
        # Of a large page its place in the order when it was looked at last.
        self._looked_at = [NOT_QUEUED] * allocator.large_pages.num_pages

    def order(self) -> list[PageCopy]:
        """Copies of what the next step is likely to evict, as far as it is worth one and new there.

        Asked once in every step.
        """
        leaving = self._with_large_pages()
        for table, expected in zip(self._tables, self._alone, strict=True):
            most = expected.after_step(table.pages.num_evicted_alone)
            if most:
                pages = table.pages.next_alone(most)
                all_pages, all_ranks = leaving.setdefault(table.index, ([], []))
                all_pages += pages
                all_ranks += map(table.pages.rank, pages)
        copies: list[PageCopy] = []
        for index, (pages, ranks) in leaving.items():
            copies += self._host.store_ahead(self._tables[index], pages, ranks)
        return copies

    def _with_large_pages(self) -> dict[int, tuple[list[int], list[int]]]:
        """Page table -> small pages that go with large pages, and the ranks at which they do."""
        large_pages, looked_at = self._allocator.large_pages, self._looked_at
        reclaimable, leaving = large_pages.reclaimable, dict[int, tuple[list[int], list[int]]]()
        most = self._large.after_step(large_pages.num_emptied)
        for large in islice(reclaimable.in_order(), most) if most else ():
            place = reclaimable.stamps[large]
            if looked_at[large] == place:
                continue
            looked_at[large] = place
            index = large_pages.holders[large]
            some = self._allocator.tables[index].evictable_pages(large)
            pages, ranks = leaving.setdefault(index, ([], []))
            pages += some
            ranks += [reclaimable.rank(large)] * len(some)
        return leaving
