"""Replays requests step by step against an arena."""

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
"""Requests taken from a trace before they can run: of more, nobody needs to know."""

Clock = Callable[[Sequence[Chunk]], float]
"""Seconds of a step that computes some chunks."""


def constant_clock(seconds: float) -> Clock:
    """A clock by which every step takes as long."""
    return lambda _chunks: seconds


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
        arena: Where the bytes are counted.
        scheduler: The scheduler, for its counters.
        num_steps: Steps finished.
        time_s: Modelled time, of the process that schedules.
        moved_bytes: Copied to host memory or from there by the steps that have been scheduled.
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
        is_asynchronous: bool = False,
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
            is_asynchronous: Whether a step is scheduled while the one before it runs.
            on_end: Called with each request that finished or was refused; the latter has no
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
        """A replay under another scheduler than ours.

        Args:
            scheduler: Nothing has arrived.
            requests: As `Arrivals` takes them.
            memory: Where the bytes are counted.
            clock: Seconds of a step.
            max_model_tokens: As of the constructor.
            is_asynchronous: Whether a step is scheduled while the one before it runs.
            on_end: As of the constructor.
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
        self._is_scheduled = False  # whether the newest of them is seen by who iterates
        self._ends_s = 0.0  # when the last of them ends
        self._is_stalled = False  # whether the last step scheduled computes nothing of who runs
        self._lost_alone: tuple[str, int] | None = None  # the last to lose its pages so; its tokens
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
        """Run to the end, step by step; a replay that was cut in a step finishes that one first.

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
        """Schedule a step; None if it computes nothing."""
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
        """Go on where nothing is computed and no step is in flight.

        Raises:
            InvariantError: Requests run, and none of them is scheduled.
        """
        scheduler = self.scheduler
        if scheduler.running:
            # Every chunk waits to end where its arena wants it: the next step has room.
            if self._is_stalled:
                msg = f"{len(scheduler.running)} requests run, and no step computes any of them"
                raise InvariantError(msg)
            self._is_stalled = True
            return
        if not scheduler.num_waiting:
            return
        if has_preempted:
            # Its pages lay where others had left them: with the arena to itself it may fit.
            head = scheduler.next_waiting
            lost_alone = head.name, head.num_tokens
            if self._lost_alone != lost_alone:
                self._lost_alone = lost_alone
                return
        self._refuse(scheduler.refuse_next(), "does not fit the arena alone")

    def _finish_step(self) -> None:
        """Take what the oldest step in flight computed."""
        batch, end_s = self._in_flight.popleft()
        if not batch.chunks:
            return
        self.time_s = max(self.time_s, end_s)
        self.num_steps += 1
        for active in self.scheduler.finish(batch, self.time_s):
            self._end(active)

    def _arrive(self) -> None:
        """Let requests arrive."""
        arrivals, scheduler = self._arrivals, self.scheduler
        while (next_s := arrivals.next_s) is not None and scheduler.num_waiting < MOST_WAITING:
            if not scheduler.has_requests and not self._in_flight:
                self.time_s = max(self.time_s, next_s)
            if next_s > self.time_s:
                break
            request, arrival_s = arrivals.take()
            self._admit(ActiveRequest(request, arrival_s=arrival_s))

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
