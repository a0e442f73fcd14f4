"""Arrival of requests: at a time of their own, or some time after others ended.

A trace with sessions is replayed in closed loop. The next turn arrives a given time after the
answer before it, however long that answer took.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from jenga.errors import InvariantError
from jenga.sim.workload.requests import Request


@dataclass(slots=True)
class _Follower:
    """A request that waits for others to end.

    Attributes:
        request: The request.
        number: Its place in the trace, from 1.
        num_awaited: Number of requests that it follows and that have not ended.
    """

    request: Request
    number: int
    num_awaited: int


class Arrivals:
    """Take requests from a trace as they arrive.

    A trace may be larger than memory, so it is read only as far as requests have arrived. Requests
    that follow others are read together with the request that begins their group, and wait here.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        """Begin before the first arrival.

        Args:
            requests: Requests in the order of their arrival. A request that follows others comes
                after them, and before the next one that follows none.
        """
        self._requests = iter(requests)
        self._num_read = 0
        self._last: Request | None = None  # the last request that was read
        self._followers: dict[str, list[_Follower]] = {}  # name -> requests that follow it
        self._due: list[tuple[float, int, Request]] = []  # heap: (arrival, place, request)
        self._next = self._read()

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a snapshot: everything except the trace itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_requests"}

    def go_on(self, requests: Iterable[Request]) -> None:
        """Give the trace back to arrivals that were loaded from a snapshot.

        Args:
            requests: The same requests as before the snapshot, from the first one on.

        Raises:
            ValueError: The last request that was read before the snapshot is another one in
                `requests`.
        """
        self._requests = iter(requests)
        *_, last = deque(islice(self._requests, self._num_read), maxlen=1) or (None,)
        if last != self._last:
            msg = f"requests must be those that the replay began with, got {last} for {self._last}"
            raise ValueError(msg)

    @property
    def next_s(self) -> float | None:
        """Arrival time of the next request. None if none arrives before another one ends."""
        times = [] if self._next is None else [self._next.arrival_s]
        if self._due:
            times.append(self._due[0][0])
        return min(times, default=None)

    def take(self) -> tuple[Request, float]:
        """Let the next request arrive.

        Returns:
            The request, and its arrival time in seconds.

        Raises:
            InvariantError: No request is there to arrive.
            ValueError: A request does not come after those that it follows, or two requests have
                the same name.
        """
        request = self._next
        if self._due and (request is None or self._due[0][0] < request.arrival_s):
            arrival_s, _, follower = heapq.heappop(self._due)
            return follower, arrival_s
        if request is None:
            msg = "no request is there to arrive"
            raise InvariantError(msg)
        self._await(request)
        self._next = self._read()
        return request, request.arrival_s

    def end(self, name: str, time_s: float) -> None:
        """Record that a request ended. Requests that follow it may arrive.

        Args:
            name: Name of the request.
            time_s: Time of its end, in seconds.
        """
        for follower in self._followers.pop(name):
            follower.num_awaited -= 1
            if not follower.num_awaited:
                request = follower.request
                heapq.heappush(self._due, (time_s + request.think_s, follower.number, request))

    def _read(self) -> Request | None:
        """Read up to the next request that follows none, and return it."""
        for request in self._requests:
            self._last = request
            self._num_read += 1
            if not request.after:
                return request
            follower = _Follower(request, self._num_read, len(request.after))
            for name in request.after:
                if name not in self._followers:
                    msg = (
                        f"a request must stand behind those that it follows, and before the next "
                        f"that follows none, got {request.name!r} after {name!r}"
                    )
                    raise ValueError(msg)
                self._followers[name].append(follower)
            self._await(request)
        return None

    def _await(self, request: Request) -> None:
        """Let later requests follow this one."""
        if request.name in self._followers:
            msg = f"names of requests must be unique in a trace, got {request.name!r} twice"
            raise ValueError(msg)
        self._followers[request.name] = []
