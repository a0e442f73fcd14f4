"""The broker's decisions: which engine gets large pages, and which one returns some.

It lends free large pages in the order of the asks, but first to engines below their guarantee. If
there are too few, it calls others to return some of what they have beyond their guarantee: large
pages that stay empty first. Then it calls engines whose next checkpoint to be evicted was used
before that of the engine that asks. If a request waits, the engine with the most beyond its
guarantee returns the rest, cached or as its requests end, until both have the same.
"""

import math
from dataclasses import dataclass, replace

from jenga.broker.books import MAX_PROCESSES, NOBODY, NUM_ROWS, Agreement, Books
from jenga.broker.processes import Process
from jenga.checks import check_count, check_number
from jenga.errors import InvariantError
from jenga.page_ids import LargePageId


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the broker to an engine to return large pages.

    Attributes:
        num_pages: Number of large pages that are still to be returned.
        older_than_s: Monotonic time. They need only be returned as far as they stay empty, or
            while the next checkpoint to be evicted was used before. Infinity means that they must
            be returned as soon as they are not in use.
    """

    num_pages: int = 0
    older_than_s: float = -math.inf


NO_CALL = Call()
"""An engine need not return anything."""


@dataclass(slots=True, kw_only=True)
class _Ask:
    """Large pages that an engine waits for."""

    num_pages: int
    older_than_s: float | None  # None: take only what is free
    is_needed: bool  # whether a request waits for them


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Changes that an engine must be told.

    Attributes:
        granted: Row -> large pages that the engine got.
        calls: Row -> the call that replaces the one before.
    """

    granted: dict[int, list[LargePageId]]
    calls: dict[int, Call]


class Broker:
    """Lends the large pages of one file of books."""

    def __init__(self, books: Books) -> None:
        """Continue from the books, and free what engines that have ended had.

        Args:
            books: The books. No other broker may use them.
        """
        self.books = books
        self._asks: dict[int, _Ask] = {}  # in the order of arrival
        self._calls: dict[int, Call] = {}
        self._held = [0] * NUM_ROWS
        self._free: list[LargePageId] = []
        rows = {row for row, _ in books.agreements()}
        for page in map(LargePageId, range(1, books.num_pages)):
            owner = books.owner(page)
            if owner - 1 in rows:
                self._held[owner - 1] += 1
            else:
                books.set_owner(page, NOBODY)
                self._free.append(page)
        self._free.reverse()
        books.num_free = len(self._free)
        self.end_dead()

    # Engines

    def check_join(self, agreement: Agreement, *, large_page_bytes: int) -> None:
        """Raise `ValueError` unless an engine could join now. Nothing is changed.

        Args:
            agreement: The agreement that the engine wants.
            large_page_bytes: Bytes of the large pages that the engine was planned for.
        """
        books, usable = self.books, self.books.num_pages - 1
        name, guarantee, limit = agreement.name, agreement.guarantee_pages, agreement.limit_pages
        check_count("guarantee_pages", guarantee, least=1)
        check_count("limit_pages", limit, least=1)
        if large_page_bytes != books.large_page_bytes:
            msg = (
                f"engine {name!r} was planned for large pages of {large_page_bytes} bytes, but "
                f"those of this arena have {books.large_page_bytes}"
            )
            raise ValueError(msg)
        if not guarantee <= limit <= usable:
            msg = (
                f"engine {name!r} must have a guarantee of no more than its limit, and a limit of "
                f"no more than the {usable} large pages of the arena, got a guarantee of "
                f"{guarantee} and a limit of {limit}"
            )
            raise ValueError(msg)
        others = {each.name: each.guarantee_pages for _, each in books.agreements()}
        if name in others:
            msg = f"engine {name!r} shares this arena already; give each engine a name of its own"
            raise ValueError(msg)
        left = usable - sum(others.values())
        if guarantee > left:
            msg = (
                f"engine {name!r} asks for a guarantee of {guarantee} large pages, but of the "
                f"{usable} of the arena only {left} are not guaranteed to others: {others}"
            )
            raise ValueError(msg)
        if len(others) == NUM_ROWS:
            msg = f"engine {name!r} cannot join: {NUM_ROWS} engines share this arena already"
            raise ValueError(msg)

    def join(self, agreement: Agreement, *, large_page_bytes: int) -> int:
        """Give an engine a row. It waits for the large pages of its guarantee.

        Raises:
            ValueError: As `check_join`.
        """
        self.end_dead()
        self.check_join(agreement, large_page_bytes=large_page_bytes)
        row = next(row for row in range(NUM_ROWS) if self.books.agreement(row) is None)
        self.books.write_agreement(row, agreement)
        self._held[row] = 0
        self._asks[row] = _Ask(
            num_pages=agreement.guarantee_pages, older_than_s=math.inf, is_needed=True
        )
        return row

    def rejoin(self, row: int, process: Process) -> None:
        """Continue with an engine that was joined under an earlier broker.

        Raises:
            ValueError: The row is not that of the process.
        """
        agreement = self._agreement(row)
        if agreement.processes[0] != process:
            msg = f"row {row} belongs to {agreement.processes[0]}, not to {process}"
            raise ValueError(msg)
        self._asks.pop(row, None)
        self._calls.pop(row, None)
        self.ask(row, 0, None)

    def attach(self, name: str, process: Process) -> None:
        """Record one more process that maps the arena for an engine.

        Raises:
            ValueError: No engine has the name, or it has too many processes.
        """
        for row, agreement in self.books.agreements():
            if agreement.name == name:
                if process in agreement.processes:
                    return
                if len(agreement.processes) == MAX_PROCESSES:
                    msg = f"engine {name!r} has {MAX_PROCESSES} processes already"
                    raise ValueError(msg)
                processes = (*agreement.processes, process)
                self.books.write_agreement(row, replace(agreement, processes=processes))
                return
        msg = f"no engine of the name {name!r} shares this arena"
        raise ValueError(msg)

    def leave(self, row: int) -> None:
        """End the agreement with an engine, which uses none of its large pages any more."""
        self._agreement(row)
        for page in self.books.pages_of(row + 1):
            self._take(page)
        self.books.clear_agreement(row)
        self._held[row] = 0
        self._asks.pop(row, None)
        self._calls.pop(row, None)

    def end_dead(self) -> None:
        """Free what engines had of whose processes none is alive."""
        for row, agreement in list(self.books.agreements()):
            if not any(process.is_alive for process in agreement.processes):
                self.leave(row)

    # Large pages

    def num_held(self, row: int) -> int:
        """Return the number of large pages of an engine."""
        return self._held[row]

    def ask(
        self,
        row: int,
        num_pages: int,
        older_than_s: float | None,
        *,
        is_needed: bool = False,
    ) -> None:
        """Record how many large pages an engine waits for. It replaces its ask before.

        An engine below its guarantee waits at least for what it lacks, whatever it asks for.

        Args:
            row: Row of the engine.
            num_pages: Number of large pages beyond those that it has. 0 withdraws the ask.
            older_than_s: Monotonic time. Others return large pages while the checkpoint that they
                would evict next was used before. None means that only free large pages are wanted,
                which the engine gets at once or not at all.
            is_needed: Whether a request waits for them. Then engines with more beyond their
                guarantee return cached large pages, and those that their requests leave.

        Raises:
            ValueError: A number is out of its range, or no engine has the row.
        """
        agreement = self._agreement(row)
        check_count("num_pages", num_pages)
        if older_than_s is not None:
            check_number("older_than_s", older_than_s)
        if self._is_short(row):
            older_than_s, is_needed = math.inf, True
            num_pages = max(num_pages, agreement.guarantee_pages - self._held[row])
        num_pages = min(num_pages, agreement.limit_pages - self._held[row])
        if num_pages > 0:
            self._asks[row] = _Ask(
                num_pages=num_pages, older_than_s=older_than_s, is_needed=is_needed
            )
        else:
            self._asks.pop(row, None)

    def take_back(self, row: int, pages: list[LargePageId]) -> None:
        """Take large pages back from an engine, which must not touch them any more.

        Raises:
            ValueError: The engine does not have one of them, or would have fewer than its
                guarantee. Nothing was changed.
        """
        agreement = self._agreement(row)
        books = self.books
        if len(set(pages)) < len(pages) or any(
            not 0 < page < books.num_pages or books.owner(page) != row + 1 for page in pages
        ):
            msg = f"engine {agreement.name!r} returns large pages that it does not have: {pages}"
            raise ValueError(msg)
        if self._held[row] - len(pages) < agreement.guarantee_pages:
            msg = (
                f"engine {agreement.name!r} has {self._held[row]} large pages, and would return "
                f"{len(pages)} to have fewer than its {agreement.guarantee_pages}"
            )
            raise ValueError(msg)
        for page in pages:
            self._take(page)
        self._held[row] -= len(pages)
        call = self._calls.get(row)
        if call is not None:
            left = max(0, call.num_pages - len(pages))
            self._calls[row] = replace(call, num_pages=left)

    def settle(self) -> News:
        """Lend what is free to the engines that wait, and call others if there is too little."""
        granted: dict[int, list[LargePageId]] = {}
        for row, ask in sorted(self._asks.items(), key=lambda item: not self._is_short(item[0])):
            pages = self._lend(row, ask.num_pages)
            if pages:
                granted[row] = pages
            ask.num_pages -= len(pages)
            if not ask.num_pages or ask.older_than_s is None:
                del self._asks[row]
        return News(granted=granted, calls=self._changed_calls())

    def check(self) -> None:
        """Raise `InvariantError` unless the books agree with the broker's own counts."""
        self.books.check()
        counted = [len(self.books.pages_of(row + 1)) for row, _ in self.books.agreements()]
        held = [self._held[row] for row, _ in self.books.agreements()]
        owned = [page for page in self._free if self.books.owner(page) != NOBODY]
        if counted != held or owned or len(self._free) != self.books.num_free:
            msg = f"engines have {counted} large pages, {held} are counted; {owned} are not free"
            raise InvariantError(msg)

    # Parts

    def _agreement(self, row: int) -> Agreement:
        check_count("row", row)
        agreement = self.books.agreement(row) if row < NUM_ROWS else None
        if agreement is None:
            msg = f"no engine has row {row}"
            raise ValueError(msg)
        return agreement

    def _is_short(self, row: int) -> bool:
        return self._held[row] < self._agreement(row).guarantee_pages

    def _take(self, page: LargePageId) -> None:
        self.books.set_owner(page, NOBODY)
        self._free.append(page)
        self.books.num_free = len(self._free)

    def _lend(self, row: int, most: int) -> list[LargePageId]:
        """Give free large pages to an engine."""
        num_pages = min(most, len(self._free))
        pages = self._free[len(self._free) - num_pages :]
        del self._free[len(self._free) - num_pages :]
        self.books.num_free = len(self._free)
        for page in pages:
            self.books.set_owner(page, row + 1)
        self._held[row] += num_pages
        return pages[::-1]

    def _changed_calls(self) -> dict[int, Call]:
        """Return the calls that differ from those before, once all asks are spread."""
        calls: dict[int, Call] = {}
        for row, ask in self._asks.items():
            if ask.older_than_s is not None:
                self._spread(row, ask, ask.older_than_s, calls)
        changed = {
            row: calls.get(row, NO_CALL)
            for row, _ in self.books.agreements()
            if calls.get(row, NO_CALL) != self._calls.get(row, NO_CALL)
        }
        self._calls = calls
        return changed

    def _spread(self, asker: int, ask: _Ask, older_than_s: float, calls: dict[int, Call]) -> None:
        """Add calls for what one engine misses."""
        missing = ask.num_pages
        supplies = {
            row: self.books.supply(row) for row, _ in self.books.agreements() if row != asker
        }
        extras = {row: self._extra(row) - calls.get(row, NO_CALL).num_pages for row in supplies}

        def call(row: int, most: int, older_than_s: float) -> None:
            nonlocal missing
            num_pages = max(0, min(most, extras[row], missing))
            if num_pages:
                before = calls.get(row, NO_CALL)
                calls[row] = Call(
                    num_pages=before.num_pages + num_pages,
                    older_than_s=max(before.older_than_s, older_than_s),
                )
                extras[row] -= num_pages
                missing -= num_pages

        for row, supply in supplies.items():
            call(row, supply.num_empty - calls.get(row, NO_CALL).num_pages, older_than_s)
        for row in sorted(supplies, key=lambda row: supplies[row].oldest_s):
            if supplies[row].oldest_s < older_than_s:
                call(row, supplies[row].num_evictable, older_than_s)
        if not ask.is_needed:
            return
        # A call for the rest must be met. What is in use is returned as requests end.
        own = -math.inf if self._is_short(asker) else self._extra(asker)
        for row in sorted(supplies, key=lambda row: -extras[row]):
            difference = extras[row] - own
            most = missing if difference == math.inf else int(difference // 2)
            call(row, most, math.inf)

    def _extra(self, row: int) -> int:
        """Return the number of large pages that an engine has beyond its guarantee."""
        return self._held[row] - self._agreement(row).guarantee_pages
