"""A broker in the same process as its engines: for replays and tests."""

import math
from collections.abc import Callable

from jenga.arena.borrowed_pages import News
from jenga.broker.books import Agreement, Supply
from jenga.broker.broker import Broker
from jenga.broker.processes import this_process
from jenga.page_ids import LargePageId


class DirectBroker:
    """Passes messages between a broker and lenders by calls.

    Attributes:
        broker: The broker.
        now_s: Clock of all engines, in seconds.
    """

    def __init__(self, broker: Broker, now_s: Callable[[], float]) -> None:
        """Start without engines.

        Args:
            broker: The broker.
            now_s: Function that returns the time in seconds.
        """
        self.broker = broker
        self.now_s = now_s
        self._lenders: dict[int, DirectLender] = {}

    def join(self, name: str, *, guarantee_pages: int, limit_pages: int) -> "DirectLender":
        """Let an engine join, and give it the large pages of its guarantee.

        Raises:
            ValueError: It cannot join, or large pages of its guarantee are not free.
        """
        agreement = Agreement(
            name=name,
            guarantee_pages=guarantee_pages,
            limit_pages=limit_pages,
            processes=(this_process(),),
        )
        books = self.broker.books
        if books.num_free < guarantee_pages:
            msg = f"engine {name!r} must wait: {books.num_free} large pages are free"
            raise ValueError(msg)
        row = self.broker.join(agreement, large_page_bytes=books.large_page_bytes)
        lender = self._lenders[row] = DirectLender(self, row, agreement)
        self.settle()
        return lender

    def leave(self, lender: "DirectLender") -> None:
        """Take all large pages of an engine, as after its death."""
        self.broker.leave(lender.row)
        del self._lenders[lender.row]
        self.settle()

    def settle(self) -> None:
        """Lend what is free, and put the news where lenders find them."""
        news = self.broker.settle()
        for row, pages in news.granted.items():
            self._lenders[row].granted += pages
        for row, call in news.calls.items():
            lender = self._lenders[row]
            lender.called, lender.older_than_s = call.num_pages, call.older_than_s


class DirectLender:
    """One engine's side of a broker in the same process.

    Attributes:
        row: Row of the engine in the books.
        granted: Large pages that the engine has not taken note of yet.
        called: Number of large pages that it is called to return, or None if there is no news.
        older_than_s: Time before which content may be evicted for that.
    """

    def __init__(self, direct: DirectBroker, row: int, agreement: Agreement) -> None:
        self._direct = direct
        self._broker = direct.broker
        self._agreement = agreement
        self.row = row
        self.granted: list[LargePageId] = []
        self.called: int | None = None
        self.older_than_s = -math.inf

    @property
    def num_pages(self) -> int:
        """See `Lender`."""
        return self._broker.books.num_pages

    @property
    def guarantee_pages(self) -> int:
        """See `Lender`."""
        return self._agreement.guarantee_pages

    @property
    def limit_pages(self) -> int:
        """See `Lender`."""
        return self._agreement.limit_pages

    @property
    def has_free(self) -> bool:
        """See `Lender`."""
        return self._broker.books.num_free > 0

    def now_s(self) -> float:
        """See `Lender`."""
        return self._direct.now_s()

    def first_pages(self) -> list[LargePageId]:
        """See `Lender`."""
        return self.news().granted

    def take_free(self, num_pages: int) -> list[LargePageId]:
        """See `Lender`."""
        self._broker.ask(self.row, num_pages, None)
        self._direct.settle()
        granted, self.granted = self.granted, []
        return granted

    def ask(self, num_pages: int, older_than_s: float | None, *, is_needed: bool = False) -> None:
        """See `Lender`."""
        if older_than_s is not None:
            older_than_s = max(0.0, older_than_s)
        self._broker.ask(self.row, num_pages, older_than_s, is_needed=is_needed)
        self._direct.settle()

    def give_back(self, pages: list[LargePageId]) -> None:
        """See `Lender`."""
        self._broker.take_back(self.row, pages)
        self._direct.settle()

    def news(self) -> News:
        """See `Lender`."""
        news = News(granted=self.granted, called=self.called, older_than_s=self.older_than_s)
        self.granted, self.called = [], None
        return news

    def tell(self, num_empty: int, num_evictable: int, oldest_s: float) -> None:
        """See `Lender`."""
        supply = Supply(num_empty=num_empty, num_evictable=num_evictable, oldest_s=oldest_s)
        self._broker.books.write_supply(self.row, supply)
