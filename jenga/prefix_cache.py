"""Which content lies in which small page of one page table.

A key names content: the hash of the tokens up to the end of a page, or of an image and a part of
it. Equal keys mean equal bytes, in every layer stored there.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from sys import maxsize
from typing import overload

from jenga.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """Content that can be found from now on, or no longer.

    Attributes:
        table_index: The page table in which it lies.
        is_found: Whether it can be found.
        keys: Of the content; of what can be found from now on, keys of pages in a row.
    """

    table_index: int
    is_found: bool
    keys: tuple[Hashable, ...]


FIRST_LOOKED_UP = 64
"""Keys looked up at first where the first one missing is asked for; then four times as many."""


class FoundPages(Sequence[int | None]):
    """Pages of keys, looked up when asked for: a window needs the last few of many."""

    __slots__ = ("_get", "_keys", "_known", "_known_start", "_num_before_gap")

    def __init__(self, pages: Mapping[Hashable, int], keys: Sequence[Hashable]) -> None:
        self._get = pages.get
        self._keys = keys
        self._known: list[int | None] = []
        self._known_start = 0
        self._num_before_gap: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> int | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[int | None]: ...
    def __getitem__(self, index: int | slice) -> int | list[int | None] | None:
        if not isinstance(index, slice):
            return self._get(self._keys[index])
        start, end, step = index.indices(len(self._keys))
        if end <= start or step != 1:
            return list(map(self._get, self._keys[index]))
        self._learn(start, end)
        return self._known[start - self._known_start : end - self._known_start]

    def index(self, value: int | None, start: int = 0, stop: int = maxsize) -> int:
        """The first place of a page, or of None; keys are looked up as far as that."""
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
        found: list[int | None] = []
        self._known, self._known_start = found, 0
        num_asked = FIRST_LOOKED_UP
        while len(found) < len(self._keys):
            pages = list(map(self._get, self._keys[len(found) : len(found) + num_asked]))
            found += pages
            if not all(pages):
                return len(found) - len(pages) + pages.index(None)
            num_asked *= 4
        return len(found)

    def _learn(self, start: int, end: int) -> None:
        """Look keys up and keep what is found, with what is known already if that is next to it."""
        known_start, known_end = self._known_start, self._known_start + len(self._known)
        if known_start <= start <= known_end:
            if end > known_end:
                self._known += map(self._get, self._keys[known_end:end])
        elif start < known_start <= end <= known_end:
            self._known[:0] = map(self._get, self._keys[start:known_start])
            self._known_start = start
        else:
            self._known = list(map(self._get, self._keys[start:end]))
            self._known_start = start


class PrefixCache:
    """Content keys of one page table's small pages, one page per key.

    Attributes:
        keys: Small page -> key of its content, or None if nobody may find it.
    """

    __slots__ = ("_pages", "keys")

    def __init__(self, num_pages: int) -> None:
        self._pages: dict[Hashable, int] = {}
        self.keys: list[Hashable | None] = [None] * num_pages

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: Hashable) -> int | None:
        """The page of a key, None if there is none."""
        return self._pages.get(key)

    def find(self, keys: Sequence[Hashable]) -> "FoundPages":
        """The page of each key, None where there is none; looked up when asked for."""
        return FoundPages(self._pages, keys)

    def enter(
        self, pages: Sequence[int], keys: Sequence[Hashable]
    ) -> list[tuple[int, Hashable, int]]:
        """Let pages be found under keys.

        Null pages, and keys that are None, are passed over.

        Returns:
            What was not entered, since its key has another page: page, key and that one.
        """
        page_of, key_of = self._pages.setdefault, self.keys
        others: list[tuple[int, Hashable, int]] = []
        for page, key in zip(pages, keys, strict=True):
            if page > 0 and key is not None:
                found = page_of(key, page)
                if found == page:
                    key_of[page] = key
                else:
                    others.append((page, key, found))
        return others

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

    __slots__ = ("_changes", "_table_index")

    def __init__(self, num_pages: int, table_index: int, changes: list[CacheChange]) -> None:
        super().__init__(num_pages)
        self._table_index = table_index
        self._changes = changes

    def enter(
        self, pages: Sequence[int], keys: Sequence[Hashable]
    ) -> list[tuple[int, Hashable, int]]:
        """See `PrefixCache`; what had a page under its key was found before."""
        is_new = [
            page > 0 and key is not None and key not in self._pages
            for page, key in zip(pages, keys, strict=True)
        ]
        others = super().enter(pages, keys)
        for entered, run in groupby(zip(is_new, keys, strict=True), lambda each: each[0]):
            if entered:
                self._record([key for _, key in run], is_found=True)
        return others

    def forget(self, pages: Iterable[int]) -> None:
        """See `PrefixCache`."""
        gone = list(pages)
        keys = [self.keys[page] for page in gone]
        super().forget(gone)
        if keys:
            self._record(keys, is_found=False)

    def _record(self, keys: Sequence[Hashable], *, is_found: bool) -> None:
        change = CacheChange(table_index=self._table_index, is_found=is_found, keys=tuple(keys))
        self._changes.append(change)
