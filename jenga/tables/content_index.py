"""The index from content to small pages, for one page table.

A key names content: the hash of the tokens up to the end of a page, or the hash of an image and the
number of a part of it. Equal keys mean equal bytes in every layer stored there.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from jenga.errors import InvariantError
from jenga.page_ids import SmallPageId
from jenga.tables.found_pages import NEW_IDS, FoundPages, IdsOfRun


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """Content that can be found from now on, or can no longer be found.

    Attributes:
        table_index: Page table in which the content lies.
        is_found: Whether it can be found from now on.
        keys: Keys of the content. For content that can now be found in the arena, they are in the
            order of its page table, without gaps.
        is_on_host: Whether the change is in host memory, and not in the arena.
    """

    table_index: int
    is_found: bool
    keys: tuple[Hashable, ...]
    is_on_host: bool = False


class ChangeLog:
    """Changes of cached content, in the order in which they happened."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        """Start without changes."""
        self._changes: list[CacheChange] = []

    def record_change(self, change: CacheChange) -> None:
        """Add a change after all others."""
        self._changes.append(change)

    def take_changes(self) -> list[CacheChange]:
        """Return all changes since the last call, in order."""
        changes = self._changes
        self._changes = []
        return changes


class ContentIndex:
    """Content keys of one page table's small pages. Each key has one page.

    Attributes:
        keys: Small page -> key of its content, or None if no request may find it.
    """

    __slots__ = ("_ids_of_run", "_pages", "keys")

    def __init__(self, num_pages: int, ids_of_run: IdsOfRun = NEW_IDS) -> None:
        """Create an empty index.

        Args:
            num_pages: Number of small pages, held by the page table or not.
            ids_of_run: Returns the ids of consecutive held pages. It should return the same int
                objects as the allocator hands out, which makes comparing fast.
        """
        self._pages: dict[Hashable, SmallPageId] = {}
        self._ids_of_run = ids_of_run
        self.keys: list[Hashable | None] = [None] * num_pages

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: Hashable) -> SmallPageId | None:
        """Return the page of a key, or None."""
        return self._pages.get(key)

    def find(self, keys: Sequence[Hashable]) -> FoundPages:
        """Return the page of each key, or None, looked up only when an item is read.

        Args:
            keys: Hashes, or names of other types. None stands for a page without a name.
        """
        return FoundPages(self._pages, self.keys, self._ids_of_run, keys)

    def insert(
        self, pages: Sequence[SmallPageId], keys: Sequence[Hashable]
    ) -> dict[SmallPageId, tuple[SmallPageId, Hashable]]:
        """Let pages be found under keys.

        Null pages and keys that are None are skipped. A key may occur several times.

        Returns:
            A dictionary with the pages that were already found under one of the keys. Its values
            are the first page that was not entered because of that page, and the key.
        """
        page_of, key_of = self._pages.setdefault, self.keys
        others: dict[SmallPageId, tuple[SmallPageId, Hashable]] = {}
        for page, key in zip(pages, keys, strict=True):
            if page > 0 and key is not None:
                found = page_of(key, page)
                if found == page:
                    key_of[page] = key
                else:
                    others.setdefault(found, (page, key))
        return others

    def insert_page(self, page: SmallPageId, key: Hashable) -> bool:
        """Do the work of `insert` for one page. Return whether it was entered."""
        if page <= 0 or key is None or self._pages.setdefault(key, page) != page:
            return False
        self.keys[page] = key
        return True

    def move(self, key: Hashable, old: SmallPageId, new: SmallPageId) -> None:
        """Let another page be found under a key. The old page is not found any more."""
        self._pages[key] = new
        self.keys[new], self.keys[old] = key, None

    def forget(self, pages: Iterable[SmallPageId]) -> None:
        """Make cached pages impossible to find."""
        page_of, key_of = self._pages, self.keys
        for page in pages:
            del page_of[key_of[page]]
            key_of[page] = None

    def clear(self) -> None:
        """Make all pages impossible to find."""
        self.forget(list(self._pages.values()))

    def check(self) -> None:
        """Raise `InvariantError` unless keys and pages refer to each other."""
        keyed = {key: page for page, key in enumerate(self.keys) if key is not None}
        if keyed != self._pages:
            msg = f"{len(self._pages)} keys lead to pages, {len(keyed)} pages have keys"
            raise InvariantError(msg)


class RecordingIndex(ContentIndex):
    """An index that records its changes, in order."""

    __slots__ = ("_is_on_host", "_log", "_table_index")

    def __init__(
        self,
        num_pages: int,
        ids_of_run: IdsOfRun,
        table_index: int,
        changes: ChangeLog,
        *,
        is_on_host: bool = False,
    ) -> None:
        """Create an empty index.

        Args:
            num_pages: Number of small pages, held by the page table or not.
            ids_of_run: Returns the ids of consecutive held pages.
            table_index: The page table.
            changes: Records the changes.
            is_on_host: Whether the pages are those of host memory.
        """
        super().__init__(num_pages, ids_of_run)
        self._table_index = table_index
        self._log = changes
        self._is_on_host = is_on_host

    def insert(
        self, pages: Sequence[SmallPageId], keys: Sequence[Hashable]
    ) -> dict[SmallPageId, tuple[SmallPageId, Hashable]]:
        """See `ContentIndex`. A key that had a page before is no change."""
        known = {None, *(key for key in keys if key in self._pages)}
        is_new: list[bool] = []
        for page, key in zip(pages, keys, strict=True):
            is_new.append(page > 0 and key not in known)
            if page > 0:
                known.add(key)
        others = super().insert(pages, keys)
        for entered, run in groupby(zip(is_new, keys, strict=True), lambda each: each[0]):
            if entered:
                self._record([key for _, key in run], is_found=True)
        return others

    def insert_page(self, page: SmallPageId, key: Hashable) -> bool:
        """See `ContentIndex`. A key that had a page before is no change."""
        was_found = key in self._pages
        is_inserted = super().insert_page(page, key)
        if is_inserted and not was_found:
            self._record([key], is_found=True)
        return is_inserted

    def forget(self, pages: Iterable[SmallPageId]) -> None:
        """See `ContentIndex`."""
        gone = list(pages)
        keys = [self.keys[page] for page in gone]
        super().forget(gone)
        if keys:
            self._record(keys, is_found=False)

    def _record(self, keys: Sequence[Hashable], *, is_found: bool) -> None:
        change = CacheChange(
            table_index=self._table_index,
            is_found=is_found,
            keys=tuple(keys),
            is_on_host=self._is_on_host,
        )
        self._log.record_change(change)
