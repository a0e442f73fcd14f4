"""Continuous batching as vLLM's scheduler does it: running requests first, then waiting ones.

A step has a budget of tokens. Running requests use it first, oldest first. Each computes one token
and its drafted tokens, or a chunk of its prompt. If there is no memory for one of them, the
youngest request is preempted: it loses its pages and waits again, at the head of the queue. If the
step preempted no request, waiting requests are admitted in the order of their arrival. Admission
goes on as long as the budget lasts and all known tokens of the next request fit. A prompt that
another step continues leaves room for short requests behind it (`jenga.admission.short_requests`).

With asynchronous scheduling, a step is scheduled while the step before it runs. It counts on the
tokens that the running step will generate. A request that is preempted meanwhile still gets those
tokens, and is admitted again when they are known.

`tests/sim/replays/test_engine_equality.py` compares the steps with those of vLLM's own scheduler.

Source: vLLM 0.32, `v1/core/sched/scheduler.py` and `async_scheduler.py`, policy "fcfs", without
encoder budget.
"""

from collections import deque
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from jenga.admission.short_requests import tokens_to_leave
from jenga.policies import RequestFacts
from jenga.sim.batching.arena import ActiveRequest, Arena, Chunk
from jenga.sim.batching.speculation import Speculation
from jenga.spec import check_positive

CHUNK_TOKENS = 8192
"""Most tokens that a step computes, of all requests together: vLLM's default on an H100."""

MAX_REQUESTS = 1024
"""Most requests that run at once: vLLM's default on an H100."""

STEPS_IN_FLIGHT = {False: 1, True: 2}
"""Number of steps that are scheduled at a time, as in vLLM on a GPU.

The key is whether scheduling is asynchronous.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step that was scheduled.

    Attributes:
        chunks: Tokens that it computes, in the order in which they were scheduled.
        source: An object that the scheduler gets back when the step has ended.
    """

    chunks: list[Chunk]
    source: object = None


class StepScheduler(Protocol):
    """Interface of a scheduler for a replay. It decides what each step computes."""

    @property
    def running(self) -> list[ActiveRequest]:
        """Requests that have pages, oldest first."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        ...

    @property
    def next_waiting(self) -> ActiveRequest:
        """The waiting request that is admitted next. There must be one."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs, or has ended since the last step."""
        ...

    def arrive(self, active: ActiveRequest, /) -> None:
        """Put a request at the end of the wait queue."""
        ...

    def schedule(self) -> Batch:
        """Schedule a step. It has no chunks if nothing can be computed."""
        ...

    def finish(self, batch: Batch, time_s: float, /) -> list[ActiveRequest]:
        """Apply the results of the oldest step in flight, and return the requests that ended.

        `time_s` is the time at which the step ended.
        """
        ...

    def refuse_next(self) -> ActiveRequest:
        """Refuse the next waiting request, because it does not fit in the empty arena."""
        ...


class Scheduler:
    """Scheduler that decides what each step computes.

    Attributes:
        waiting: Requests in the wait queue, the next one first.
        running: Requests that have pages, oldest first.
        num_preemptions: Number of preemptions so far.
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
        """Begin without requests.

        Args:
            arena: Memory for the requests.
            chunk_tokens: Most tokens that a step computes, of all requests together.
            max_requests: Most requests that run at once.
            speculation: Drafts for decoding requests. None for no drafts.
            is_asynchronous: Whether a step may be scheduled before the one before it has ended.
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
        """See `StepScheduler`. vLLM needs a further step to tell its workers of ended requests."""
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
            # Steps in flight may generate all that a request needs, even if all drafts are wrong.
            is_over = (
                active.num_expected > 0 and start + 2 - active.num_expected >= active.total_tokens
            )
            if num_tokens and not is_over:
                num_tokens = arena.chunk_tokens(active, start, num_tokens)
                if start + num_tokens < active.num_tokens:
                    num_tokens = max(0, num_tokens - self._tokens_to_leave(active, index))
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
        """Preempt until a running request has its slots. Return False if it is preempted itself."""
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
        """Admit waiting requests."""
        arena = self._arena
        passed_over: list[ActiveRequest] = []
        num_running = len(step.chunks)
        while self.waiting and step.most_tokens > 0 and len(self.running) < self._max_requests:
            active = self.waiting[0]
            if active.num_stale:
                # The tokens that its steps in flight generate are not known yet.
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
            if hit_tokens + chunk_tokens < active.num_tokens:
                left_tokens = self._tokens_to_leave(active)
                # It is not put off for requests behind it.
                chunk_tokens -= left_tokens if left_tokens < chunk_tokens else 0
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

    def _tokens_to_leave(self, active: ActiveRequest, index: int | None = None) -> int:
        """Return how many tokens of a step a prompt leaves to requests behind it.

        Args:
            active: The request with the prompt.
            index: Its position in `running`. None while it is admitted.
        """
        if not self._arena.leaves_room or active.facts.images:
            return 0  # a step must not cut an image
        behind = self.running[index + 1 :] if index is not None else ()
        running = (
            each.num_tokens + each.num_expected + each.num_drafted - each.num_computed
            for each in behind
        )
        num_places = self._max_requests - len(self.running) - (index is None)
        waiting = (
            self._arena.rest_tokens(each)
            for each in self.waiting
            if each is not active and not each.num_stale
        )
        return tokens_to_leave(
            chain(running, islice(waiting, max(0, num_places))),
            self._chunk_tokens,
            further_tokens=self._draft_queries,
        )

    def _pads(self, num_tokens: int, step: "_Step", *, is_beside: bool) -> bool:
        """Whether a request with one token left to compute is admitted with padding for drafts."""
        return bool(self._draft_tokens) and num_tokens == 1 and not step.has_prefill and is_beside

    def _count_on(self, chunk: Chunk) -> None:
        """Treat a chunk as computed, although its step has yet to run."""
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
        """Give a request the tokens that a step generated. End it if it then has all of them."""
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
            # The request was preempted and waits for its next admission.
            active.facts = RequestFacts(prompt_tokens=active.num_tokens, images=active.facts.images)
        elif self._is_asynchronous:
            active.num_expected -= num_generated
            self._arena.settle(
                active, active.num_computed - active.num_expected, ends_prompt=ends_prompt
            )
        else:
            active.num_drafted = self._draft_tokens
            if ends_prompt and active.finished_s < 0:
                # vLLM determines here how much of the prompt later requests can hit.
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
    """A step while it is being scheduled.

    Attributes:
        chunks: Tokens that it computes.
        has_prefill: Whether it continues a prompt that an earlier step began.
    """

    def __init__(self, budget_tokens: int, draft_queries: int) -> None:
        self._budget_tokens = budget_tokens
        self._draft_queries = draft_queries
        self.chunks: list[Chunk] = []
        self.has_prefill = False

    @property
    def most_tokens(self) -> int:
        """Most tokens that the next request may compute."""
        return self._budget_tokens - self._draft_queries

    def add(self, chunk: Chunk) -> None:
        """Add the tokens of one request to the step."""
        self.chunks.append(chunk)
        self._budget_tokens -= chunk.num_tokens + self._draft_queries
