"""Rules of admission, apart from room for pages.

They say when an admission is too early, how much it leaves to the cache, and which requests count
as running.
"""

from collections.abc import Mapping

from jenga.admission.reserve import CacheReserve
from jenga.admission.wait_queue import WaitQueue
from jenga.errors import TooEarlyError
from jenga.eviction.points import Past
from jenga.prefix.checkpoints import Checkpoints
from jenga.tables.request import HitStart, PrefixHit, Request

IDLE_STEPS = 16
"""Number of steps after which a request that took part in none of them is idle.

It is larger than the number of ranks of a pipeline.
"""


class AdmissionGate:
    """Applies the rules of admission, and informs the wait queue and the checkpoints.

    Attributes:
        wait_queue: The engine's wait queue.
    """

    __slots__ = (
        "_checkpoints",
        "_refused",
        "_refused_alone",
        "_requests",
        "_reserve",
        "wait_queue",
    )

    def __init__(
        self,
        requests: Mapping[str, Request],
        checkpoints: Checkpoints,
        wait_queue: WaitQueue,
        reserve: CacheReserve,
    ) -> None:
        """Create the rules for the requests of one arena.

        Args:
            requests: Running requests, by name.
            checkpoints: Plans and makes the checkpoints of requests.
            wait_queue: The engine's wait queue.
            reserve: Computes how many large pages an admission leaves to the cache.
        """
        self._requests = requests
        self._checkpoints = checkpoints
        self._reserve = reserve
        self._refused: str | None = None
        self._refused_alone: str | None = None
        self.wait_queue = wait_queue

    def begin_step(self) -> None:
        """Record that the engine begins a step."""
        if self.wait_queue.asked_tokens:
            self._reserve.count_step()

    def refuse_if_early(self, request_id: str, hit: PrefixHit, step: int) -> None:
        """Refuse an admission if a running request will soon leave a state of more shared tokens.

        Raises:
            TooEarlyError: A running request will leave such a state.
        """
        if not self._checkpoints.states:
            return
        start_tokens = hit.num_tokens
        for other_id, shared_tokens in self.wait_queue.sharers(request_id, start_tokens):
            other = self._requests.get(other_id)
            if other is None or other.last_step < step - IDLE_STEPS:
                continue
            start = max(start_tokens, other.num_processed_tokens)
            if start < shared_tokens and any(
                start < num_tokens <= shared_tokens
                for num_tokens in self.checkpoint_tokens(other_id, other)
            ):
                raise TooEarlyError(request_id, hit_tokens=start_tokens, other_id=other_id)

    def checkpoint_tokens(self, request_id: str, request: Request) -> list[int]:
        """Return where a request leaves its next checkpoints, in tokens, rising.

        Some are planned for the request itself, others for requests that wait.
        """
        return sorted(self._checkpoints.planned(request, self.wait_queue.branch_tokens(request_id)))

    def reserved_large_pages(self, request_id: str, start: HitStart | None, step: int) -> int:
        """Return the number of large pages that this admission must leave free.

        It is 0 when no request is running. A request that took part in no step for `IDLE_STEPS`
        steps, as a session between two turns, counts as not running. It will not free anything by
        itself.
        """
        if not self._reserve.left_share or all(
            request.last_step < step - IDLE_STEPS for request in self._requests.values()
        ):
            return 0
        return max(self._state_large_pages(request_id), self._cache_large_pages(start))

    def _state_large_pages(self, request_id: str) -> int:
        """Return the large pages for the states that waiting requests will start from.

        Further samples of a prompt share its keys and values with it, but each of them copies the
        state at its end. Without room for that state each would compute the prompt again.
        """
        states = self._checkpoints.states
        return len(states) if states and self.wait_queue.branch_tokens(request_id) else 0

    def _cache_large_pages(self, start: HitStart | None) -> int:
        """Return the large pages that are left to cached content.

        It is 0 for a request that takes little beside what it finds, because waiting would save
        nothing. Nor is anything left for a queue that is known not to be long.
        """
        if start is not None and self._checkpoints.takes_little(start.hit):
            return 0
        wait_queue = self.wait_queue
        if wait_queue.is_short:
            return 0
        return self._reserve.large_pages_to_leave(
            start.sharing if start is not None else None,
            reread_tokens=wait_queue.reread_tokens,
            asked_tokens=wait_queue.asked_tokens,
        )

    def record_refusal(self, request_id: str) -> None:
        """Record that there are not enough pages for a request."""
        self._refused = request_id
        if not self._requests.keys() - {request_id}:
            self._refused_alone = request_id

    def record_end(self) -> None:
        """Record that a request ended or was preempted. There may be enough pages for others."""
        self._refused = None

    def was_refused(self, request_id: str) -> bool:
        """Whether this request was the last one refused, and no request has ended since."""
        return request_id == self._refused

    def was_refused_alone(self, request_id: str) -> bool:
        """Whether this request was the last one refused while it had the arena to itself.

        Even alone, a request can be spread over more large pages than it needs. Pages of a hit lie
        where other requests left them. Pages that its windows gave up may stay cached in the large
        pages that it still reads.
        """
        return request_id == self._refused_alone

    def record_admission(
        self, request_id: str, hit: PrefixHit | None, start: HitStart | None
    ) -> None:
        """Record that a request was admitted."""
        wait_queue = self.wait_queue
        if hit is not None and start is not None and not self._goes_on(request_id, start):
            if self._requests[request_id].checkpoints.points_past == Past.TURN:
                # No other request reads the prefix that a conversation continues.
                reread_tokens = wait_queue.reread_by(request_id)
            else:
                reread_tokens = max(hit.branch_tokens, wait_queue.shared_tokens(request_id))
            self._reserve.count_admission(reread_tokens, hit.asked_tokens)
        wait_queue.start_running(request_id)

    def _goes_on(self, request_id: str, start: HitStart) -> bool:
        """Whether a request begins with the prompt of a running one, and reads what is in use.

        Such a request does not show that cached content is read again.
        """
        shared = [sharing for sharing in start.sharing if sharing is not None and sharing.pages]
        if not shared or any(sharing.num_revived for sharing in shared):
            return False
        return self.wait_queue.continues_running(request_id)
