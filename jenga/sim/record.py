"""What is written of a replay: rows on the way, and a summary at its end."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jenga.sim.arena import ActiveRequest
from jenga.sim.replay import Replay, Step
from jenga.sim.rows import RequestRow, Row, Spread, StepRow, SummaryRow

SAMPLED_EVERY = 16
"""Steps between two looks at the arena's bytes, each of which costs as much as several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What to write, and how often to look.

    Attributes:
        run: Joins the rows.
        every: Steps between two step rows; also the steps that waste is the mean of.
        check_every: Steps between two checks of the manager's books; 0 for none.
        keep_requests: Whether every request gets a row.
    """

    run: str
    every: int = SAMPLED_EVERY
    check_every: int = 0
    keep_requests: bool = False


class Recorder:
    """Runs a replay and makes its rows."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._ended: list[ActiveRequest] = []
        self._first_tokens_s = array("d")
        self._per_tokens_s = array("d")
        self._ends_s = array("d")
        self._first_arrival_s: float | None = None

    def on_end(self, active: ActiveRequest) -> None:
        """Give this to the replay: it notes how each request fared."""
        arrival_s = active.request.arrival_s
        if self._first_arrival_s is None or arrival_s < self._first_arrival_s:
            self._first_arrival_s = arrival_s
        if self._recording.keep_requests:
            self._ended.append(active)
        if active.finished_s < 0:
            return
        self._first_tokens_s.append(active.first_token_s - arrival_s)
        self._ends_s.append(active.finished_s - arrival_s)
        num_further = active.total_tokens - active.prompt_tokens - 1
        if num_further:
            self._per_tokens_s.append((active.finished_s - active.first_token_s) / num_further)

    def rows(
        self, replay: Replay, *, progress: Callable[[Replay, Step], None] | None = None
    ) -> Iterator[Row]:
        """Run a replay to its end; its rows, the last one its summary.

        Args:
            replay: Not begun; its `on_end` is this one's.
            progress: Called in every step.
        """
        every, check_every = self._recording.every, self._recording.check_every
        wastes = num_samples = 0.0
        num_decode_steps = num_decoding = 0
        for step in replay:
            if step.num_decoding:
                num_decode_steps += 1
                num_decoding += step.num_decoding
            if step.number % every == 0:
                row = self._step_row(replay, step)
                if step.num_decoding:
                    held = row.used_bytes + row.useless_bytes + row.empty_bytes
                    wastes += 1 - row.used_bytes / held if held else 0.0
                    num_samples += 1
                yield row
            if check_every and step.number % check_every == 0:
                replay.arena.check()
            if progress is not None:
                progress(replay, step)
            yield from self._request_rows()
        yield from self._request_rows()
        if check_every:
            replay.arena.check()
        yield self._summary(
            replay,
            waste=wastes / num_samples if num_samples else 0.0,
            mean_decode_batch=num_decoding / num_decode_steps if num_decode_steps else 0.0,
        )

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
                arrival_s=active.request.arrival_s,
                first_token_s=active.first_token_s,
                finished_s=active.finished_s,
                num_preemptions=active.num_preemptions,
                refused="" if active.finished_s >= 0 else "does not fit the arena alone",
            )
        self._ended.clear()

    def _summary(self, replay: Replay, *, waste: float, mean_decode_batch: float) -> SummaryRow:
        seconds = replay.time_s - (self._first_arrival_s or 0.0)
        return SummaryRow(
            run=self._recording.run,
            num_steps=replay.num_steps,
            seconds=seconds,
            num_requests=replay.num_finished,
            num_refused=replay.num_refused,
            prompt_tokens=replay.prompt_tokens,
            output_tokens=replay.output_tokens,
            hit_tokens=replay.hit_tokens,
            hit_rate=replay.hit_tokens / replay.prompt_tokens if replay.prompt_tokens else 0.0,
            waste=waste,
            mean_decode_batch=mean_decode_batch,
            num_preemptions=replay.scheduler.num_preemptions,
            evicted_pages=replay.arena.num_evicted,
            requests_per_s=replay.num_finished / seconds if seconds else 0.0,
            tokens_per_s=replay.output_tokens / seconds if seconds else 0.0,
            ttft_s=spread(self._first_tokens_s),
            tpot_s=spread(self._per_tokens_s),
            e2e_s=spread(self._ends_s),
        )


def spread(values: "array[float]") -> Spread:
    """Quantiles, each a value that occurs, and the mean; all 0 of none."""
    if not values:
        return Spread()
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(
        p50=ordered[round(0.50 * last)],
        p90=ordered[round(0.90 * last)],
        p99=ordered[round(0.99 * last)],
        mean=sum(ordered) / len(ordered),
    )
