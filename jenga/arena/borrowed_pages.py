"""Large pages that come and go, in an arena that several engines share.

A lender gives large pages to this engine and takes them back. The engine asks ahead of need, in
batches. It returns large pages that stay empty, and those that the lender calls for. A call names
the last use of the checkpoint that the asking engine would evict next. While this engine would
itself evict one that was used before that, it returns empty large pages, and evicts for more. If
not, it returns only those that stay empty, because the others are for its next need. It never
returns so many that it has fewer than its guarantee.

A step in flight may still write to a large page that was emptied meanwhile. A large page therefore
leaves in two stages. It is taken out of the arena at the beginning of a step, and returned when
that step has been processed.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jenga.arena.large_pages import LargePages
from jenga.arena.ranks import PINNED_RANK, RankClock
from jenga.errors import InvariantError
from jenga.page_ids import LargePageId

BATCHES = 64
"""Number of batches that an arena consists of. Asks and returns are a batch at a time."""

SURPLUS_STEPS = 32
"""Steps during which large pages must stay empty before they count as surplus."""

ASK_AGAIN_STEPS = 16
"""Steps after which an ask that is not met is sent again, since the own content is older then."""

_REMEMBERED_TIMES = 4096
"""Most times of ranks that are remembered. Beyond that every second one is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """News of the lender since the last call.

    Attributes:
        granted: Large pages that this engine may use from now on.
        called: Number of large pages that are to be returned, or None if that has not changed.
        older_than_s: Time of the lender's clock. They need only be returned as far as they stay
            empty, or while the next checkpoint to be evicted was used before. Infinity means that
            they must be returned as soon as they are not in use.
    """

    granted: list[LargePageId]
    called: int | None = None
    older_than_s: float = -math.inf


class Lender(Protocol):
    """A lender of large pages.

    Attributes:
        num_pages: Number of large pages of the whole arena, including the null page.
        guarantee_pages: Number of large pages that this engine has from the start, and keeps.
        limit_pages: Most large pages that it may have.
    """

    @property
    def num_pages(self) -> int: ...  # noqa: D102  above

    @property
    def guarantee_pages(self) -> int: ...  # noqa: D102  above

    @property
    def limit_pages(self) -> int: ...  # noqa: D102  above

    @property
    def has_free(self) -> bool:
        """Whether a large page is probably free. The answer must cost next to nothing."""
        ...

    def now_s(self) -> float:
        """Return the time of a clock that all engines of the arena share, in seconds."""
        ...

    def first_pages(self) -> list[LargePageId]:
        """Return the large pages of the guarantee. Call this once."""
        ...

    def take_free(self, num_pages: int) -> list[LargePageId]:
        """Return up to `num_pages` free large pages at once. It may take some microseconds."""
        ...

    def ask(self, num_pages: int, older_than_s: float | None, *, is_needed: bool = False) -> None:
        """Ask for large pages, which `news` brings later. It replaces the ask before.

        Args:
            num_pages: Number of large pages. 0 withdraws the ask.
            older_than_s: Others return large pages while the checkpoint that they would evict next
                was used before. None means that only free large pages are wanted, if there are
                some now.
            is_needed: Whether a request waits for them. Then an engine that has more returns what
                its requests leave. Otherwise they would only hold cached content.
        """
        ...

    def give_back(self, pages: list[LargePageId]) -> None:
        """Return large pages, which nothing of this engine touches any more."""
        ...

    def news(self) -> News:
        """Return what has arrived. The call must not wait."""
        ...

    def tell(self, num_empty: int, num_evictable: int, oldest_s: float) -> None:
        """Say how many large pages this engine could return.

        Args:
            num_empty: Number of large pages that stay without content.
            num_evictable: Number of large pages with cached content and no used small page.
            oldest_s: Last use of the checkpoint that is evicted next. Infinite if there is none.
        """
        ...


class _RankTimes:
    """The times at which ranks were given, as far as they are remembered."""

    __slots__ = ("_clock", "_ranks", "_times")

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._ranks: list[int] = []
        self._times: list[float] = []

    def note(self, now_s: float) -> None:
        """Remember that the ranks from here on are given at this time or later."""
        rank = self._clock.next_rank
        if self._ranks and self._ranks[-1] == rank:
            self._times[-1] = now_s
            return
        self._ranks.append(rank)
        self._times.append(now_s)
        if len(self._ranks) > _REMEMBERED_TIMES:
            del self._ranks[::2], self._times[::2]

    def time_of(self, rank: int) -> float:
        """Return the time at which a rank was given, or a little before."""
        index = bisect_right(self._ranks, rank % PINNED_RANK) - 1
        return self._times[index] if index >= 0 else -math.inf


class BorrowedPages:
    """The large pages that this engine has of a shared arena.

    Attributes:
        num_asks: Number of times that large pages were asked for so far.
        num_returned: Number of large pages returned so far.
    """

    def __init__(  # noqa: PLR0913  the levels below, and what they do not know
        self,
        large_pages: LargePages,
        lender: Lender,
        clock: RankClock,
        *,
        steps_in_flight: int,
        next_checkpoint_rank: Callable[[], int],
        on_evicted: Callable[[], None],
        is_quiet: Callable[[], bool],
    ) -> None:
        """Start with the large pages of the guarantee.

        Args:
            large_pages: The upper level of the allocator, which has the lender's first pages.
            lender: Lender of the large pages.
            clock: Clock of the ranks of cached content.
            steps_in_flight: Most steps that are scheduled and not processed while the next one is
                scheduled, including that one. 1 if steps never overlap.
            next_checkpoint_rank: Returns the rank of the last use of the checkpoint that is evicted
                next, or `NOT_QUEUED` if there is none. Called while large pages are reclaimable.
            on_evicted: Called after content was evicted.
            is_quiet: Whether nothing of the arena is to be copied later on.
        """
        self._large_pages = large_pages
        self._lender = lender
        self._times = _RankTimes(clock)
        self._steps_in_flight = steps_in_flight
        self._next_checkpoint_rank = next_checkpoint_rank
        self._on_evicted = on_evicted
        self._is_quiet = is_quiet
        # A step that must not be over before the large pages are returned, and those.
        self._leaving: deque[tuple[int, list[LargePageId]]] = deque()
        self._num_leaving = 0
        self._step = 0
        self._called, self._older_than_s = 0, -math.inf
        self._is_waiting = False  # whether an ask that may evict others' content is open
        self._num_needed = 0  # large pages of that ask, if a request waits for them
        self._least_empty = 0  # fewest empty large pages since that was last looked at
        self._least_before = 0  # fewest in the steps before that
        self._batch_pages = max(1, (lender.num_pages - 1) // BATCHES)
        self.num_asks = self.num_returned = 0
        large_pages.source = self.borrow

    def begin_step(self) -> None:
        """Exchange large pages with the lender, before anything of a step is scheduled."""
        self._step += 1
        self._times.note(self._lender.now_s())
        self._return_left(self._step - self._steps_in_flight)
        self._read_news()
        large_pages = self._large_pages
        self._least_empty = min(self._least_empty, large_pages.num_empty)
        if self._obeys_call():
            pass
        elif self._step % SURPLUS_STEPS == 0:
            self._withdraw(self._least_empty - 2 * self._batch_pages, -math.inf, self._step)
        elif large_pages.num_empty < self._batch_pages and self._lender.has_free:
            self._ask(self._batch_pages, None)
        elif large_pages.num_empty:
            if self._is_waiting:
                self._ask(0, None)
        elif not (self._is_waiting and self._step % ASK_AGAIN_STEPS):
            next_use_s = self._next_use_s()
            if next_use_s < math.inf:
                self._ask(self._batch_pages, next_use_s)
        if self._step % SURPLUS_STEPS == 0:
            self._least_before, self._least_empty = self._least_empty, large_pages.num_empty
        self._tell()

    def _obeys_call(self) -> bool:
        """Take out large pages for a call. Return whether there is a call that was obeyed.

        An engine that has nothing old enough to return may itself ask, as without a call.
        """
        if not self._called:
            return False
        num_before = self._num_leaving
        self._withdraw(self._called - self._num_leaving, self._older_than_s, self._step)
        return self._older_than_s == math.inf or self._num_leaving > num_before

    def rest(self) -> None:
        """Exchange large pages with the lender while no step is in flight or being scheduled."""
        self._return_left(self._step)
        self._read_news()
        if self._is_waiting:
            self._ask(0, None)
        self._least_before = self._least_empty = self._large_pages.num_empty
        if not self._is_quiet():
            return
        if self._called:
            self._withdraw(self._called, self._older_than_s, self._step)
        num_extra = self._large_pages.num_empty - 2 * self._batch_pages
        if num_extra > 0:
            self._withdraw(num_extra, -math.inf, self._step)
        self._return_left(self._step)
        self._tell()

    def borrow(self, num_pages: int) -> None:
        """Take free large pages at once, because there are too few for a need."""
        room = self._lender.limit_pages - self._large_pages.num_owned - self._num_leaving
        num_pages = min(max(num_pages, self._batch_pages), room)
        if num_pages > 0 and self._lender.has_free and not self._called:
            self.num_asks += 1
            self._large_pages.add(self._lender.take_free(num_pages))
            self._is_waiting = False
            self._num_needed = 0

    def borrow_missing(self, num_pages: int) -> bool:
        """Record that large pages are missing for a request. Return whether some came at once.

        Otherwise they are asked for, a batch at least, because the request will soon need more.
        Others may evict checkpoints for them that were used before the one that this engine would
        evict next, or any if there is none here.
        """
        self._least_empty = self._least_before = 0
        num_before = self._large_pages.num_available
        self.borrow(num_pages)
        num_missing = num_pages - (self._large_pages.num_available - num_before)
        if num_missing > 0 and num_missing > self._num_needed:
            next_use_s = min(self._lender.now_s(), self._next_use_s())
            self._ask(max(num_missing, self._batch_pages), next_use_s, is_needed=True)
        return self._large_pages.num_available > num_before

    def _ask(self, num_pages: int, older_than_s: float | None, *, is_needed: bool = False) -> None:
        room = self._lender.limit_pages - self._large_pages.num_owned - self._num_leaving
        num_pages = min(num_pages, room)
        if num_pages <= 0 and not self._is_waiting:
            return
        self.num_asks += 1
        self._is_waiting = num_pages > 0 and older_than_s is not None
        num_pages = max(0, num_pages)
        self._num_needed = num_pages if is_needed else 0
        self._lender.ask(num_pages, older_than_s, is_needed=is_needed)

    def _read_news(self) -> None:
        news = self._lender.news()
        if news.granted:
            self._large_pages.add(news.granted)
            self._is_waiting = False
            self._num_needed = 0
        if news.called is not None:
            self._called, self._older_than_s = news.called, news.older_than_s

    @property
    def _num_surplus(self) -> int:
        """Number of large pages that have been empty for some steps."""
        return min(self._least_empty, self._least_before, self._large_pages.num_empty)

    def _next_use_s(self) -> float:
        """Return when the checkpoint that is evicted next was used last.

        If no checkpoint can be evicted, it is the last use of other cached content that can be.
        Infinity means that nothing can be evicted, or nothing that no waiting request will read.
        """
        first_rank = self._large_pages.reclaimable.peek_rank()
        if first_rank < 0:
            return math.inf
        rank = self._next_checkpoint_rank()
        if rank < 0 and first_rank < PINNED_RANK:
            rank = first_rank
        return self._times.time_of(rank) if rank >= 0 else math.inf

    def _may_evict(self, older_than_s: float) -> bool:
        """Whether a call allows that the content that is next is evicted."""
        return older_than_s == math.inf or self._next_use_s() < older_than_s

    def _withdraw(self, num_pages: int, older_than_s: float, step: int) -> None:
        """Take large pages out of the arena, to return them once a step is over."""
        large_pages = self._large_pages
        num_pages = min(num_pages, large_pages.num_owned - self._lender.guarantee_pages)
        if num_pages <= 0:
            return
        if not self._may_evict(older_than_s):
            num_pages = min(num_pages, self._num_surplus)
        has_evicted = False
        while (
            large_pages.num_empty < num_pages
            and large_pages.reclaimable.num_queued
            and self._may_evict(older_than_s)
        ):
            large_pages.evict_next()
            has_evicted = True
        if has_evicted:
            self._on_evicted()
        pages = large_pages.remove(min(num_pages, large_pages.num_empty))
        if pages:
            self._leaving.append((step, pages))
            self._num_leaving += len(pages)

    def _return_left(self, processed_step: int) -> None:
        """Return the large pages whose last step has been processed."""
        while self._leaving and self._leaving[0][0] <= processed_step:
            _, pages = self._leaving.popleft()
            self._num_leaving -= len(pages)
            self._called = max(0, self._called - len(pages))
            self.num_returned += len(pages)
            self._lender.give_back(pages)

    def _tell(self) -> None:
        large_pages = self._large_pages
        self._lender.tell(self._num_surplus, large_pages.reclaimable.num_queued, self._next_use_s())

    def check(self) -> None:
        """Raise `InvariantError` unless this engine is between its guarantee and its limit."""
        num_pages = self._large_pages.num_owned + self._num_leaving
        if not self._lender.guarantee_pages <= num_pages <= self._lender.limit_pages:
            msg = (
                f"{num_pages} large pages are borrowed, the guarantee is "
                f"{self._lender.guarantee_pages} and the limit {self._lender.limit_pages}"
            )
            raise InvariantError(msg)
        if self._large_pages.num_owned < self._lender.guarantee_pages:
            msg = f"only {self._large_pages.num_owned} large pages can be used"
            raise InvariantError(msg)
