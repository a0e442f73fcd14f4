"""Copies of pages, ordered by the scheduler's process and made by the workers.

Copies that do not depend on each other are grouped into rounds, which workers make in parallel.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jenga.geometry import Geometry
from jenga.page_ids import HostPageId, SmallPageId
from jenga.tables.request import CopyPath, PageCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRound:
    """Copies of pages of one page table that may be made in parallel.

    Attributes:
        small_pages_per_large_page: Number of small pages in a large page of the page table. It is
            sent instead of the page size, which differs between the ranks of a pipeline.
        source_pages: Small pages to read.
        target_pages: Small pages to write. None of them is a source, and none occurs twice.
        path: Whether the sources, the targets or neither are in host memory.
    """

    small_pages_per_large_page: int
    source_pages: tuple[SmallPageId | HostPageId, ...]
    target_pages: tuple[SmallPageId | HostPageId, ...]
    path: CopyPath = CopyPath.IN_ARENA


_Place = tuple[bool, int, int]
"""A small page: whether it is in host memory, the index of its page table, and its number."""

# In Python 3.11, the lookup of an enumeration's member takes as long as a function call.
_TO_HOST, _FROM_HOST = CopyPath.TO_HOST, CopyPath.FROM_HOST


@dataclass(slots=True)
class _Window:
    """Copies that may be made in any order: none reads or writes a page that another one writes."""

    tables: dict[tuple[bool, int], int] = field(default_factory=dict)  # large page -> page table
    sources: set[_Place] = field(default_factory=set)
    targets: set[_Place] = field(default_factory=set)
    copies: dict[tuple[int, CopyPath], list[PageCopy]] = field(default_factory=dict)

    def add(self, copy: PageCopy, pages_per_large: int) -> bool:
        """Add a copy if it may be made in any order with the others.

        Args:
            copy: The copy.
            pages_per_large: Number of its page table's small pages in a large page.

        Returns:
            Whether it was added.
        """
        index, path = copy.table_index, copy.path
        reads_host, writes_host = path is _FROM_HOST, path is _TO_HOST
        source, target = (reads_host, index, copy.source), (writes_host, index, copy.target)
        if source in self.targets or target in self.targets or target in self.sources:
            return False
        tables = self.tables
        read = (reads_host, copy.source // pages_per_large)
        written = (writes_host, copy.target // pages_per_large)
        # A large page may pass from one page table to another. The same bytes then have two names.
        if tables.get(read, index) != index or tables.get(written, index) != index:
            return False
        tables[read] = tables[written] = index
        self.sources.add(source)
        self.targets.add(target)
        self.copies.setdefault((index, path), []).append(copy)
        return True


def copy_rounds(copies: Iterable[PageCopy], geometry: Geometry) -> tuple[CopyRound, ...]:
    """Group copies into few rounds that have the same result as the copies one by one."""
    pages_per_large = [table.small_pages_per_large_page for table in geometry.page_tables]
    windows = [_Window()]
    for copy in copies:
        if not windows[-1].add(copy, pages_per_large[copy.table_index]):
            windows.append(_Window())
            windows[-1].add(copy, pages_per_large[copy.table_index])
    return tuple(
        CopyRound(
            small_pages_per_large_page=pages_per_large[index],
            source_pages=tuple(copy.source for copy in some),
            target_pages=tuple(copy.target for copy in some),
            path=path,
        )
        for window in windows
        for (index, path), some in window.copies.items()
    )


def runs_of_copies(
    source_pages: Sequence[int], target_pages: Sequence[int]
) -> Iterable[tuple[int, int, int]]:
    """Group copies into runs of consecutive sources with consecutive targets.

    Yields:
        First source page, first target page, and number of pages in the run.
    """
    start, num_copies = 0, len(source_pages)
    for end in range(1, num_copies + 1):
        if (
            end == num_copies
            or source_pages[end] != source_pages[end - 1] + 1
            or target_pages[end] != target_pages[end - 1] + 1
        ):
            yield source_pages[start], target_pages[start], end - start
            start = end
