"""Continuous batching as vLLM's scheduler does it: what runs goes on, then what waits comes in.

A step has a budget of tokens. Running requests take theirs first, oldest first: one token each and
those drafted, or a chunk of their prompt. Where there is no memory for one, the youngest loses its
pages and waits again, at the head of the queue. If none did, waiting requests come in, first come
first served, as long as the budget lasts and the whole of what they know fits.

Source: vLLM 0.32, `v1/core/sched/scheduler.py`, policy "fcfs", computed synchronously, without
encoder budget, and without padding of requests that come in with one token left.
"""

from collections import deque

from jenga.sim.arena import ActiveRequest, Arena
from jenga.sim.speculation import Speculation
from jenga.spec import check_positive

CHUNK_TOKENS = 8192
"""Tokens computed in a step, of all requests together: vLLM's default on an H100."""

MAX_REQUESTS = 1024
"""Requests running at once: vLLM's default on an H100."""


class Scheduler:
    """Decides what every step computes.

    Attributes:
        waiting: Requests that arrived, the next one first.
        running: Requests that have pages, oldest first.
        scheduled: Requests of which the current step computes `num_scheduled` tokens.
        num_preemptions: So far.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        max_requests: int = MAX_REQUESTS,
        speculation: Speculation | None = None,
    ) -> None:
        """Nothing has arrived.

        Args:
            arena: The memory.
            chunk_tokens: Tokens computed in a step, of all requests together.
            max_requests: Requests running at once.
            speculation: What is drafted; None for nothing.
        """
        check_positive("scheduler", "chunk_tokens", chunk_tokens)
        check_positive("scheduler", "max_requests", max_requests)
        self._arena = arena
        self._chunk_tokens = chunk_tokens
        self._max_requests = max_requests
        self._speculation = speculation
        self.waiting: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []
        self.scheduled: list[ActiveRequest] = []
        self.num_preemptions = 0

    def arrive(self, active: ActiveRequest) -> None:
        """Let a request wait behind all others."""
        self.waiting.append(active)
        self._arena.waits(active)

    def step(self) -> None:
        """Schedule a step; nothing is scheduled if nothing can be computed."""
        arena = self._arena
        arena.new_step()
        scheduled: list[ActiveRequest] = []
        self.scheduled = scheduled
        budget_tokens = self._chunk_tokens
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(self.running) and budget_tokens:
            active = self.running[index]
            start = active.num_computed
            num_tokens = active.num_tokens - start
            if num_tokens > 1:
                num_tokens = arena.chunk_tokens(active, start, min(num_tokens, budget_tokens))
                if not num_tokens:
                    index += 1
                    continue
            end = start + num_tokens
            is_decoding = num_tokens == 1 and start >= active.prompt_tokens
            if self._speculation is not None and is_decoding:
                num_drafted = min(self._speculation.draft_tokens, budget_tokens - num_tokens)
                active.num_drafted = num_drafted
                num_tokens += num_drafted
                end += num_drafted + self._speculation.lookahead_tokens
            if not arena.grow(active, end) and not self._make_room(active, end):
                break
            active.num_scheduled = num_tokens
            scheduled.append(active)
            budget_tokens -= num_tokens
            index += 1
        if self.num_preemptions == num_preemptions:
            self._admit(budget_tokens)
        arena.end_step()

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
            if self._arena.grow(active, num_tokens):
                return True

    def _admit(self, budget_tokens: int) -> None:
        arena = self._arena
        while self.waiting and budget_tokens and len(self.running) < self._max_requests:
            active = self.waiting[0]
            hit_tokens = arena.find(active)
            wanted_tokens = min(active.num_tokens - hit_tokens, budget_tokens)
            num_tokens = arena.chunk_tokens(active, hit_tokens, wanted_tokens)
            if not num_tokens or not arena.admit(active, hit_tokens, hit_tokens + num_tokens):
                return
            if active.hit_tokens is None:
                active.hit_tokens = hit_tokens
            active.num_computed = hit_tokens
            self.waiting.popleft()
            self.running.append(active)
            active.num_scheduled = num_tokens
            self.scheduled.append(active)
            budget_tokens -= num_tokens

    def finish_step(self, time_s: float) -> list[ActiveRequest]:
        """Note that the step was computed; requests that know all their tokens get one more.

        Args:
            time_s: When the step ends.

        Returns:
            Requests that have all their tokens.
        """
        arena = self._arena
        finished: list[ActiveRequest] = []
        for active in self.scheduled:
            start = active.num_computed
            end = start + active.num_scheduled
            if active.num_drafted:
                end = self._accept(active, end)
            elif end <= active.prompt_tokens or end - start > 1:
                arena.computed(active, start, end)
            active.num_computed = end
            active.num_scheduled = 0
            if end >= active.num_tokens:
                active.num_tokens = end + 1
                if active.first_token_s < 0:
                    active.first_token_s = time_s
                if active.num_tokens == active.total_tokens:
                    active.finished_s = time_s
                    arena.free(active)
                    finished.append(active)
        if finished:
            gone = set(map(id, finished))
            self.running = [active for active in self.running if id(active) not in gone]
        self.scheduled = []
        return finished

    def _accept(self, active: ActiveRequest, end: int) -> int:
        """Take drafted tokens that are right, as far as the request goes; tokens computed then."""
        num_drafted, active.num_drafted = active.num_drafted, 0
        if self._speculation is not None:
            num_right = self._speculation.accepted(active.name, active.num_tokens, num_drafted)
            end -= num_drafted - num_right
        return min(end, active.total_tokens - 1)

    def refuse_next(self) -> ActiveRequest:
        """Send the next waiting request away: it does not fit the arena alone."""
        active = self.waiting.popleft()
        self._arena.refuse(active)
        return active
