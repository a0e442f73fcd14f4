"""Rows of a replay: some while it runs, and a summary at its end."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jenga.prefix.miss_log import missed_tokens
from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.replays.replay import Replay, Step
from jenga.sim.results.quantiles import Quantiles
from jenga.sim.results.rows import (
    EvictionRow,
    LossTokens,
    MissRow,
    RequestRow,
    Row,
    StepRow,
    SummaryRow,
)

SAMPLED_EVERY = 16
"""Steps between two counts of the arena's bytes. One count costs as much as several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Settings of the rows of a replay.

    Attributes:
        run: Name of the run, which all its rows have.
        every: Steps between two step rows. These steps are also the sample for waste.
        check_every: Steps between two checks of the manager's records. 0 for no checks.
        keep_requests: Whether each request gets a row.
        keep_evictions: Whether each lost checkpoint and each look-up gets a row.
    """

    run: str
    every: int = SAMPLED_EVERY
    check_every: int = 0
    keep_requests: bool = False
    keep_evictions: bool = False


class Recorder:
    """Run a replay and make its rows. Memory does not grow with the number of requests."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._ended: list[ActiveRequest] = []
        self._first_tokens_s = Quantiles()
        self._per_tokens_s = Quantiles()
        self._ends_s = Quantiles()
        self._first_arrival_s: float | None = None
        self._num_decode_steps = self._num_decoding = 0
        # Number of decoding requests -> [steps sampled, sum of wastes, bytes held, bytes unused].
        self._sampled: dict[int, list[float]] = {}
        self._missed_tokens: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    def on_end(self, active: ActiveRequest) -> None:
        """Record times of a request that ended. The replay gets this method as its `on_end`."""
        arrival_s = active.arrival_s
        if self._first_arrival_s is None or arrival_s < self._first_arrival_s:
            self._first_arrival_s = arrival_s
        if self._recording.keep_requests:
            self._ended.append(active)
        if active.refusal:
            self._refusals[active.refusal] += 1
        if active.finished_s < 0:
            return
        self._first_tokens_s.add(active.first_token_s - arrival_s)
        self._ends_s.add(active.finished_s - arrival_s)
        num_further = active.total_tokens - active.prompt_tokens - 1
        if num_further:
            self._per_tokens_s.add((active.finished_s - active.first_token_s) / num_further)

    def rows(
        self, replay: Replay, *, on_step: Callable[[Replay, Step], None] | None = None
    ) -> Iterator[Row]:
        """Run a replay to its end. Yield its rows; the last one is its summary.

        Args:
            replay: A replay that has not begun, or one loaded from a snapshot together with this
                recorder. Its `on_end` is this recorder's.
            on_step: Called in each step, after all rows up to it were taken.
        """
        every, check_every = self._recording.every, self._recording.check_every
        keeps_evictions = self._recording.keep_evictions
        if keeps_evictions:
            replay.arena.record_evictions()
        for step in replay:
            yield from self._request_rows()
            if keeps_evictions:
                yield from self._eviction_rows(replay, step)
                yield from self._miss_rows(replay, step)
            if step.num_decoding:
                self._num_decode_steps += 1
                self._num_decoding += step.num_decoding
            if step.number % every == 0:
                row = self._step_row(replay, step)
                if step.num_decoding:
                    self._sample(row)
                yield row
            if check_every and step.number % check_every == 0:
                replay.arena.check()
            if on_step is not None:
                on_step(replay, step)
        yield from self._request_rows()
        if check_every:
            replay.arena.check()
        yield self._summary(replay)

    def _sample(self, row: StepRow) -> None:
        held_bytes = row.used_bytes + row.useless_bytes + row.empty_bytes
        unused_bytes = held_bytes - row.used_bytes
        sums = self._sampled.setdefault(row.num_decoding, [0, 0.0, 0, 0])
        for index, value in enumerate(
            (1, unused_bytes / held_bytes if held_bytes else 0.0, held_bytes, unused_bytes)
        ):
            sums[index] += value

    def _waste(self, *, fewest_decoding: int = 0) -> float | None:
        """Mean waste of sampled steps with at least so many decoding requests. None without any."""
        num_steps = wastes = 0.0
        for num_decoding, (count, waste, _, _) in self._sampled.items():
            if num_decoding >= fewest_decoding:
                num_steps += count
                wastes += waste
        return wastes / num_steps if num_steps else None

    def _waste_of_bytes(self) -> float | None:
        held_bytes = sum(sums[2] for sums in self._sampled.values())
        unused_bytes = sum(sums[3] for sums in self._sampled.values())
        return unused_bytes / held_bytes if held_bytes else None

    def _step_row(self, replay: Replay, step: Step) -> StepRow:
        memory = replay.memory()
        return StepRow(
            run=self._recording.run,
            step=step.number,
            time_s=step.time_s,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            num_decoding=step.num_decoding,
            prefill_tokens=step.prefill_tokens,
            used_bytes=memory.used_bytes,
            useless_bytes=memory.useless_bytes,
            cached_bytes=memory.cached_bytes,
            empty_bytes=memory.empty_bytes,
            unallocated_bytes=memory.unallocated_bytes,
            tables=memory.tables,
        )

    def _request_rows(self) -> Iterator[RequestRow]:
        for active in self._ended:
            yield RequestRow(
                run=self._recording.run,
                request=active.name,
                prompt_tokens=active.prompt_tokens,
                output_tokens=active.num_tokens - active.prompt_tokens,
                hit_tokens=active.hit_tokens or 0,
                arrival_s=active.arrival_s,
                first_token_s=active.first_token_s,
                finished_s=active.finished_s,
                num_preemptions=active.num_preemptions,
                refused=active.refusal,
            )
        self._ended.clear()

    def _eviction_rows(self, replay: Replay, step: Step) -> Iterator[EvictionRow]:
        for each in replay.arena.take_evictions():
            yield EvictionRow(
                run=self._recording.run,
                step=step.number,
                time_s=step.time_s,
                cause=each.cause,
                left_by=each.left_by,
                for_request=each.for_request,
                point=each.kind.name,
                past=each.past.name,
                num_tokens=each.num_tokens,
                kept_tokens=each.kept_tokens,
                freed_bytes=each.freed_bytes,
                worth=each.worth,
                was_awaited=each.was_awaited,
            )

    def _miss_rows(self, replay: Replay, step: Step) -> Iterator[MissRow]:
        for each in replay.arena.take_misses():
            self._missed_tokens.update(missed_tokens(each))
            yield MissRow(
                run=self._recording.run,
                step=step.number,
                time_s=step.time_s,
                request=each.request,
                asked_tokens=each.asked_tokens,
                found_tokens=each.found_tokens,
                table=each.table,
                layer_type=each.layer_type,
                never_tokens=each.never_tokens,
                evicted_tokens=each.evicted_tokens,
                bare_tokens=each.bare_tokens,
                losses=[
                    LossTokens(
                        cause=lost.loss.cause,
                        step=lost.loss.taken + 1,
                        left_by=lost.loss.left_by,
                        for_request=lost.loss.for_request,
                        evicted_tokens=lost.evicted_tokens,
                        bare_tokens=lost.bare_tokens,
                    )
                    for lost in each.losses
                ],
            )

    def _summary(self, replay: Replay) -> SummaryRow:
        seconds = replay.time_s - (self._first_arrival_s or 0.0)
        num_decode_steps = self._num_decode_steps
        moved = replay.arena.moved_bytes
        return SummaryRow(
            run=self._recording.run,
            num_steps=replay.num_steps,
            seconds=seconds,
            num_requests=replay.num_finished,
            num_refused=replay.num_refused,
            refusals=dict(self._refusals),
            prompt_tokens=replay.prompt_tokens,
            output_tokens=replay.output_tokens,
            hit_tokens=replay.hit_tokens,
            hit_rate=replay.hit_tokens / replay.prompt_tokens if replay.prompt_tokens else 0.0,
            waste=self._waste(),
            busy_waste=self._waste(fewest_decoding=-(-max(self._sampled, default=0) // 2)),
            waste_of_bytes=self._waste_of_bytes(),
            mean_decode_batch=self._num_decoding / num_decode_steps if num_decode_steps else 0.0,
            num_preemptions=replay.scheduler.num_preemptions,
            evicted_pages=replay.arena.num_evicted,
            stored_bytes=moved.stored,
            ahead_bytes=moved.ahead,
            loaded_bytes=moved.loaded,
            requests_per_s=replay.num_finished / seconds if seconds else 0.0,
            tokens_per_s=replay.output_tokens / seconds if seconds else 0.0,
            ttft_s=self._first_tokens_s.spread(),
            tpot_s=self._per_tokens_s.spread(),
            e2e_s=self._ends_s.spread(),
            missed_tokens=dict(self._missed_tokens),
        )
