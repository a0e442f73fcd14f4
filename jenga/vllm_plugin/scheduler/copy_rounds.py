"""Copies of pages, as the scheduler's process orders them and its workers make them.

They travel in `SchedulerOutput.kv_cache_block_copies`, which every kind of executor hands to its
workers before the step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jenga.geometry import Geometry
from jenga.tables.request import CopyPath, PageCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRound:
    """Copies of pages of one page table that may be made at once.

    Attributes:
        small_pages_per_large_page: Of the page table; their bytes differ from rank to rank of a
            pipeline.
        source_pages: Pages to read.
        target_pages: Pages to write, none of them a source or twice.
        path: Which of them are in host memory, if any are.
    """

    small_pages_per_large_page: int
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    path: CopyPath = CopyPath.IN_ARENA


_Place = tuple[bool, int, int]
"""A page: whether of host memory, its page table, its number."""

# Python 3.11 takes as long to find a member of an enumeration as to call a function.
_TO_HOST, _FROM_HOST = CopyPath.TO_HOST, CopyPath.FROM_HOST


@dataclass(slots=True)
class _Window:
    """Copies that may be made in any order: none touches what another one writes."""

    tables: dict[tuple[bool, int], int] = field(default_factory=dict)  # large page -> page table
    sources: set[_Place] = field(default_factory=set)
    targets: set[_Place] = field(default_factory=set)
    copies: dict[tuple[int, CopyPath], list[PageCopy]] = field(default_factory=dict)

    def add(self, copy: PageCopy, pages_per_large: int) -> bool:
        """Add a copy, unless its place in the order matters."""
        index, path = copy.table_index, copy.path
        reads_host, writes_host = path is _FROM_HOST, path is _TO_HOST
        source, target = (reads_host, index, copy.source), (writes_host, index, copy.target)
        if source in self.targets or target in self.targets or target in self.sources:
            return False
        tables = self.tables
        read = (reads_host, copy.source // pages_per_large)
        written = (writes_host, copy.target // pages_per_large)
        # A large page that changed hands holds pages of two page tables in the same bytes.
        if tables.get(read, index) != index or tables.get(written, index) != index:
            return False
        tables[read] = tables[written] = index
        self.sources.add(source)
        self.targets.add(target)
        self.copies.setdefault((index, path), []).append(copy)
        return True


def copy_rounds(copies: Iterable[PageCopy], geometry: Geometry) -> tuple[CopyRound, ...]:
    """Order copies into as few rounds as give what making them one by one gives."""
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
    """Divide copies into those that move neighbours to neighbours.

    Yields:
        The first source, the first target, and how many pages follow each other in both.
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
