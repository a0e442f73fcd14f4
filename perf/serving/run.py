"""One replay of a cell: one system at one rate of arrivals."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from jenga.eviction.known import EVICTION_POLICIES
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.arenas.jenga_arena import ManagedArena
from jenga.sim.arenas.vllm_plan import read_stock_options
from jenga.sim.batching.arena import ActiveRequest, Arena
from jenga.sim.batching.scheduler import STEPS_IN_FLIGHT, Scheduler
from jenga.sim.replays.oracle import Oracle
from jenga.sim.replays.replay import Replay
from jenga.sim.replays.session import Machine, Settings
from jenga.sim.results.quantiles import Quantiles
from jenga.sim.workload.requests import Request
from perf.serving.cases import (
    LIMITS,
    ORACLE,
    OURS,
    STOCK,
    UNLIMITED,
    Cell,
    Trace,
    clock_of,
    machine,
    room_of,
)

LOOKED_EVERY = 16
"""Number of steps between two checks of how long requests have waited."""

SAMPLED_EVERY = 512
"""Steps between two samples of the arena's memory.

A sample of stock's takes as long as many steps.
"""

TAIL = 0.99
"""Quantile of TTFT, 0 to 1, that must be within the limit of a capacity."""

WARM_UP_SHARE = 0.25
"""Share of the arrivals, 0 to 1, that only fill the cache: a server that starts cold has no hits.
"""

WARM_UP_LOAD = 0.7
"""Largest rate during a warm-up, as a share of the rate that the GPU can serve without hits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a replay. Seconds are modelled, except `cpu_s`.

    Requests of the warm-up count only in the last seven attributes.

    Attributes:
        num_requests: Number of requests that finished.
        hit_percent: Percentage of prompt tokens that were found cached at the first admission.
        requests_per_s: Requests per second, from the end of the warm-up to the last token.
        ttft_p50_s: Median seconds from arrival to the first token.
        ttft_p99_s: 99th percentile of the same.
        tpot_p50_s: Median over requests of the mean seconds from one token to the next.
        tpot_p99_s: 99th percentile of the same.
        longest_wait_s: Longest TTFT, in seconds.
        waste_percent: Percentage of held bytes that no next token needs, over all sampled steps.
            None if no step was sampled.
        preemptions: Number of preemptions.
        refused: Number of requests that do not fit the arena even alone.
        modelled_s: Seconds from the end of the warm-up to the last token.
        steps: Number of steps.
        cpu_s: CPU seconds of the replay.
        is_cut: Whether the replay was stopped because its TTFT p99 was sure to exceed the limit.
            All numbers then cover only the part before that.
    """

    num_requests: int
    hit_percent: float
    requests_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    longest_wait_s: float
    waste_percent: float | None
    preemptions: int
    refused: int
    modelled_s: float
    steps: int
    cpu_s: float
    is_cut: bool


class Runner:
    """Replays of one cell."""

    def __init__(
        self,
        cell: Cell,
        *,
        mooncake: Path | None = None,
        is_asynchronous: bool = False,
        uses_engine: bool = False,
        warm_up_share: float = WARM_UP_SHARE,
    ) -> None:
        """Prepare the cell's trace; replay nothing yet.

        Args:
            cell: The cell.
            mooncake: File of Mooncake's trace, for its cells.
            is_asynchronous: Whether a step is scheduled while the one before it runs.
            uses_engine: Whether vLLM's own scheduler runs, with the plugin's manager or vLLM's.
            warm_up_share: Share of the arrivals, 0 to 1, that belong to the warm-up.
        """
        self.cell = cell
        self._warm_up_share = warm_up_share
        self.trace: Trace = cell.trace(mooncake)
        self._is_asynchronous = is_asynchronous
        self._uses_engine = uses_engine
        self._one = machine(cell.model)
        self._clock = clock_of(self._one)

    @cached_property
    def _requests(self) -> list[Request]:
        return list(self.trace.requests(1.0))

    @cached_property
    def alone_s(self) -> float:
        """TTFT of the longest prompt when it runs alone."""
        longest = max(self._requests, key=lambda each: each.prompt_tokens)
        return self._alone_s(longest)

    def _alone_s(self, request: Request) -> float:
        alone = replace(request, arrival_s=0.0, after=(), think_s=0.0, output_tokens=1)
        arena_bytes = self._unlimited_bytes([alone])
        replay = Replay([alone], self._arena(UNLIMITED, arena_bytes, None), clock=self._clock)
        for _ in replay:
            pass
        return replay.time_s

    @cached_property
    def nominal_rate(self) -> float:
        """Arrivals per second at which the GPU can just prefill all prompts without prefix hits."""
        lengths = sorted(each.prompt_tokens for each in self._requests)
        some = lengths[:: max(1, len(lengths) // 16)]
        by_length = {each.prompt_tokens: each for each in self._requests}
        mean_s = sum(self._alone_s(by_length[tokens]) for tokens in some) / len(some)
        return self.trace.num_arrivals / (mean_s * len(lengths))

    def requests(self, rate: float) -> "Arriving":
        """Return all requests at a rate.

        Those of the warm-up arrive at a rate that needs no hits.
        """
        requests = list(self.trace.requests(rate))
        first = [each for each in requests if not each.after]
        num_warming = int(self._warm_up_share * len(first))
        if not num_warming:
            return Arriving(requests, requests[0].arrival_s, frozenset())
        slower = max(1.0, rate / (WARM_UP_LOAD * self.nominal_rate))
        end_s = first[num_warming].arrival_s
        later_s = {each.name: (slower - 1) * min(each.arrival_s, end_s) for each in first}
        warming = {each.name for each in first[:num_warming]}
        moved: list[Request] = []
        for each in requests:
            if each.after:
                later_s[each.name] = later_s[each.after[0]]
                if each.after[0] in warming:
                    warming.add(each.name)
            moved.append(replace(each, arrival_s=each.arrival_s + later_s[each.name]))
        begin_s = end_s + later_s[first[num_warming].name]
        return Arriving(moved, begin_s, frozenset(warming))

    def _unlimited_bytes(self, requests: Sequence[Request]) -> int:
        """Return a size of the arena, in bytes, at which nothing is ever evicted."""
        room = room_of(self._one, 1.0)
        num_tokens = sum(each.prompt_tokens + each.output_tokens for each in requests)
        texts_bytes = 8 * len(requests) * room.text_bytes
        return int(1.25 * num_tokens * room.token_bytes + texts_bytes) + (8 << 30)

    def _arena(self, system: str, arena_bytes: int, oracle: Oracle | None) -> Arena:
        name, _, option = system.partition(" ")
        steps_in_flight = STEPS_IN_FLIGHT[self._is_asynchronous]
        if name == STOCK:
            return make_arena(
                "vllm",
                self._one.model,
                arena_bytes,
                steps_in_flight=steps_in_flight,
                stock=read_stock_options(option or "default"),
            )
        policy = EVICTION_POLICIES[option] if option else None
        return make_arena(
            "jenga",
            self._one.model,
            arena_bytes,
            steps_in_flight=steps_in_flight,
            step_tokens=self._clock.step_tokens,
            eviction_policy=policy if oracle is None else lambda: oracle,
        )

    def _engine_replay(
        self, system: str, arena_bytes: int, requests: Sequence[Request], ended: "_Ended"
    ) -> Replay:
        """Make a replay under vLLM's own scheduler."""
        # Takes seconds, and needs vLLM.
        from jenga.engine_scheduler import make_engine

        name, _, option = system.partition(" ")
        if system not in (OURS, UNLIMITED) and name != STOCK:
            msg = f"system must be {OURS!r} or {STOCK!r} under vLLM's scheduler, got {system!r}"
            raise ValueError(msg)
        scheduler, memory = make_engine(
            "vllm" if name == STOCK else "jenga",
            Machine(
                model=self._one.model,
                arena_bytes=arena_bytes,
                clock=self._clock,
                gpu=self._one.gpu.name,
            ),
            Settings(
                is_asynchronous=self._is_asynchronous,
                stock=read_stock_options(option or "default"),
            ),
        )
        return Replay.under(
            scheduler,
            requests,
            memory,
            clock=self._clock,
            is_asynchronous=self._is_asynchronous,
            on_end=ended.add,
        )

    def run(self, system: str, rate: float, *, cut_s: float | None = None) -> Result:
        """Replay the cell.

        Args:
            system: Name such as `jenga`, `vllm retention=8192`, `unlimited`, `oracle`.
            rate: Arrivals per second.
            cut_s: TTFT p99 in seconds. The replay is stopped when its own is sure to be longer, and
                the arena's memory is not sampled. None means to run to the end.

        Raises:
            ValueError: The system refuses the model or the arena, or vLLM's scheduler has no such
                system.
        """
        arriving = self.requests(rate)
        requests = arriving.requests
        arena_bytes = self.cell.arena_bytes
        if system == UNLIMITED:
            arena_bytes = max(arena_bytes, self._unlimited_bytes(requests))
        oracle = Oracle(requests) if system == ORACLE else None
        ended = _Ended(arriving.warming)
        if self._uses_engine:
            replay = self._engine_replay(system, arena_bytes, requests, ended)
        else:
            arena = self._arena(system, arena_bytes, oracle)
            if oracle is not None and isinstance(arena, ManagedArena):
                oracle.attach(arena.manager.prefix_cache.tree)
            replay = Replay(
                requests,
                arena,
                clock=self._clock,
                is_asynchronous=self._is_asynchronous,
                on_end=ended.add,
            )
        num_counted = len(requests) - len(arriving.warming)
        most_late = num_counted - 1 - round(TAIL * (num_counted - 1))
        held_bytes = used_bytes = 0
        is_cut = False
        start_s = time.process_time()
        for step in replay:
            if oracle is not None:
                oracle.look(replay.time_s, replay.scheduler.running)
            if cut_s is None:
                if step.number % SAMPLED_EVERY == 0:
                    memory = replay.memory()
                    used_bytes += memory.used_bytes
                    held_bytes += memory.used_bytes + memory.useless_bytes + memory.empty_bytes
            elif step.number % LOOKED_EVERY == 0 and (
                ended.num_late(cut_s) + ended.num_late_of(replay, cut_s) > most_late
            ):
                is_cut = True
                break
        modelled_s = replay.time_s - arriving.begin_s
        first_s, per_s = ended.first_tokens_s.spread(), ended.per_tokens_s.spread()
        return Result(
            num_requests=len(ended.waits_s),
            hit_percent=round(100 * ended.hit_tokens / max(1, ended.prompt_tokens), 3),
            requests_per_s=_short(len(ended.waits_s) / modelled_s if modelled_s > 0 else 0.0),
            ttft_p50_s=_short(first_s.p50),
            ttft_p99_s=_short(first_s.p99),
            tpot_p50_s=_short(per_s.p50),
            tpot_p99_s=_short(per_s.p99),
            longest_wait_s=_short(max(ended.waits_s, default=0.0)),
            waste_percent=(round(100 * (1 - used_bytes / held_bytes), 2) if held_bytes else None),
            preemptions=replay.scheduler.num_preemptions,
            refused=replay.num_refused,
            modelled_s=_short(modelled_s),
            steps=replay.num_steps,
            cpu_s=round(time.process_time() - start_s, 2),
            is_cut=is_cut,
        )

    def probe(self, system: str, rate: float) -> Result:
        """Replay the cell until it is known whether the rate passes the largest limit."""
        return self.run(system, rate, cut_s=max(LIMITS) * self.alone_s)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Requests of a cell at a rate.

    Attributes:
        requests: Requests in the order of the trace.
        begin_s: Time when the warm-up ends, in seconds.
        warming: Names of the requests of the warm-up, which do not count.
    """

    requests: list[Request]
    begin_s: float
    warming: frozenset[str]


class _Ended:
    """Statistics of ended requests, without those of the warm-up."""

    def __init__(self, warming: frozenset[str]) -> None:
        self._warming = warming
        self.first_tokens_s = Quantiles()
        self.per_tokens_s = Quantiles()
        self.waits_s: list[float] = []
        self.prompt_tokens = self.hit_tokens = 0

    def add(self, active: ActiveRequest) -> None:
        """Add a request that has ended. Refused ones, and those of the warm-up, are skipped."""
        if active.finished_s < 0 or active.name in self._warming:
            return
        self.prompt_tokens += active.prompt_tokens
        self.hit_tokens += active.hit_tokens or 0
        wait_s = active.first_token_s - active.arrival_s
        self.waits_s.append(wait_s)
        self.first_tokens_s.add(wait_s)
        num_further = active.total_tokens - active.prompt_tokens - 1
        if num_further:
            self.per_tokens_s.add((active.finished_s - active.first_token_s) / num_further)

    def num_late(self, limit_s: float) -> int:
        """Return the number of ended requests whose TTFT was over a limit."""
        return sum(wait_s > limit_s for wait_s in self.waits_s)

    def num_late_of(self, replay: Replay, limit_s: float) -> int:
        """Return the number of waiting and running requests whose TTFT is over a limit already."""
        scheduler = replay.scheduler
        waiting = scheduler.waiting if isinstance(scheduler, Scheduler) else ()
        return sum(
            active.name not in self._warming
            and (active.first_token_s if active.first_token_s >= 0 else replay.time_s)
            - active.arrival_s
            > limit_s
            for active in (*scheduler.running, *waiting)
        )


def _short(seconds: float) -> float:
    """Round to five digits."""
    return float(f"{seconds:.5g}")


def as_row(result: Result) -> dict[str, object]:
    """Convert a result to fields of a row."""
    return asdict(result)
