"""How requests come in: when it is too early, what is left to others, and who counts as running."""

from collections.abc import Mapping, Sequence

from jenga.admission.reserve import Admission
from jenga.admission.wait_queue import Waiting
from jenga.arena.small_pages import Sharing
from jenga.errors import TooEarlyError
from jenga.eviction.points import Past
from jenga.prefix.checkpoints import Checkpoints
from jenga.tables.request import PrefixHit, Request

IDLE_STEPS = 16
"""Steps after which a request that took part in none is idle; more than a pipeline has ranks."""


class Entry:
    """What an admission looks at besides room, and tells the queue and the kept states.

    Attributes:
        waiting: The engine's queue.
    """

    __slots__ = ("_admission", "_checkpoints", "_refused_alone", "_requests", "waiting")

    def __init__(
        self,
        requests: Mapping[str, Request],
        checkpoints: Checkpoints,
        waiting: Waiting,
        admission: Admission,
    ) -> None:
        """For requests of one arena.

        Args:
            requests: Those that run.
            checkpoints: Where requests leave checkpoints.
            waiting: The engine's queue.
            admission: What is left to others.
        """
        self._requests = requests
        self._checkpoints = checkpoints
        self._admission = admission
        self._refused_alone: str | None = None
        self.waiting = waiting

    def begin_step(self) -> None:
        """Note that a step of the engine begins."""
        if self.waiting.asked_tokens:
            self._admission.count_step()

    def check_time(self, request_id: str, hit: PrefixHit, step: int) -> None:
        """Refuse if a running request is about to leave a state of more of the same tokens.

        Raises:
            TooEarlyError: It does.
        """
        if not self._checkpoints.states:
            return
        start_tokens = hit.num_tokens
        for other_id, shared_tokens in self.waiting.sharers(request_id, start_tokens):
            other = self._requests.get(other_id)
            if other is None or other.step < step - IDLE_STEPS:
                continue
            start = max(start_tokens, other.num_processed_tokens)
            if start < shared_tokens and any(
                start < num_tokens <= shared_tokens
                for num_tokens in self.checkpoint_tokens(other_id, other)
            ):
                raise TooEarlyError(request_id, hit_tokens=start_tokens, other_id=other_id)

    def checkpoint_tokens(self, request_id: str, request: Request) -> list[int]:
        """Where a request leaves its next checkpoints, by its plan and by those that wait."""
        return sorted(self._checkpoints.planned(request, self.waiting.branch_tokens(request_id)))

    def reserve(self, found: Sequence[Sharing | None] | None, step: int) -> int:
        """Large pages that an admission leaves to others.

        None where nobody runs: an admission waits for one of them to end. Who has pages and is
        idle, as a session is between its turns, does not end by itself.
        """
        if all(request.step < step - IDLE_STEPS for request in self._requests.values()):
            return 0
        waiting = self.waiting
        return self._admission.reserve(
            found, reread_tokens=waiting.reread_tokens, asked_tokens=waiting.asked_tokens
        )

    def note_refusal(self, request_id: str) -> None:
        """Note that there are not the pages that a request needs."""
        if not self._requests.keys() - {request_id}:
            self._refused_alone = request_id

    def was_refused_alone(self, request_id: str) -> bool:
        """Whether that happened last to this request while it had the arena to itself.

        Small pages in use can be spread over more large pages than they need: those of a hit lie
        where others left them, and what a window gave up may stay cached beside what it reads.
        """
        return request_id == self._refused_alone

    def complete(self, request_id: str, hit: PrefixHit | None) -> None:
        """Note that a request was admitted."""
        if hit is not None:
            waiting = self.waiting
            if self._requests[request_id].past == Past.TURN:
                # What a conversation goes on from, no other request reads.
                reread_tokens = waiting.reread_by(request_id)
            else:
                reread_tokens = max(hit.branch_tokens, waiting.shared_tokens(request_id))
            self._admission.note(reread_tokens, hit.asked_tokens)
        self.waiting.admit(request_id)
