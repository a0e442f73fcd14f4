"""Lending in units of many large pages, as systems do that move whole gigabytes between engines."""

from jenga.arena.borrowed_pages import Lender, News
from jenga.page_ids import LargePageId


class LentInUnits:
    """A lender that moves large pages only in units of a given number.

    Any large pages make a unit. A real system must empty addresses in a row, so this one does
    better than it could.
    """

    def __init__(self, lender: Lender, unit_pages: int) -> None:
        """Wrap a lender.

        Args:
            lender: Lends large pages one by one.
            unit_pages: Number of large pages in a unit.
        """
        self._lender = lender
        self._unit_pages = unit_pages
        self._parked: list[LargePageId] = []  # returned by the engine, but fewer than a unit

    @property
    def num_pages(self) -> int:
        """See `Lender`."""
        return self._lender.num_pages

    @property
    def guarantee_pages(self) -> int:
        """See `Lender`."""
        return self._lender.guarantee_pages

    @property
    def limit_pages(self) -> int:
        """See `Lender`."""
        return self._lender.limit_pages

    @property
    def has_free(self) -> bool:
        """See `Lender`."""
        return bool(self._parked) or self._lender.has_free

    def now_s(self) -> float:
        """See `Lender`."""
        return self._lender.now_s()

    def first_pages(self) -> list[LargePageId]:
        """See `Lender`."""
        return self._lender.first_pages()

    def take_free(self, num_pages: int) -> list[LargePageId]:
        """See `Lender`."""
        parked, self._parked = self._parked, []
        if len(parked) < num_pages:
            parked += self._lender.take_free(self._whole_units(num_pages - len(parked)))
        return parked

    def ask(self, num_pages: int, older_than_s: float | None, *, is_needed: bool = False) -> None:
        """See `Lender`."""
        num_pages = self._whole_units(num_pages)
        self._lender.ask(num_pages, older_than_s, is_needed=is_needed)

    def give_back(self, pages: list[LargePageId]) -> None:
        """See `Lender`."""
        self._parked += pages
        num_whole = len(self._parked) // self._unit_pages * self._unit_pages
        if num_whole:
            whole, self._parked = self._parked[:num_whole], self._parked[num_whole:]
            self._lender.give_back(whole)

    def news(self) -> News:
        """See `Lender`."""
        news = self._lender.news()
        if not news.called:
            return news
        called = self._whole_units(news.called) - len(self._parked)
        return News(granted=news.granted, called=called, older_than_s=news.older_than_s)

    def tell(self, num_empty: int, num_evictable: int, oldest_s: float) -> None:
        """See `Lender`."""
        self._lender.tell(num_empty, num_evictable, oldest_s)

    def _whole_units(self, num_pages: int) -> int:
        return -(-num_pages // self._unit_pages) * self._unit_pages
