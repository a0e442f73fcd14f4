"""Pages of content keys, looked up only as far as they are read."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from sys import maxsize
from typing import cast, overload

from jenga.arena.page_runs import run_end
from jenga.page_ids import SmallPageId

IdsOfRun = Callable[[int, int], Sequence[SmallPageId]]
"""Function that returns the ids of consecutive pages, from the first to one past the last."""

NEW_IDS = cast("IdsOfRun", range)
"""Function that makes the ids anew, for an index without an allocator."""

FIRST_LOOKED_UP = 4
"""Number of keys looked up together at first.

It doubles with each further lookup, until the pages found are in a long run.
"""

LONG_RUN = 64
"""Number of consecutive pages from which comparing keys takes less time than looking them up.

This holds even for keys that were used just before.
"""


class FoundPages(Sequence[SmallPageId | None]):
    """Pages of keys, looked up when they are read. A window needs only the last few of many.

    Pages that were computed together are usually consecutive. The keys after such a run are
    therefore compared with the keys of the pages that follow. These lie side by side in memory,
    while a lookup in the dictionary of all cached content reads scattered addresses.
    """

    __slots__ = (
        "_get",
        "_ids_of_run",
        "_key_of",
        "_keys",
        "_known",
        "_known_start",
        "_num_before_gap",
    )

    def __init__(
        self,
        pages: Mapping[Hashable, SmallPageId],
        key_of: Sequence[Hashable],
        ids_of_run: IdsOfRun,
        keys: Sequence[Hashable],
    ) -> None:
        """Create the sequence without looking anything up.

        Args:
            pages: Key -> page.
            key_of: Page -> key, or None.
            ids_of_run: Returns the ids of consecutive pages.
            keys: Keys to look up: hashes, or names of other types. None stands for no name.
        """
        self._get = pages.get
        self._key_of = key_of
        self._ids_of_run = ids_of_run
        self._keys = keys
        self._known: list[SmallPageId | None] = []
        self._known_start = 0
        self._num_before_gap: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> SmallPageId | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[SmallPageId | None]: ...
    def __getitem__(self, index: int | slice) -> SmallPageId | list[SmallPageId | None] | None:
        if not isinstance(index, slice):
            return self._get(self._keys[index])
        start, end, step = index.indices(len(self._keys))
        if end <= start or step != 1:
            return list(map(self._get, self._keys[index]))
        self._learn(start, end)
        return self._known[start - self._known_start : end - self._known_start]

    def index(self, value: int | None, start: int = 0, stop: int = maxsize) -> int:
        """Return the first place of a page, or of None. Keys are looked up as far as that place."""
        if value is not None:
            return super().index(value, start, stop)
        if start:
            return start + self[start:stop].index(None)
        if self._num_before_gap is None:
            self._num_before_gap = self._look_up_to_gap()
        if self._num_before_gap >= min(stop, len(self._keys)):
            msg = "no key is without a page"
            raise ValueError(msg)
        return self._num_before_gap

    def _look_up_to_gap(self) -> int:
        found: list[SmallPageId | None] = []
        self._known, self._known_start = found, 0
        for pages, in_run in self._look_up(0, len(self._keys)):
            found += pages
            if not in_run and not all(pages):
                return len(found) - len(pages) + pages.index(None)
        return len(found)

    def _look_up(self, start: int, end: int) -> Iterator[tuple[Sequence[SmallPageId | None], bool]]:
        """Yield pages of keys in order, and whether they are consecutive, with none missing."""
        keys = self._keys
        num_asked, run_pages = FIRST_LOOKED_UP, LONG_RUN
        while start < end:
            if run_pages >= LONG_RUN and (page := self._get(keys[start])) is not None:
                # Usually another long run begins where one ends.
                run_pages = self._count_run(start, page, end, run_pages)
                if run_pages > 1:
                    yield self._ids_of_run(page, page + run_pages), True
                    start += run_pages
                    num_asked = FIRST_LOOKED_UP
                    continue
            pages = list(map(self._get, keys[start : min(end, start + num_asked)]))
            yield pages, False
            start += len(pages)
            num_asked *= 2
            before, last = pages[-FIRST_LOOKED_UP:][0], pages[-1]
            if before is None or last is None or last - before != FIRST_LOOKED_UP - 1:
                continue
            run_pages = self._count_run(start, last + 1, end, run_pages)
            if run_pages:
                yield self._ids_of_run(last + 1, last + 1 + run_pages), True
                start += run_pages

    def _count_run(self, start: int, page: int, end: int, first_compared: int) -> int:
        """Count the consecutive pages whose keys are the given ones.

        Args:
            start: Index of the first key.
            page: The first page, which is the page of that key if the key has one.
            end: Index past the last key.
            first_compared: Number of keys to compare at once at first. Runs are often as long as
                the one before.
        """
        keys, key_of = self._keys, self._key_of
        if start == end or not isinstance(keys[start], bytes):
            # Names may be None, as for a page without content. Hashes never are.
            return 0
        known = min(first_compared, end - start)
        if keys[start : start + known] != key_of[page : page + known]:
            known = 0
        return run_end(keys, start + known, key_of, page + known, end) - start

    def _learn(self, start: int, end: int) -> None:
        """Look keys up and store their pages, joined to the stored ones if these are adjacent."""
        known_start, known_end = self._known_start, self._known_start + len(self._known)
        if known_start <= start <= known_end:
            if end > known_end:
                self._known += self._pages(known_end, end)
        elif start < known_start <= end <= known_end:
            self._known[:0] = self._pages(start, known_start)
            self._known_start = start
        else:
            self._known = self._pages(start, end)
            self._known_start = start

    def _pages(self, start: int, end: int) -> list[SmallPageId | None]:
        """Return the pages of `_look_up` in one list."""
        found: list[SmallPageId | None] = []
        for pages, _ in self._look_up(start, end):
            found += pages
        return found
