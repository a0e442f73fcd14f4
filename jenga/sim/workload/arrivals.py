"""When requests arrive: at a time of their own, or some time after others ended.

A trace with sessions is replayed in closed loop: the next turn arrives a given time after the
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
        number: Its place in the trace.
        num_awaited: Requests that it follows and that have not ended.
    """

    request: Request
    number: int
    num_awaited: int


class Arrivals:
    """Takes requests from a trace as they arrive.

    A trace may be longer than memory: it is read as far as requests have arrived. Requests that
    follow others are read together with the one that begins their group, and wait here.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        """Nothing has arrived.

        Args:
            requests: In the order of their arrival. A request that follows others stands behind
                them and before the next one that follows none.
        """
        self._requests = iter(requests)
        self._num_read = 0
        self._last: Request | None = None  # read
        self._followers: dict[str, list[_Follower]] = {}  # name -> requests that follow it
        self._due: list[tuple[float, int, Request]] = []  # heap: (arrival, place, request)
        self._next = self._read()

    def __getstate__(self) -> dict[str, object]:
        """What a snapshot keeps: all but the trace itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_requests"}

    def go_on(self, requests: Iterable[Request]) -> None:
        """Give arrivals read from a snapshot the trace that they were taken from.

        Args:
            requests: The same, from the first on.

        Raises:
            ValueError: The requests are others.
        """
        self._requests = iter(requests)
        *_, last = deque(islice(self._requests, self._num_read), maxlen=1) or (None,)
        if last != self._last:
            msg = f"requests must be those that the replay began with, got {last} for {self._last}"
            raise ValueError(msg)

    @property
    def next_s(self) -> float | None:
        """When the next request arrives; None if none does before another one ends."""
        times = [] if self._next is None else [self._next.arrival_s]
        if self._due:
            times.append(self._due[0][0])
        return min(times, default=None)

    def take(self) -> tuple[Request, float]:
        """Let the next request arrive.

        Returns:
            The request and when it arrives.

        Raises:
            InvariantError: None is there to arrive.
            ValueError: A request does not stand behind those that it follows, or has a name that
                another one has.
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
        """Note that a request ended: those that follow it may arrive.

        Args:
            name: Of the request.
            time_s: When it ended.
        """
        for follower in self._followers.pop(name):
            follower.num_awaited -= 1
            if not follower.num_awaited:
                request = follower.request
                heapq.heappush(self._due, (time_s + request.think_s, follower.number, request))

    def _read(self) -> Request | None:
        """Read up to the next request that follows none, and get it."""
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
        """Let others follow a request."""
        if request.name in self._followers:
            msg = f"names of requests must be unique in a trace, got {request.name!r} twice"
            raise ValueError(msg)
        self._followers[request.name] = []
