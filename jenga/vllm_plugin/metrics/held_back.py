"""Admissions that were held back: number of requests and seconds, by reason."""

import time
from collections.abc import Callable

from jenga.errors import NotLoadedError, OutOfPagesError, TooEarlyError
from jenga.vllm_plugin.metrics.series import HELD_BACK_REASONS


def reason_of(error: OutOfPagesError) -> str:
    """Get the reason why an admission was refused, one of `HELD_BACK_REASONS`."""
    if isinstance(error, NotLoadedError):
        return "loading"
    if isinstance(error, TooEarlyError):
        return "state"
    if error.needed_large_pages <= error.available_large_pages + error.reserved_large_pages:
        return "reserve"
    return "memory"


class HeldBack:
    """Counts requests whose admission is refused, and the seconds until they are admitted.

    The scheduler tries to admit a request again in every step. The time between two refusals counts
    for the reason of the earlier one.

    Attributes:
        num_requests: Reason -> number of requests that were held back for it. A request that is
            held back for two reasons in turn counts for both.
        seconds: Reason -> seconds waited so far.
    """

    __slots__ = ("_clock", "_waiting", "num_requests", "seconds")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without refusals.

        Args:
            clock: Function that returns the time in seconds.
        """
        self._clock = clock
        self._waiting: dict[str, tuple[str, float]] = {}  # request -> reason, last refusal in s
        self.num_requests = dict.fromkeys(HELD_BACK_REASONS, 0)
        self.seconds = dict.fromkeys(HELD_BACK_REASONS, 0.0)

    def refuse(self, request_id: str, error: OutOfPagesError) -> None:
        """Record that a request was not admitted."""
        reason = reason_of(error)
        earlier = self._end(request_id)
        if reason != earlier:
            self.num_requests[reason] += 1
        self._waiting[request_id] = reason, self._clock()

    def end(self, request_id: str) -> None:
        """Record that a request was admitted, or waits no longer. It need not have been refused."""
        if self._waiting:
            self._end(request_id)

    def _end(self, request_id: str) -> str | None:
        reason, since = self._waiting.pop(request_id, (None, 0.0))
        if reason is not None:
            self.seconds[reason] += self._clock() - since
        return reason
