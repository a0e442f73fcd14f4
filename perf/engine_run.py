"""One vLLM engine in a process of its own, for `perf.bench_engine`: it serves a trace and says how.

python -m perf.engine_run FOLDER

The folder has the job, and in the end its result.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jenga.sim.sources import open_source
from jenga.sim.workload import Request
from perf.engine_cases import prompts_of

WARM_UP_TOKENS = 700, 33
"""Of two prompts that are served first, so that what compiles at a first use has done so."""

WARM_UP_OUTPUT_TOKENS = 8

JOB, RESULT = "job.json", "result.json"
"""Files of the folder."""

RESET_ATTEMPTS = 50
"""A tenth of a second apart."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What an engine said of itself while it served a trace.

    Attributes:
        seconds: From the first request's arrival to the last one's end.
        running: (seconds since the step before, requests that ran in a step).
        usage: Share of the cache in use, step by step.
        first_token_s: From a request's arrival to its first token.
        token_s: From one token to the next, mean of a request.
        prompt_tokens: Of all requests that ended.
        found_tokens: Of those, not computed but found.
        output_tokens: Generated.
        num_requests: That ended.
        num_preemptions: Of requests.
    """

    seconds: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    found_tokens: int = 0
    output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0

    def summary(self) -> dict[str, float]:
        """What a row says of it."""
        seconds = sum(each for each, _ in self.running) or 1.0
        return {
            "seconds": self.seconds,
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens / self.seconds,
            "found_share": self.found_tokens / max(1, self.prompt_tokens),
            "mean_running": sum(each * count for each, count in self.running) / seconds,
            "most_running": max((count for _, count in self.running), default=0),
            "mean_usage": statistics.fmean(self.usage or [0.0]),
            "preemptions": self.num_preemptions,
            "first_token_p50_s": statistics.median(self.first_token_s or [0.0]),
            "token_p50_ms": 1e3 * statistics.median(self.token_s or [0.0]),
        }


class Recorder:
    """Hears what an engine reports of its steps, and keeps it as one run."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all, and wait for the first step."""
        self.run = Run()
        self._began = self._last = time.monotonic()

    def end(self) -> Run:
        """Get the run that is over."""
        self.run.seconds = time.monotonic() - self._began
        return self.run

    def __call__(self, *_: object) -> "Recorder":
        """Be what vLLM makes of a factory of loggers."""
        return self

    def record(
        self,
        scheduler_stats: Any,  # noqa: ANN401  vLLM's, which are not stable
        iteration_stats: Any,  # noqa: ANN401
        mm_cache_stats: object = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Take in a step."""
        run, now = self.run, time.monotonic()
        if scheduler_stats is not None:
            run.running.append((now - self._last, scheduler_stats.num_running_reqs))
            run.usage.append(scheduler_stats.kv_cache_usage)
            self._last = now
        if iteration_stats is None:
            return
        run.num_preemptions += iteration_stats.num_preempted_reqs
        run.first_token_s += iteration_stats.time_to_first_tokens_iter
        for request in iteration_stats.finished_requests:
            run.num_requests += 1
            run.prompt_tokens += request.num_prompt_tokens
            run.found_tokens += request.num_cached_tokens
            run.output_tokens += request.num_generation_tokens
            run.token_s.append(request.mean_time_per_output_token)

    def log_engine_initialized(self) -> None:
        """Say nothing of it."""

    def log(self) -> None:
        """Say nothing every now and then."""

    def record_sleep_state(self, *_: object) -> None:
        """Engines here never sleep."""


def serve(
    engine: Any,  # noqa: ANN401  vLLM's
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    *,
    name: str,
) -> None:
    """Send requests as they arrive, and step until all have ended."""
    from vllm import SamplingParams

    start = time.monotonic()
    num_sent = 0
    while num_sent < len(requests) or engine.has_unfinished_requests():
        elapsed = time.monotonic() - start
        while num_sent < len(requests) and requests[num_sent].arrival_s <= elapsed:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=requests[num_sent].output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            prompt = {"prompt_token_ids": list(prompts[num_sent])}
            engine.add_request(f"{name}-{num_sent}", prompt, params)
            num_sent += 1
        if engine.has_unfinished_requests():
            engine.step()
        else:
            time.sleep(min(0.01, max(0.0, requests[num_sent].arrival_s - elapsed)))


def empty_cache(engine: Any) -> None:  # noqa: ANN401  vLLM's
    """Forget what was cached, as soon as the last request has been let go.

    Raises:
        RuntimeError: It never is.
    """
    for _ in range(RESET_ATTEMPTS):
        if engine.reset_prefix_cache():
            return
        time.sleep(0.1)
    msg = "the engine does not forget what it has cached: something of a request is still held"
    raise RuntimeError(msg)


def main(arguments: Sequence[str] | None = None) -> None:
    """Do a job: options of the engine, its trace, how often to serve it."""
    (name,) = sys.argv[1:] if arguments is None else arguments
    folder = Path(name)
    job = json.loads((folder / JOB).read_text())
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    began = time.monotonic()
    recorder = Recorder()
    args = EngineArgs(**job["options"])
    engine = LLMEngine.from_engine_args(args, stat_loggers=[recorder])  # pyright: ignore[reportArgumentType] (its duck)
    start_s = time.monotonic() - began
    requests = list(open_source(job["trace"], limit=job["limit"], speed=job["speed"]))
    vocab_size = engine.model_config.get_vocab_size()
    prompts = prompts_of(requests, vocab_size)
    longest = engine.model_config.max_model_len - WARM_UP_OUTPUT_TOKENS
    warm_up = [prompts[0][: min(longest, count)] for count in WARM_UP_TOKENS]
    first = [
        Request(name="", prompt=requests[0].prompt, output_tokens=WARM_UP_OUTPUT_TOKENS)
        for _ in warm_up
    ]
    print(f"started in {start_s:.1f} s", flush=True)
    serve(engine, first, warm_up, name="first")
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    runs: list[dict[str, float]] = []
    for number in range(job["num_runs"]):
        empty_cache(engine)
        recorder.begin()
        serve(engine, requests, prompts, name=str(number))
        runs.append(recorder.end().summary())
        print(f"run {number}: {runs[-1]}", flush=True)
    (folder / RESULT).write_text(json.dumps({"start_s": start_s, "runs": runs}))
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
