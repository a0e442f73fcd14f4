"""Replay requests step by step against an arena."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jenga.errors import InvariantError
from jenga.sim.batching.arena import NOTHING_MOVED, ActiveRequest, Arena, ArenaBytes, Chunk, Memory
from jenga.sim.batching.scheduler import (
    CHUNK_TOKENS,
    MAX_REQUESTS,
    STEPS_IN_FLIGHT,
    Batch,
    Scheduler,
    StepScheduler,
)
from jenga.sim.batching.speculation import Speculation
from jenga.sim.workload.arrivals import Arrivals
from jenga.sim.workload.requests import Request
from jenga.spec import check_positive

MOST_WAITING = 4096
"""Most requests that wait after being taken from a trace. No part of a replay looks at more."""

Clock = Callable[[Sequence[Chunk]], float]
"""Function that returns the seconds of a step that computes some chunks."""


def constant_clock(seconds: float) -> Clock:
    """Return a clock by which every step takes the same time."""
    return lambda _chunks: seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is scheduled and has not ended. The arena already holds the pages it needs.

    Attributes:
        number: Number of the step, from 1.
        time_s: Time at which it begins, in seconds.
        num_decoding: Number of requests that compute one token after all of their prompt, and
            drafts.
        prefill_tokens: Number of prompt tokens that it computes.
        num_running: Number of requests that have pages.
        num_waiting: Number of requests that have arrived and have no pages, at most `MOST_WAITING`.
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
        arena: Arena whose bytes are counted.
        scheduler: Scheduler, for its counters.
        num_steps: Number of steps that have ended.
        time_s: Modelled time in seconds, of the process that schedules.
        moved_bytes: Bytes that all scheduled steps copied to and from host memory.
        num_finished: Number of requests that have all their tokens.
        num_refused: Number of requests that do not fit in the empty arena, or are too long for the
            model.
        prompt_tokens: Prompt tokens of finished and refused requests.
        output_tokens: Output tokens of finished requests.
        hit_tokens: Prompt tokens that were found cached at the requests' first admission.
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
        is_asynchronous: bool = False,
        on_end: Callable[[ActiveRequest], None] | None = None,
    ) -> None:
        """Begin before the first step.

        Args:
            requests: Requests in the order that `Arrivals` asks for.
            arena: An empty arena.
            clock: Function that returns the seconds of a step.
            chunk_tokens: Most tokens that a step computes, of all requests together.
            max_requests: Most requests that run at once.
            speculation: Drafts for decoding requests. None for no drafts.
            max_model_tokens: Most tokens of a request that the model reads, its answer included.
                Longer requests are refused as they arrive. None for no limit.
            is_asynchronous: Whether a step is scheduled while the one before it runs.
            on_end: Called with each request that finished or was refused. A refused one has no
                `finished_s`.
        """
        scheduler = Scheduler(
            arena,
            chunk_tokens=chunk_tokens,
            max_requests=max_requests,
            speculation=speculation,
            is_asynchronous=is_asynchronous,
        )
        self._begin(
            requests,
            arena,
            scheduler,
            clock=clock,
            max_model_tokens=max_model_tokens,
            is_asynchronous=is_asynchronous,
            on_end=on_end,
        )

    @classmethod
    def under(  # noqa: PLR0913  as the constructor
        cls,
        scheduler: StepScheduler,
        requests: Iterable[Request],
        memory: Memory,
        *,
        clock: Clock,
        max_model_tokens: int | None = None,
        is_asynchronous: bool = False,
        on_end: Callable[[ActiveRequest], None] | None = None,
    ) -> "Replay":
        """Make a replay under another scheduler than ours.

        Args:
            scheduler: A scheduler without requests.
            requests: Requests in the order that `Arrivals` asks for.
            memory: Arena whose bytes are counted.
            clock: Function that returns the seconds of a step.
            max_model_tokens: See the constructor.
            is_asynchronous: Whether a step is scheduled while the one before it runs.
            on_end: See the constructor.
        """
        replay = cls.__new__(cls)
        replay._begin(
            requests,
            memory,
            scheduler,
            clock=clock,
            max_model_tokens=max_model_tokens,
            is_asynchronous=is_asynchronous,
            on_end=on_end,
        )
        return replay

    def _begin(  # noqa: PLR0913  as the constructor
        self,
        requests: Iterable[Request],
        arena: Memory,
        scheduler: StepScheduler,
        *,
        clock: Clock,
        max_model_tokens: int | None,
        is_asynchronous: bool,
        on_end: Callable[[ActiveRequest], None] | None,
    ) -> None:
        self.arena = arena
        self.scheduler = scheduler
        self._arrivals = Arrivals(requests)
        self._clock = clock
        self._on_end = on_end
        if max_model_tokens is not None:
            check_positive("replay", "max_model_tokens", max_model_tokens)
        self._max_model_tokens = max_model_tokens
        self._most_in_flight = STEPS_IN_FLIGHT[is_asynchronous]
        self._in_flight: deque[tuple[Batch, float]] = deque()  # steps, and when each ends
        self._is_scheduled = False  # whether the caller still looks at the newest of them
        self._ends_s = 0.0  # when the last of them ends
        self._is_stalled = False  # whether the last step computes nothing although requests run
        self._lost_alone: tuple[str, int] | None = None  # last preempted alone: name, tokens
        self.num_steps = self.num_finished = self.num_refused = 0
        self.prompt_tokens = self.output_tokens = self.hit_tokens = 0
        self.time_s = 0.0
        self.moved_bytes = NOTHING_MOVED

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a snapshot: everything except the clock and `on_end`."""
        given = ("_clock", "_on_end")
        return {name: value for name, value in self.__dict__.items() if name not in given}

    def go_on(
        self,
        requests: Iterable[Request],
        *,
        clock: Clock,
        on_end: Callable[[ActiveRequest], None] | None = None,
    ) -> None:
        """Give a replay that was loaded from a snapshot the arguments that it was made with.

        Args:
            requests: The same requests, from the first one on.
            clock: The same clock.
            on_end: The same function.

        Raises:
            ValueError: The requests are others.
        """
        self._arrivals.go_on(requests)
        self._clock = clock
        self._on_end = on_end

    @property
    def next_s(self) -> float | None:
        """Modelled time at which the iteration goes on, in seconds. None if it is over."""
        if self._in_flight or self.scheduler.has_requests:
            return max(self.time_s, self._ends_s)
        return self._arrivals.next_s

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        return not self._in_flight and not self.scheduler.has_requests

    def memory(self) -> ArenaBytes:
        """Return the arena's bytes by use."""
        return self.arena.memory(self.scheduler.running)

    def __iter__(self) -> Iterator[Step]:
        """Run to the end, step by step. A replay that was interrupted in a step first finishes it.

        Source: vLLM 0.32, `EngineCore.step` and `step_with_batch_queue`.
        """
        scheduler, in_flight = self.scheduler, self._in_flight
        while True:
            if not self._is_scheduled:
                self._arrive()
                if scheduler.has_requests:
                    step = self._schedule()
                    if step is not None:
                        yield step
                elif not in_flight:
                    return
                else:
                    self._finish_step()
                    continue
            self._is_scheduled = False
            if len(in_flight) >= self._most_in_flight or not scheduler.has_requests:
                self._finish_step()

    def _schedule(self) -> Step | None:
        """Schedule a step. Return None if it computes nothing."""
        scheduler = self.scheduler
        num_preemptions = scheduler.num_preemptions
        batch = scheduler.schedule()
        begin_s = max(self.time_s, self._ends_s)
        if batch.chunks:
            self._ends_s = begin_s + self._clock(batch.chunks)
            self.moved_bytes = self.arena.moved_bytes
            self._is_stalled = False
        elif not any(each.chunks for each, _ in self._in_flight):
            self._unblock(has_preempted=scheduler.num_preemptions > num_preemptions)
        self._in_flight.append((batch, self._ends_s))
        self._is_scheduled = True
        if not batch.chunks:
            return None
        num_tokens = num_decoding = 0
        for chunk in batch.chunks:
            num_known = chunk.num_tokens - chunk.num_drafted
            if num_known == 1 and chunk.start >= chunk.active.prompt_tokens:
                num_decoding += 1
            else:
                num_tokens += chunk.num_tokens
        num_before = sum(bool(each.chunks) for each, _ in self._in_flight) - 1
        return Step(
            number=self.num_steps + num_before + 1,
            time_s=begin_s,
            num_decoding=num_decoding,
            prefill_tokens=num_tokens,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
        )

    def _unblock(self, *, has_preempted: bool) -> None:
        """Go on when a step computes nothing and no other step is in flight.

        Raises:
            InvariantError: Requests run, and twice in a row none of them is scheduled.
        """
        scheduler = self.scheduler
        if scheduler.running:
            # Every chunk waits to end where its arena wants it. The next step has room for that.
            if self._is_stalled:
                msg = f"{len(scheduler.running)} requests run, and no step computes any of them"
                raise InvariantError(msg)
            self._is_stalled = True
            return
        if not scheduler.num_waiting:
            return
        if has_preempted:
            # Its pages lay in gaps between those of others. Alone in the arena it may fit.
            head = scheduler.next_waiting
            lost_alone = head.name, head.num_tokens
            if self._lost_alone != lost_alone:
                self._lost_alone = lost_alone
                return
        self._refuse(scheduler.refuse_next(), "does not fit the arena alone")

    def _finish_step(self) -> None:
        """Apply the results of the oldest step in flight."""
        batch, end_s = self._in_flight.popleft()
        if not batch.chunks:
            return
        self.time_s = max(self.time_s, end_s)
        self.num_steps += 1
        for active in self.scheduler.finish(batch, self.time_s):
            self._end(active)

    def _arrive(self) -> None:
        """Take all requests that have arrived from the trace."""
        arrivals, scheduler = self._arrivals, self.scheduler
        while (next_s := arrivals.next_s) is not None and scheduler.num_waiting < MOST_WAITING:
            if not scheduler.has_requests and not self._in_flight:
                self.time_s = max(self.time_s, next_s)
            if next_s > self.time_s:
                break
            request, arrival_s = arrivals.take()
            self._admit(ActiveRequest(request, arrival_s=arrival_s))

    def _admit(self, active: ActiveRequest) -> None:
        """Put a request in the wait queue if the model can read it. An engine checks that first."""
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
