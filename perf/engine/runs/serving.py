"""Serve turns with an engine in this process, and summarize a run."""

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jenga.sim.workload.requests import Content
from perf.engine.planning.workloads import Prompts, Turn

IDLE_S = 0.005
"""Longest sleep while the engine has nothing to do."""

RESET_S = 10.0
"""Longest wait, in seconds, for the engine to release its last requests before a cache reset."""

JUDGED_LOGPROBS = 20
"""Number of likeliest tokens whose log-probabilities are requested: vLLM's default maximum."""


@dataclass(slots=True, kw_only=True)
class Served:
    """Record of one served request. Times are seconds from the start of the run.

    Attributes:
        due_s: Time when the request should be sent.
        prompt: Tokens of the prompt.
        tokens: Generated tokens.
        first_token_s: Time when its first token was received. Not a number before that.
        last_token_s: Time when its last token was received. Not a number before the first one.
        found_tokens: Prefix hit: number of prompt tokens found in the cache.
        is_ended: Whether the request has finished.
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
        """Seconds from `due_s` to the first token. Waiting before it was sent counts too."""
        return self.first_token_s - self.due_s

    @property
    def time_per_output_token_s(self) -> float:
        """Mean seconds between its tokens; not a number if there are fewer than two."""
        if len(self.tokens) < 2:
            return math.nan
        return (self.last_token_s - self.first_token_s) / (len(self.tokens) - 1)

    def output(self) -> dict[str, Any]:
        """Return the part that runs compare: a digest of the prompt, and the generated tokens."""
        digest = hashlib.sha256(repr(self.prompt).encode()).hexdigest()[:16]
        return {"prompt": digest, "tokens": self.tokens}


class StepStats:
    """Collector of the statistics of a vLLM engine's steps: a stat logger, and its own factory."""

    def __init__(self) -> None:
        self.begin()

    def __call__(self, *_: object) -> "StepStats":
        """Return itself: vLLM calls a factory to get an engine's stat logger."""
        return self

    def begin(self) -> None:
        """Discard the statistics of all steps so far."""
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
        """Add the statistics of one step."""
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
        """Do nothing: engines never sleep here."""

    def summary(self) -> dict[str, float | int | None]:
        """Return a row's fields about steps. Running requests are averaged over time."""
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
        engine: The engine. It must have no requests.
        turns: Requests to send, and when.
        prompts: Source of the prompts' tokens.
        label: Part of the request ids.
        now: Function that returns the time in seconds.

    Returns:
        One record for each turn, in the same order.

    Raises:
        RuntimeError: The engine is idle, and every turn left waits for a turn that never ends.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    start_s = now()
    said: dict[Content, Sequence[int]] = {}
    served: dict[int, Served] = {}
    ended_s: dict[int, float] = {}
    # Prompts that do not depend on an answer are drawn before the run, so that drawing delays none.
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
    """Reset the engine's prefix cache, as soon as it has released its last request.

    Raises:
        RuntimeError: The engine still holds a request after `RESET_S` seconds.
    """
    deadline = time.monotonic() + RESET_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            msg = "the engine does not empty its cache: something of a request is still held"
            raise RuntimeError(msg)
        time.sleep(0.05)


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the 99th percentile by nearest rank; not a number without values."""
    ordered = sorted(each for each in values if not math.isnan(each))
    if not ordered:
        return math.nan, math.nan
    p99 = ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]
    return statistics.median(ordered), p99


def output_hash(served: Sequence[Served]) -> str:
    """Return a short hash of all generated tokens, in the order of the turns."""
    digest = hashlib.sha256()
    for record in served:
        digest.update(repr(record.tokens).encode())
    return digest.hexdigest()[:16]


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """Return a row's fields about requests: seconds, tokens, hits, TTFT and TPOT."""
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
    """Measure how close the two tokens were at which outputs differ.

    Args:
        engine: An idle engine.
        partings: One entry for each pair of outputs. `prompt` holds the tokens before the first
            difference, and `tokens` the two different tokens.

    Returns:
        For each entry the absolute difference of the two tokens' log-probabilities, in nats. None
        if one of them is not among the `JUDGED_LOGPROBS` likeliest tokens.
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
