"""Continuous batching as vLLM's scheduler does it: what runs goes on, then what waits comes in.

A step has a budget of tokens. Running requests take theirs first, oldest first: one token each and
those drafted, or a chunk of their prompt. Where there is no memory for one, the youngest loses its
pages and waits again, at the head of the queue. If none did, waiting requests come in, first come
first served, as long as the budget lasts and the whole of what they know fits.

Asynchronously, a step is scheduled while the one before it runs, and counts on the tokens that
this one will generate. A request that loses its pages meanwhile gets those tokens all the same, and
comes in again when they are there.

`tests/sim/test_engine_equality.py` compares the steps with those of vLLM's own scheduler.

Source: vLLM 0.32, `v1/core/sched/scheduler.py` and `async_scheduler.py`, policy "fcfs", without
encoder budget.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from jenga.policies import RequestFacts
from jenga.sim.batching.arena import ActiveRequest, Arena, Chunk
from jenga.sim.batching.speculation import Speculation
from jenga.spec import check_positive

CHUNK_TOKENS = 8192
"""Tokens computed in a step, of all requests together: vLLM's default on an H100."""

MAX_REQUESTS = 1024
"""Requests running at once: vLLM's default on an H100."""

STEPS_IN_FLIGHT = {False: 1, True: 2}
"""Whether scheduling is asynchronous -> steps scheduled at a time, as vLLM has them on a GPU."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step that was scheduled.

    Attributes:
        chunks: What it computes, in the order in which it was scheduled.
        source: Whatever the scheduler wants back when the step is over.
    """

    chunks: list[Chunk]
    source: object = None


class StepScheduler(Protocol):
    """Decides what every step computes, as a replay asks it."""

    @property
    def running(self) -> list[ActiveRequest]:
        """Requests that have pages, oldest first."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        ...

    @property
    def next_waiting(self) -> ActiveRequest:
        """The request that comes in next; there must be one."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often requests lost their pages so far."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to schedule, or a request that ended since the last step."""
        ...

    def arrive(self, active: ActiveRequest, /) -> None:
        """Let a request wait behind all others."""
        ...

    def schedule(self) -> Batch:
        """Schedule a step; it computes nothing where nothing can be computed."""
        ...

    def finish(self, batch: Batch, time_s: float, /) -> list[ActiveRequest]:
        """Take what the oldest step in flight computed, as of a time; the requests that ended."""
        ...

    def refuse_next(self) -> ActiveRequest:
        """Send the next waiting request away: it does not fit the arena alone."""
        ...


class Scheduler:
    """Decides what every step computes.

    Attributes:
        waiting: Requests that arrived, the next one first.
        running: Requests that have pages, oldest first.
        num_preemptions: How often requests lost their pages so far.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        max_requests: int = MAX_REQUESTS,
        speculation: Speculation | None = None,
        is_asynchronous: bool = False,
    ) -> None:
        """Nothing has arrived.

        Args:
            arena: The memory.
            chunk_tokens: Tokens computed in a step, of all requests together.
            max_requests: Requests running at once.
            speculation: What is drafted; None for nothing.
            is_asynchronous: Whether a step may be scheduled before the one before it is over.
        """
        check_positive("scheduler", "chunk_tokens", chunk_tokens)
        check_positive("scheduler", "max_requests", max_requests)
        self._arena = arena
        self._chunk_tokens = chunk_tokens
        self._max_requests = max_requests
        self._speculation = speculation
        self._draft_tokens = speculation.draft_tokens if speculation is not None else 0
        self._lookahead_tokens = speculation.lookahead_tokens if speculation is not None else 0
        self._draft_queries = speculation.draft_queries if speculation is not None else 0
        self._is_asynchronous = is_asynchronous
        self._has_ended = False
        self.waiting: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """See `StepScheduler`."""
        return len(self.waiting)

    @property
    def next_waiting(self) -> ActiveRequest:
        """See `StepScheduler`."""
        return self.waiting[0]

    @property
    def has_requests(self) -> bool:
        """See `StepScheduler`: vLLM tells its workers of requests that ended in a further step."""
        return bool(self.waiting or self.running or self._has_ended)

    def arrive(self, active: ActiveRequest) -> None:
        """See `StepScheduler`."""
        self.waiting.append(active)
        self._arena.waits(active)

    def schedule(self) -> Batch:
        """See `StepScheduler`."""
        self._arena.new_step()
        step = _Step(self._chunk_tokens, self._draft_queries)
        num_preemptions = self.num_preemptions
        self._go_on(step)
        if self.num_preemptions == num_preemptions:
            self._admit(step)
        self._arena.end_step()
        self._has_ended = False
        for chunk in step.chunks:
            self._count_on(chunk)
        return Batch(step.chunks)

    def _go_on(self, step: "_Step") -> None:
        """Schedule running requests."""
        arena = self._arena
        index = 0
        while index < len(self.running) and step.most_tokens > 0:
            active = self.running[index]
            start = active.num_computed
            known_tokens = active.num_tokens + active.num_expected
            num_tokens = min(known_tokens + active.num_drafted - start, step.most_tokens)
            # Steps in flight may be all that a request needs, even if no draft of theirs is right.
            is_over = (
                active.num_expected > 0 and start + 2 - active.num_expected >= active.total_tokens
            )
            if num_tokens and not is_over:
                num_tokens = arena.chunk_tokens(active, start, num_tokens)
            if not num_tokens or is_over:
                index += 1
                continue
            end = start + num_tokens
            if not arena.grow(active, end, self._lookahead_tokens) and not self._make_room(
                active, end
            ):
                break
            num_drafted = min(active.num_drafted, max(0, end - known_tokens))
            active.num_drafted = 0
            step.has_prefill |= active.is_prefilling
            step.add(Chunk(active, start, num_tokens, num_drafted))
            index += 1

    def _make_room(self, active: ActiveRequest, num_tokens: int) -> bool:
        """Preempt until a running request has its slots; False if it lost its own."""
        while True:
            youngest = self.running.pop()
            self._arena.free(youngest)
            youngest.restart()
            self.waiting.appendleft(youngest)
            self._arena.waits(youngest, first=True)
            self.num_preemptions += 1
            if youngest is active:
                return False
            if self._arena.grow(active, num_tokens, self._lookahead_tokens):
                return True

    def _admit(self, step: "_Step") -> None:
        """Let waiting requests come in."""
        arena = self._arena
        passed_over: list[ActiveRequest] = []
        num_running = len(step.chunks)
        while self.waiting and step.most_tokens > 0 and len(self.running) < self._max_requests:
            active = self.waiting[0]
            if active.num_stale:
                # What it has generated is not known yet.
                passed_over.append(self.waiting.popleft())
                continue
            hit_tokens = arena.find(active)
            num_tokens = active.num_tokens - hit_tokens
            num_drafted = 0
            if self._pads(num_tokens, step, is_beside=bool(num_running or hit_tokens)):
                num_drafted = self._draft_tokens
                if num_tokens + num_drafted > step.most_tokens:
                    break
                num_tokens += num_drafted
            num_tokens = min(num_tokens, step.most_tokens)
            chunk_tokens = arena.chunk_tokens(active, hit_tokens, num_tokens)
            if num_drafted and chunk_tokens != num_tokens:
                chunk_tokens, num_drafted = min(chunk_tokens, 1), 0
            end = hit_tokens + chunk_tokens
            if not chunk_tokens or not arena.admit(active, hit_tokens, end, self._lookahead_tokens):
                break
            if active.hit_tokens is None:
                active.hit_tokens = hit_tokens
            active.num_computed = hit_tokens
            self.waiting.popleft()
            self.running.append(active)
            step.add(Chunk(active, hit_tokens, chunk_tokens, num_drafted, is_padded=True))
        self.waiting.extendleft(reversed(passed_over))

    def _pads(self, num_tokens: int, step: "_Step", *, is_beside: bool) -> bool:
        """Whether a request with one token left comes in with rows for drafts, as decoding ones."""
        return bool(self._draft_tokens) and num_tokens == 1 and not step.has_prefill and is_beside

    def _count_on(self, chunk: Chunk) -> None:
        """Take a chunk as computed, though its step is still to run."""
        active = chunk.active
        active.begin(chunk.num_tokens)
        active.is_prefilling = active.num_computed < active.num_tokens + active.num_expected
        chunk.generates = not active.is_prefilling
        if chunk.generates and self._is_asynchronous:
            active.num_expected += 1 + chunk.num_drafted
            active.num_drafted = self._draft_tokens

    def finish(self, batch: Batch, time_s: float) -> list[ActiveRequest]:
        """See `StepScheduler`."""
        ended: list[ActiveRequest] = []
        for chunk in batch.chunks:
            active = chunk.active
            active.num_in_flight -= chunk.num_tokens
            is_stale = active.num_stale > 0
            if is_stale:
                active.num_stale -= chunk.num_tokens
            if chunk.generates and active.finished_s < 0:
                self._generate(chunk, time_s, is_stale=is_stale)
                if active.finished_s >= 0:
                    ended.append(active)
        if ended:
            gone = set(map(id, ended))
            self.running = [active for active in self.running if id(active) not in gone]
            self._has_ended = True
        return ended

    def _generate(self, chunk: Chunk, time_s: float, *, is_stale: bool) -> None:
        """Give a request the tokens that a step generated, and end it if it has all of them."""
        active = chunk.active
        num_generated = 1
        if chunk.num_drafted and self._speculation is not None:
            num_right = self._speculation.num_right(chunk)
            num_generated += num_right
            if not is_stale:
                num_wrong = chunk.num_drafted - num_right
                active.num_computed -= num_wrong
                active.num_expected = max(0, active.num_expected - num_wrong)
        num_generated = min(num_generated, active.total_tokens - active.num_tokens)
        active.num_tokens += num_generated
        ends_prompt = active.first_token_s < 0
        if ends_prompt:
            active.first_token_s = time_s
        if active.num_tokens == active.total_tokens:
            active.finished_s = time_s
        if is_stale:
            # It waits to come in again.
            active.facts = RequestFacts(prompt_tokens=active.num_tokens, images=active.facts.images)
        elif self._is_asynchronous:
            active.num_expected -= num_generated
            self._arena.settle(
                active, active.num_computed - active.num_expected, ends_prompt=ends_prompt
            )
        else:
            active.num_drafted = self._draft_tokens
            if ends_prompt and active.finished_s < 0:
                # vLLM counts here how much of a prompt later ones can hit.
                self._arena.settle(
                    active, min(active.num_computed, active.num_tokens), ends_prompt=True
                )
        if active.finished_s < 0:
            return
        if is_stale:
            self.waiting.remove(active)
            self._arena.refuse(active)
        else:
            self._arena.free(active)

    def refuse_next(self) -> ActiveRequest:
        """See `StepScheduler`."""
        active = self.waiting.popleft()
        self._arena.refuse(active)
        self._has_ended = True
        return active


class _Step:
    """A step as far as it is scheduled.

    Attributes:
        chunks: What it computes.
        has_prefill: Whether it goes on with a prompt that it does not begin.
    """

    def __init__(self, budget_tokens: int, draft_queries: int) -> None:
        self._budget_tokens = budget_tokens
        self._draft_queries = draft_queries
        self.chunks: list[Chunk] = []
        self.has_prefill = False

    @property
    def most_tokens(self) -> int:
        """Most tokens that a further request may compute."""
        return self._budget_tokens - self._draft_queries

    def add(self, chunk: Chunk) -> None:
        """Let a request compute some tokens."""
        self.chunks.append(chunk)
        self._budget_tokens -= chunk.num_tokens + self._draft_queries
