"""Replays requests step by step against an arena."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jenga.sim.arena import NOTHING_MOVED, ActiveRequest, Arena, ArenaBytes
from jenga.sim.arrivals import Arrivals
from jenga.sim.scheduler import CHUNK_TOKENS, MAX_REQUESTS, Scheduler
from jenga.sim.speculation import Speculation
from jenga.sim.workload import Request
from jenga.spec import check_positive

MOST_WAITING = 4096
"""Requests taken from a trace before they can run: of more, nobody needs to know."""

Clock = Callable[[list[ActiveRequest]], float]
"""Seconds of a step that computes `num_scheduled` tokens of each request."""


def constant_clock(seconds: float) -> Clock:
    """A clock by which every step takes as long."""
    return lambda _scheduled: seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was scheduled and not finished: the arena holds what it needs.

    Attributes:
        number: From 1.
        time_s: When it begins.
        num_decoding: Requests that compute one token after all of their prompt, and drafts.
        prefill_tokens: Tokens of prompts computed.
        num_running: Requests that have pages.
        num_waiting: Requests that have arrived and have none, counted up to `MOST_WAITING`.
    """

    number: int
    time_s: float
    num_decoding: int
    prefill_tokens: int
    num_running: int
    num_waiting: int


class Replay:
    """One run of requests through one arena.

    >>> run = Replay(requests, arena, clock=clock)  # doctest: +SKIP
    >>> for step in run:  # doctest: +SKIP
    ...     bytes_now = run.memory()

    Attributes:
        scheduler: The scheduler, for its counters.
        num_steps: Steps finished.
        time_s: Modelled time.
        moved_bytes: Copied to host memory or from there in the steps finished, as clocks count.
        num_finished: Requests that have all their tokens.
        num_refused: Requests that the arena could not hold alone, or the model not read.
        prompt_tokens: Of requests finished or refused.
        output_tokens: Of requests finished.
        hit_tokens: Tokens of prompts found cached at the first admission.
    """

    def __init__(  # noqa: PLR0913  one replay, all that may differ between two
        self,
        requests: Iterable[Request],
        arena: Arena,
        *,
        clock: Clock,
        chunk_tokens: int = CHUNK_TOKENS,
        max_requests: int = MAX_REQUESTS,
        speculation: Speculation | None = None,
        max_model_tokens: int | None = None,
        on_end: Callable[[ActiveRequest], None] | None = None,
    ) -> None:
        """Nothing has run.

        Args:
            requests: As `Arrivals` takes them.
            arena: Empty.
            clock: Seconds of a step.
            chunk_tokens: Tokens computed in a step, of all requests together.
            max_requests: Requests running at once.
            speculation: What is drafted; None for nothing.
            max_model_tokens: Of the longest request that the model reads, with its answer; longer
                ones are refused as they arrive. None where no request is too long.
            on_end: Called with each request that finished or was refused; the latter has no
                `finished_s`.
        """
        self.arena = arena
        self.scheduler = Scheduler(
            arena, chunk_tokens=chunk_tokens, max_requests=max_requests, speculation=speculation
        )
        self._arrivals = Arrivals(requests)
        self._clock = clock
        self._on_end = on_end
        if max_model_tokens is not None:
            check_positive("replay", "max_model_tokens", max_model_tokens)
        self._max_model_tokens = max_model_tokens
        self.num_steps = self.num_finished = self.num_refused = 0
        self.prompt_tokens = self.output_tokens = self.hit_tokens = 0
        self.time_s = 0.0
        self.moved_bytes = NOTHING_MOVED

    def __getstate__(self) -> dict[str, object]:
        """What a snapshot keeps: all but the clock and who is told of requests."""
        given = ("_clock", "_on_end")
        return {name: value for name, value in self.__dict__.items() if name not in given}

    def go_on(
        self,
        requests: Iterable[Request],
        *,
        clock: Clock,
        on_end: Callable[[ActiveRequest], None] | None = None,
    ) -> None:
        """Give a replay read from a snapshot what it was made with.

        Args:
            requests: The same, from the first on.
            clock: As in the beginning.
            on_end: As in the beginning.

        Raises:
            ValueError: The requests are others.
        """
        self._arrivals.go_on(requests)
        self._clock = clock
        self._on_end = on_end

    def memory(self) -> ArenaBytes:
        """Where the arena's bytes are."""
        return self.arena.memory(self.scheduler.running)

    def __iter__(self) -> Iterator[Step]:
        """Run to the end, step by step; a replay that was cut in a step finishes that one first."""
        scheduler = self.scheduler
        while True:
            if scheduler.scheduled:
                self._finish_step()
            if not self._arrive():
                return
            scheduler.step()
            scheduled = scheduler.scheduled
            if not scheduled:
                if scheduler.running:
                    # Every chunk waits to end where its arena wants it: the next step has room.
                    continue
                self._refuse(scheduler.refuse_next(), "does not fit the arena alone")
                continue
            num_tokens = num_decoding = 0
            for active in scheduled:
                num_known = active.num_scheduled - active.num_drafted
                if num_known == 1 and active.num_computed >= active.prompt_tokens:
                    num_decoding += 1
                else:
                    num_tokens += active.num_scheduled
            yield Step(
                number=self.num_steps + 1,
                time_s=self.time_s,
                num_decoding=num_decoding,
                prefill_tokens=num_tokens,
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
            )

    def _finish_step(self) -> None:
        """Compute what is scheduled."""
        self.time_s += self._clock(self.scheduler.scheduled)
        self.moved_bytes = self.arena.moved_bytes
        self.num_steps += 1
        for active in self.scheduler.finish_step(self.time_s):
            self._end(active)

    def _arrive(self) -> bool:
        """Let requests arrive; False if none is left."""
        arrivals, scheduler = self._arrivals, self.scheduler
        while (next_s := arrivals.next_s) is not None and len(scheduler.waiting) < MOST_WAITING:
            if not scheduler.waiting and not scheduler.running:
                self.time_s = max(self.time_s, next_s)
            if next_s > self.time_s:
                break
            request, arrival_s = arrivals.take()
            self._admit(ActiveRequest(request, arrival_s=arrival_s))
        return bool(scheduler.waiting or scheduler.running)

    def _admit(self, active: ActiveRequest) -> None:
        """Let a request wait, if the model reads it: an engine asks that first."""
        most_tokens = self._max_model_tokens
        if most_tokens is None or active.total_tokens <= most_tokens:
            self.scheduler.arrive(active)
        else:
            self._refuse(active, f"longer than the {most_tokens:,} tokens that the model reads")

    def _refuse(self, active: ActiveRequest, reason: str) -> None:
        active.refusal = reason
        self._end(active)

    def _end(self, active: ActiveRequest) -> None:
        self._arrivals.end(active.name, self.time_s)
        self.prompt_tokens += active.prompt_tokens
        self.hit_tokens += active.hit_tokens or 0
        if active.refusal:
            self.num_refused += 1
        else:
            self.num_finished += 1
            self.output_tokens += active.total_tokens - active.prompt_tokens
        if self._on_end is not None:
            self._on_end(active)
