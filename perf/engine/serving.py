"""Serving turns with an engine in this process, and what a run says of itself."""

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jenga.sim.workload.requests import Content
from perf.engine.workloads import Prompts, Turn

IDLE_S = 0.005
"""Longest sleep while the engine has nothing to do."""

RESET_S = 10.0
"""For the last requests to be let go before a cache is emptied."""

JUDGED_LOGPROBS = 20
"""Likeliest tokens that an engine tells of; vLLM allows no more by default."""


@dataclass(slots=True, kw_only=True)
class Served:
    """One request, as it went.

    Attributes:
        due_s: When it was to be sent, from the start of the run.
        prompt: Its tokens.
        tokens: Tokens that were generated.
        first_token_s: When its first token came.
        last_token_s: When its last token came.
        found_tokens: Tokens of the prompt found in the cache.
        is_ended: Whether it has all its tokens.
    """

    due_s: float
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    found_tokens: int = 0
    is_ended: bool = False

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from when it was due: what it waited to be sent counts."""
        return self.first_token_s - self.due_s

    @property
    def time_per_output_token_s(self) -> float:
        """Mean seconds between its tokens; not a number where there is one alone."""
        if len(self.tokens) < 2:
            return math.nan
        return (self.last_token_s - self.first_token_s) / (len(self.tokens) - 1)

    def output(self) -> dict[str, Any]:
        """Get what is compared: a digest of the prompt, and the tokens generated."""
        digest = hashlib.sha256(repr(self.prompt).encode()).hexdigest()[:16]
        return {"prompt": digest, "tokens": self.tokens}


class StepStats:
    """Takes what a vLLM engine reports of its steps; called as vLLM calls a maker of loggers."""

    def __init__(self) -> None:
        self.begin()

    def __call__(self, *_: object) -> "StepStats":
        """Be the logger of an engine."""
        return self

    def begin(self) -> None:
        """Forget all steps."""
        self._last_s = time.monotonic()
        self._running: list[tuple[float, int]] = []
        self._usage: list[float] = []
        self._num_preemptions = self._num_drafted = self._num_accepted = 0

    def record(
        self,
        scheduler_stats: Any,  # noqa: ANN401  vLLM's, which change from version to version
        iteration_stats: Any,  # noqa: ANN401
        mm_cache_stats: object = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Record a step."""
        now_s = time.monotonic()
        if scheduler_stats is not None:
            self._running.append((now_s - self._last_s, scheduler_stats.num_running_reqs))
            self._usage.append(scheduler_stats.kv_cache_usage)
            self._last_s = now_s
            drafts = scheduler_stats.spec_decoding_stats
            if drafts is not None:
                self._num_drafted += drafts.num_draft_tokens
                self._num_accepted += drafts.num_accepted_tokens
        if iteration_stats is not None:
            self._num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Print nothing."""

    def log(self) -> None:
        """Print nothing."""

    def record_sleep_state(self, *_: object) -> None:
        """Engines never sleep here."""

    def summary(self) -> dict[str, float | int | None]:
        """Get what a row says of the steps."""
        seconds = sum(each for each, _ in self._running) or 1.0
        accepted = self._num_accepted / self._num_drafted if self._num_drafted else None
        return {
            "num_steps": len(self._running),
            "mean_running": sum(each * count for each, count in self._running) / seconds,
            "most_running": max((count for _, count in self._running), default=0),
            "mean_usage": statistics.fmean(self._usage or [0.0]),
            "num_preemptions": self._num_preemptions,
            "accepted_share": accepted,
        }


def serve(
    engine: Any,  # noqa: ANN401  a vLLM engine
    turns: Sequence[Turn],
    prompts: Prompts,
    *,
    label: str,
    now: Callable[[], float] = time.monotonic,
) -> list[Served]:
    """Send requests when they are due, and step the engine until all have ended.

    Args:
        engine: The engine; no request may be in it.
        turns: What is sent.
        prompts: Where prompts' tokens come from.
        label: Part of the requests' ids.
        now: A clock, in seconds.

    Returns:
        One record for each turn.

    Raises:
        RuntimeError: The engine is idle, and a turn waits for one that never ends.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    start_s = now()
    said: dict[Content, Sequence[int]] = {}
    served: dict[int, Served] = {}
    ended_s: dict[int, float] = {}
    # What is sent at once must not wait for tokens that are drawn.
    ready = {
        index: prompts.tokens(turn.request, said)
        for index, turn in enumerate(turns)
        if turn.after is None
    }

    def due_s(index: int) -> float:
        turn = turns[index]
        begin_s = 0.0 if turn.after is None else ended_s.get(turn.after, math.inf)
        return begin_s + turn.delay_s

    waiting = list(range(len(turns)))
    while waiting or engine.has_unfinished_requests():
        elapsed_s = now() - start_s
        for index in [each for each in waiting if due_s(each) <= elapsed_s]:
            waiting.remove(index)
            request = turns[index].request
            prompt = ready.pop(index, None) or prompts.tokens(request, said)
            served[index] = Served(due_s=due_s(index), prompt=prompt)
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(f"{index}-{label}", {"prompt_token_ids": prompt}, sampling)
        if not engine.has_unfinished_requests():
            next_s = min(map(due_s, waiting))
            if math.isinf(next_s):
                msg = f"{len(waiting)} turns wait for one that was never sent"
                raise RuntimeError(msg)
            time.sleep(min(IDLE_S, max(0.0, next_s - elapsed_s)))
            continue
        outputs = engine.step()
        elapsed_s = now() - start_s
        for output in outputs:
            index = int(output.request_id.split("-")[0])
            record = served[index]
            record.found_tokens = output.num_cached_tokens or record.found_tokens
            tokens = output.outputs[0].token_ids
            if tokens:
                if not record.tokens:
                    record.first_token_s = elapsed_s
                record.tokens += tokens
                record.last_token_s = elapsed_s
            if output.finished:
                record.is_ended = True
                ended_s[index] = elapsed_s
                if (name := turns[index].request.output) is not None:
                    said[name] = tuple(record.tokens)
    return [served[index] for index in range(len(turns))]


def empty_cache(engine: Any) -> None:  # noqa: ANN401
    """Forget what was cached, once the last request has been let go.

    Raises:
        RuntimeError: A request is still held.
    """
    deadline = time.monotonic() + RESET_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            msg = "the engine does not empty its cache: something of a request is still held"
            raise RuntimeError(msg)
        time.sleep(0.05)


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Get the median and the 99th percentile by nearest rank; of nothing, not a number."""
    ordered = sorted(each for each in values if not math.isnan(each))
    if not ordered:
        return math.nan, math.nan
    p99 = ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]
    return statistics.median(ordered), p99


def output_hash(served: Sequence[Served]) -> str:
    """Get a short name of all tokens that were generated, in the order of the turns."""
    digest = hashlib.sha256()
    for record in served:
        digest.update(repr(record.tokens).encode())
    return digest.hexdigest()[:16]


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """Get what a row says of requests: seconds, tokens, and how long each waited."""
    seconds = max(record.last_token_s for record in served)
    prompt_tokens = sum(len(record.prompt) for record in served)
    output_tokens = sum(len(record.tokens) for record in served)
    first_p50_s, first_p99_s = quantiles([each.time_to_first_token_s for each in served])
    token_p50_s, token_p99_s = quantiles([each.time_per_output_token_s for each in served])
    return {
        "seconds": seconds,
        "num_requests": len(served),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(served) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "tokens_per_s": (prompt_tokens + output_tokens) / seconds,
        "found_share": sum(record.found_tokens for record in served) / prompt_tokens,
        "ttft_p50_s": first_p50_s,
        "ttft_p99_s": first_p99_s,
        "tpot_p50_ms": 1e3 * token_p50_s,
        "tpot_p99_ms": 1e3 * token_p99_s,
        "output_hash": output_hash(served),
    }


def judge(
    engine: Any,  # noqa: ANN401
    partings: Sequence[dict[str, Any]],
) -> list[float | None]:
    """Say how much less likely the second of two tokens is than the first.

    Args:
        engine: An idle engine.
        partings: For each, `prompt` (tokens up to where two outputs part), and `tokens` (the two
            tokens that follow there).

    Returns:
        The difference of the two tokens' log-probabilities, without a sign; None where one of them
        is not among the likeliest.
    """
    from vllm import SamplingParams

    gaps: list[float | None] = [None] * len(partings)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        logprobs=JUDGED_LOGPROBS,
    )
    for index, parting in enumerate(partings):
        prompt = {"prompt_token_ids": list(parting["prompt"])}
        engine.add_request(f"{index}-judged", prompt, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            index = int(output.request_id.split("-")[0])
            likely = output.outputs[0].logprobs[0]
            first, second = (likely.get(token) for token in partings[index]["tokens"])
            if first is not None and second is not None:
                gaps[index] = abs(first.logprob - second.logprob)
    return gaps
