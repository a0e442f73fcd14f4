"""`jenga replay`: make replays from the command line, and print their results."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

from jenga.models import ModelFacts, ReadOptions
from jenga.sim.arenas.by_name import EVICTING
from jenga.sim.arenas.vllm_plan import DEFAULT_STOCK, StockOptions
from jenga.sim.batching.measured import measured
from jenga.sim.batching.speculation import Speculation
from jenga.sim.batching.step_time import (
    HOST_BYTES_PER_S,
    PEAKS,
    SHARES,
    Achieved,
    StepTime,
    Weights,
    drafted_time,
    weights_of,
)
from jenga.sim.commands.replay_checks import check_options, notes_on_managers
from jenga.sim.commands.replay_options import add_options
from jenga.sim.commands.replay_text import outcomes_text
from jenga.sim.hardware.budget import memory_budget
from jenga.sim.hardware.gpus import GPUS, Gpu, find_gpu
from jenga.sim.planning.engine_layers import find_served_model
from jenga.sim.planning.plan import formats_of, served_model
from jenga.sim.replays.replay import Clock, Replay, Step, constant_clock
from jenga.sim.replays.row_file import RowFile
from jenga.sim.replays.session import (
    Machine,
    Outcome,
    Running,
    Settings,
    Trace,
    outcome_of,
    run_row,
)
from jenga.sim.workload.sources import GENERATORS, open_source
from jenga.spec import ELEMENT_BYTES, check_positive

DESCRIPTION = """\
Replay requests step by step through a memory manager, as an engine would serve them, but without a
GPU: continuous batching, chunked prefill, preemption and prefix caching. Tokens, pages and bytes
are counted. Seconds come from a roofline model of the GPU. It uses the shares of the GPU's peaks
that were measured for this package, or the peaks themselves if nothing was measured on that GPU."""

EPILOG = f"""\
traces:
  a file, or a folder in the format weka; the beginning of a file tells its format:
    mooncake, weka (AgentX), sharegpt, wildchat: JSON or JSON lines; the last three also Parquet
    azure, burstgpt, lengths: CSV
  with arguments: weka:path=traces,rate=0.1,most_think_s=10  sharegpt:path=chats.json,rate=2
{fill(", ".join(GENERATORS), 96, initial_indent="  a workload: ", subsequent_indent="    ")}
  with arguments: articles:n=24,questions=8,tokens=30000  long-documents  mmlu-pro:n=500,rate=4
    rag:k=8,rate=0.5  agents:n=24,rate=0.05  mixed:rate=2
    rate is the mean number of arrivals per second; arrival times are random
  --list-traces lists all of them with their arguments; docs/planning-and-replaying.md has a sample
  of each format

managers:
  jenga   Jenga's manager, with pages of the planned geometry
  lcm     the same, with large pages of the exact least common multiple (the paper's rule)
  max     the same, with every small page as large as the largest one
  paged   the same, with one page size for all layers that keeps every token (PagedAttention)
  static  the same, with a fixed part of the arena for each layer type
  gcd     pages made of pieces of the greatest common divisor; memory only, no prefix caching
  vllm    vLLM's own planner and KVCacheManager (0.32 or 0.33)

schedulers:
  jenga   the simulator's scheduler: continuous batching as in vLLM
  vllm    vLLM's own scheduler, with --manager jenga (the plugin's manager) or vllm
  Tests compare the two schedulers.

examples:
  jenga replay --model llama-3.1-70b --tp 4 --trace mmlu-pro:n=200,rate=4 \\
    --draft llama-3.2-1b --draft-tokens 4 --acceptance 0.7
  jenga replay --model gemma-3-27b --gpu H200 --trace articles --manager jenga vllm --bounds
  jenga replay --model gpt-oss-120b --gpu H200 --trace articles --manager vllm \\
      --vllm default retention=dense retention=8192
  jenga replay --model ministral-8b-2410 --trace long-documents --no-prefix-caching --every 1
  jenga replay --model falcon-h1-7b --trace conversation_trace.jsonl --speed 4 --requests 1000 \\
      --out rows.jsonl --check 100"""

_PROGRESS_S = 0.5

_EXIT_REFUSED = 2
"""Exit status if some of several replays were refused. The others are in the table."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `jenga replay`."""
    add_options(parser)
    parser.set_defaults(run=run, extras="jenga-kv[vllm,parquet]", engine=None)


def run(options: argparse.Namespace) -> int:
    """Run the replays and print their results.

    Raises:
        ValueError: A model, a trace or an option is refused, or no request fits in an arena.
    """
    check_options(options)
    machines = [_machine(name, options) for name in options.model]
    trace = Trace(
        _trace_name(options),
        lambda: open_source(
            options.trace,
            file_format=options.format,
            limit=options.requests,
            speed=options.speed,
        ),
    )
    out = RowFile(options.out) if options.out is not None else None
    found: list[Outcome] = []
    refusals: list[str] = []
    replays = list(_replays(machines, options))
    for machine, manager, eviction, stock in replays:
        settings = _settings(options, machine, eviction, stock)
        try:
            found.append(_replay(machine, manager, trace, settings, out, quiet=options.quiet))
        except ValueError as error:
            if len(replays) == 1:
                raise
            refusals.append(str(error))
    if out is not None:
        out.close()
    if found:
        print(outcomes_text(found, trace, notes=list(notes_on_managers(options))))
    for refusal in refusals:
        print(f"jenga: error: {refusal}", file=sys.stderr)
    return _EXIT_REFUSED if refusals else 0


def _replays(
    machines: Sequence["_Timed"], options: argparse.Namespace
) -> Iterator[tuple["_Timed", str, str, StockOptions]]:
    """Yield machine, manager, and the choice of the manager: eviction, or vLLM's options."""
    for machine in machines:
        for manager in options.manager:
            policies = options.eviction or [Settings().eviction]
            sets = options.vllm or [DEFAULT_STOCK]
            for eviction in policies[: None if manager in EVICTING else 1]:
                for stock in sets[: None if manager == "vllm" else 1]:
                    yield machine, manager, eviction, stock


def _trace_name(options: argparse.Namespace) -> str:
    """Return the file's name without its folders, or the workload as the user wrote it."""
    path = Path(options.trace).expanduser()
    return path.name or options.trace if path.exists() else options.trace


def _settings(
    options: argparse.Namespace, machine: "_Timed", eviction: str, stock: StockOptions
) -> Settings:
    details = {
        name: str(value)
        for name in ("speed", "requests")
        if (value := getattr(options, name)) is not None
    }
    return Settings(
        eviction=eviction,
        left_share=options.left_share,
        prefix_caching=not options.no_prefix_caching,
        host_bytes=options.host,
        host_bytes_per_s=options.host_bandwidth or HOST_BYTES_PER_S,
        chunk_tokens=options.chunk_tokens,
        max_requests=options.max_requests,
        speculation=_speculation(options),
        is_asynchronous=_is_asynchronous(options),
        stock=stock,
        engine=options.engine if options.scheduler == "vllm" else None,
        every=options.every,
        check_every=options.check,
        keep_requests=options.request_rows,
        keep_evictions=options.eviction_rows,
        with_bounds=options.bounds,
        details=(*details.items(), ("seconds", machine.seconds)),
    )


def _speculation(options: argparse.Namespace) -> Speculation | None:
    if options.acceptance is None:
        return None
    return Speculation(
        draft_tokens=options.draft_tokens,
        acceptance=options.acceptance,
        lookahead_tokens=options.draft_tokens if options.draft is not None else 0,
        draft_queries=int(options.draft is not None),
    )


def _is_asynchronous(options: argparse.Namespace) -> bool:
    """Whether steps are scheduled ahead. The default is vLLM's: yes, unless n-grams draft."""
    has_ngrams = options.acceptance is not None and options.draft is None
    if options.async_scheduling and has_ngrams:
        msg = "--async-scheduling is refused by vLLM where n-grams draft: give --draft a model"
        raise ValueError(msg)
    return not has_ngrams if options.async_scheduling is None else options.async_scheduling


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed(Machine):
    """A machine, and a text that says where its seconds come from."""

    seconds: str


def _machine(name: str, options: argparse.Namespace) -> _Timed:
    models = [find_served_model(each) for each in (name, options.draft) if each is not None]
    kv_format, model_dtype = formats_of(options.kv_dtype, models[0])
    read = ReadOptions(
        tensor_parallel=options.tp,
        kv_format=kv_format,
        model_dtype=model_dtype,
        draft_tokens=options.draft_tokens,
    )
    stock_model = served_model(models, read)
    model = served_model(models, models[0].engine_options(read))
    if options.max_model_len is not None:
        check_positive("replay", "--max-model-len", options.max_model_len)
    gpu = find_gpu(options.gpu)
    arena_bytes = options.arena
    if arena_bytes is None:
        arena_bytes = memory_budget(
            models,
            gpu,
            ranks=options.tp,
            weight_bytes=options.weights,
            utilization=options.utilization,
            reserved_bytes=options.reserve,
        ).require_arena()
    clock: Clock
    if options.step_seconds is not None:
        clock, seconds = constant_clock(options.step_seconds), f"{options.step_seconds:g} a step"
    else:
        achieved = _achieved(_named(gpu), options)
        clock = StepTime(stock_model, _weights(models, options), gpu, achieved=achieved)
        if options.draft is not None and options.acceptance is not None:
            clock = drafted_time(
                models, read, gpu, weights=_weights(models, options), achieved=achieved
            )
        seconds = _seconds_text(achieved, gpu)
    return _Timed(
        model=model,
        stock_model=stock_model,
        arena_bytes=arena_bytes,
        clock=clock,
        tp=options.tp,
        kv_format=options.kv_dtype,
        gpu=gpu.name,
        max_model_tokens=options.max_model_len or models[0].context_tokens,
        seconds=seconds,
    )


def _achieved(gpu: Gpu, options: argparse.Namespace) -> Achieved:
    """Return the measured shares of the peaks, except those that the command line gives."""
    given = {name: share for name in SHARES if (share := getattr(options, name)) is not None}
    return replace(measured(gpu, options.measured), overhead_s=options.overhead_seconds, **given)


def _seconds_text(achieved: Achieved, gpu: Gpu) -> str:
    shares = [
        f"{words} {getattr(achieved, name):.0%}"
        for name, words in zip(
            SHARES,
            ("products", "weights", "attention's products", "attention's reads"),
            strict=True,
        )
    ]
    overhead = f", {achieved.overhead_s:g} s of host a step" if achieved.overhead_s else ""
    if replace(achieved, overhead_s=0.0) == PEAKS:
        return f"a roofline at the peaks of {gpu.name}, of which no rows were measured{overhead}"
    return f"a roofline of {gpu.name} at shares of its peaks: {', '.join(shares)}{overhead}"


def _named(gpu: Gpu) -> Gpu:
    if gpu.bytes_per_s is None:
        msg = (
            f"--gpu must be one of {', '.join(GPUS)} for a model of time, got {gpu.name!r}; or "
            f"give --step-seconds"
        )
        raise ValueError(msg)
    return gpu


def _weights(models: Sequence[ModelFacts], options: argparse.Namespace) -> Weights:
    """Return the first model's weights.

    If its number of parameters is unknown, the bytes of `--weights` count as bfloat16.
    """
    facts = models[0]
    if facts.total_parameters is None and options.weights is not None:
        total = max(1, options.weights // ELEMENT_BYTES["bfloat16"])
        facts = replace(facts, total_parameters=total, weight_bytes=options.weights)
    try:
        weights = weights_of(facts, ranks=options.tp)
    except ValueError as error:
        msg = f"{error}; give --weights BYTES or --step-seconds"
        raise ValueError(msg) from error
    if options.weights is None:
        return weights
    return replace(weights, num_bytes=options.weights / options.tp)


def _replay(
    machine: Machine,
    manager: str,
    trace: Trace,
    settings: Settings,
    out: RowFile | None,
    *,
    quiet: bool,
) -> Outcome:
    row = run_row(machine, manager, trace, settings)
    outcome = out.outcome_of(row.run) if out is not None else None
    if outcome is not None:
        return outcome
    label = f"{row.model} {manager} {row.options.get('stock', row.eviction)}".rstrip()
    progress = None if quiet else _Progress(label, trace.num_requests)
    snapshot = out.snapshot_of(row.run) if out is not None else None
    if snapshot is not None and not quiet:
        print(f"{label}: continues after step {snapshot.replay.num_steps:,}", file=sys.stderr)
    running = Running(row, machine, trace, settings, snapshot=snapshot)
    rows = running.rows(progress) if out is None else out.written(running, progress)
    try:
        return outcome_of(rows)
    finally:
        if progress is not None:
            progress.clear()


class _Progress:
    """A line on standard error with the progress of a replay."""

    def __init__(self, label: str, num_requests: int) -> None:
        self._label = label
        self._num_requests = num_requests
        self._next_s = self._start_s = time.monotonic()
        self._width = 0

    def __call__(self, replay: Replay, step: Step) -> None:
        """Show a step if half a second has passed since the last one shown."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _PROGRESS_S
        num_ended = replay.num_finished + replay.num_refused
        share = num_ended / self._num_requests
        elapsed_s = now_s - self._start_s
        rate = step.number / elapsed_s if elapsed_s > 0 else 0.0
        left_s = elapsed_s * (1 - share) / share if share else 0.0
        hit_rate = replay.hit_tokens / replay.prompt_tokens if replay.prompt_tokens else 0.0
        text = (
            f"{self._label}: {num_ended}/{self._num_requests} requests ({share:.0%}), "
            f"{step.num_running} running, {step.num_waiting} waiting, hit {hit_rate:.1%}, "
            f"{rate:,.0f} steps/s, {left_s:.0f} s left"
        )
        self._width = max(self._width, len(text))
        print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
