"""Which content lies in which small page of one page table.

A key names content: the hash of the tokens up to the end of a page, or of an image and a part of
it. Equal keys mean equal bytes, in every layer stored there.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from jenga.errors import InvariantError
from jenga.tables.found_pages import FoundPages, PageRow


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """Content that can be found from now on, or no longer.

    Attributes:
        table_index: The page table in which it lies.
        is_found: Whether it can be found.
        keys: Of the content; of what can be found from now on in the arena, keys of pages in a row.
        is_on_host: Whether that is in host memory, and not in the arena.
    """

    table_index: int
    is_found: bool
    keys: tuple[Hashable, ...]
    is_on_host: bool = False


class PrefixCache:
    """Content keys of one page table's small pages, one page per key.

    Attributes:
        keys: Small page -> key of its content, or None if nobody may find it.
    """

    __slots__ = ("_pages", "_row", "keys")

    def __init__(self, num_pages: int, row: PageRow = range) -> None:
        """Nothing cached.

        Args:
            num_pages: Small pages, whether held or not.
            row: Gives the numbers of held pages in a row; best the same objects as handed out.
        """
        self._pages: dict[Hashable, int] = {}
        self._row = row
        self.keys: list[Hashable | None] = [None] * num_pages

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: Hashable) -> int | None:
        """The page of a key, None if there is none."""
        return self._pages.get(key)

    def find(self, keys: Sequence[Hashable]) -> FoundPages:
        """The page of each key, None where there is none; looked up when asked for.

        Args:
            keys: Hashes, or else names of other types, None where there is no name.
        """
        return FoundPages(self._pages, self.keys, self._row, keys)

    def enter(
        self, pages: Sequence[int], keys: Sequence[Hashable]
    ) -> dict[int, tuple[int, Hashable]]:
        """Let pages be found under keys.

        Null pages, and keys that are None, are passed over. A key may come several times.

        Returns:
            Pages that were found before -> the first page not entered under the same key, and the
            key.
        """
        page_of, key_of = self._pages.setdefault, self.keys
        others: dict[int, tuple[int, Hashable]] = {}
        for page, key in zip(pages, keys, strict=True):
            if page > 0 and key is not None:
                found = page_of(key, page)
                if found == page:
                    key_of[page] = key
                else:
                    others.setdefault(found, (page, key))
        return others

    def enter_page(self, page: int, key: Hashable) -> bool:
        """As `enter` for one page; whether it was entered."""
        if page <= 0 or key is None or self._pages.setdefault(key, page) != page:
            return False
        self.keys[page] = key
        return True

    def move(self, key: Hashable, old: int, new: int) -> None:
        """Let another page be found under a key; nobody finds the old one any more."""
        self._pages[key] = new
        self.keys[new], self.keys[old] = key, None

    def forget(self, pages: Iterable[int]) -> None:
        """Let cached pages no longer be found."""
        page_of, key_of = self._pages, self.keys
        for page in pages:
            del page_of[key_of[page]]
            key_of[page] = None

    def clear(self) -> None:
        """Let no page be found."""
        self.forget(list(self._pages.values()))

    def check(self) -> None:
        """Raise `InvariantError` unless keys and pages name each other."""
        keyed = {key: page for page, key in enumerate(self.keys) if key is not None}
        if keyed != self._pages:
            msg = f"{len(self._pages)} keys lead to pages, {len(keyed)} pages have keys"
            raise InvariantError(msg)


class RecordingCache(PrefixCache):
    """A prefix cache that says what changes in it, in order."""

    __slots__ = ("_changes", "_is_on_host", "_table_index")

    def __init__(
        self,
        num_pages: int,
        row: PageRow,
        table_index: int,
        changes: list[CacheChange],
        *,
        is_on_host: bool = False,
    ) -> None:
        """As `PrefixCache`.

        Args:
            num_pages: Small pages, whether held or not.
            row: Gives the numbers of held pages in a row.
            table_index: The page table.
            changes: Where to note them.
            is_on_host: Whether its pages are of host memory.
        """
        super().__init__(num_pages, row)
        self._table_index = table_index
        self._changes = changes
        self._is_on_host = is_on_host

    def enter(
        self, pages: Sequence[int], keys: Sequence[Hashable]
    ) -> dict[int, tuple[int, Hashable]]:
        """See `PrefixCache`; what had a page under its key was found before."""
        known = {None, *(key for key in keys if key in self._pages)}
        is_new: list[bool] = []
        for page, key in zip(pages, keys, strict=True):
            is_new.append(page > 0 and key not in known)
            if page > 0:
                known.add(key)
        others = super().enter(pages, keys)
        for entered, run in groupby(zip(is_new, keys, strict=True), lambda each: each[0]):
            if entered:
                self._record([key for _, key in run], is_found=True)
        return others

    def enter_page(self, page: int, key: Hashable) -> bool:
        """See `PrefixCache`; what had a page under its key was found before."""
        was_found = key in self._pages
        is_entered = super().enter_page(page, key)
        if is_entered and not was_found:
            self._record([key], is_found=True)
        return is_entered

    def forget(self, pages: Iterable[int]) -> None:
        """See `PrefixCache`."""
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
        self._changes.append(change)
