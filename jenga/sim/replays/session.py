"""Replays as users ask for them: a model on a machine, a trace, settings; and running them."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jenga
from jenga.admission.reserve import default_left_share
from jenga.errors import InvariantError
from jenga.eviction.known import DEFAULT_POLICY, policy_by_name, source_of
from jenga.models.readers.layers import keeps_history
from jenga.sim.arenas.by_name import EVICTING, HOSTING, make_arena
from jenga.sim.arenas.vllm_plan import DEFAULT_STOCK, StockOptions
from jenga.sim.batching.arena import NOTHING_MOVED, Arena, Memory, MovedBytes
from jenga.sim.batching.scheduler import CHUNK_TOKENS, MAX_REQUESTS, STEPS_IN_FLIGHT, StepScheduler
from jenga.sim.batching.speculation import Speculation
from jenga.sim.batching.step_time import HOST_BYTES_PER_S, HostedTime, step_tokens_of
from jenga.sim.replays.bounds import best_eviction, unlimited
from jenga.sim.replays.record import SAMPLED_EVERY, Recorder, Recording
from jenga.sim.replays.replay import Clock, Replay, Step
from jenga.sim.replays.snapshot import Snapshot
from jenga.sim.results.rows import Row, RunRow, SummaryRow, row_line
from jenga.sim.workload.requests import Request
from jenga.spec import ModelSpec

_ID_BYTES = 6


STOCK_MANAGERS = frozenset({"vllm", "paged"})
"""Managers that are replayed as in stock vLLM, without histories beside recurrent states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model and the machine that runs it.

    Attributes:
        model: Layers of one rank.
        stock_model: Layers with the managers `STOCK_MANAGERS`. None means that they are the same.
        arena_bytes: Bytes of the arena of one rank.
        clock: Function that returns the seconds of a step.
        tp: Number of ranks.
        kv_format: Format in which keys and values are stored.
        gpu: Name of the GPU.
        max_model_tokens: Most tokens of a request that the model reads. None for no limit.
    """

    model: ModelSpec
    arena_bytes: int
    clock: Clock
    tp: int = 1
    kv_format: str = "auto"
    gpu: str = ""
    max_model_tokens: int | None = None
    stock_model: ModelSpec | None = None

    def model_of(self, manager: str) -> ModelSpec:
        """Return the layers that a manager stores."""
        if manager in STOCK_MANAGERS and self.stock_model is not None:
            return self.stock_model
        return self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a replay: how requests are scheduled, and what is written.

    Attributes:
        eviction: Name of an eviction policy (`jenga.eviction.known.policy_by_name`). Only our
            manager has a choice.
        left_share: Largest share of the arena, 0 to 1, that admissions leave to cached content that
            waiting requests will read. Only for our manager. None for its default.
        prefix_caching: Whether pages are kept for later requests.
        host_bytes: Bytes of host memory for evicted pages, of one rank. Only for our manager.
        host_bytes_per_s: Bandwidth of copies to and from host memory.
        chunk_tokens: Most tokens that a step computes, of all requests together.
        max_requests: Most requests that run at once.
        speculation: Drafts for decoding requests. None for no drafts.
        is_asynchronous: Whether a step is scheduled while the one before it runs.
        stock: Options of manager "vllm".
        engine: Function that makes vLLM's own scheduler and counts the bytes of its arena, instead
            of ours; see `jenga.engine_scheduler`. None for ours.
        every: Steps between two step rows.
        check_every: Steps between two checks of the manager's records. 0 for no checks.
        keep_requests: Whether each request gets a row.
        keep_evictions: Whether each lost checkpoint and each look-up gets a row.
        with_bounds: Whether the run's row has the bounds of `jenga.sim.replays.bounds`.
        details: Further options, which are written to the run's row and not read.
    """

    eviction: str = DEFAULT_POLICY
    left_share: float | None = None
    prefix_caching: bool = True
    host_bytes: int = 0
    host_bytes_per_s: float = HOST_BYTES_PER_S
    chunk_tokens: int = CHUNK_TOKENS
    max_requests: int = MAX_REQUESTS
    speculation: Speculation | None = None
    is_asynchronous: bool = False
    stock: StockOptions = DEFAULT_STOCK
    engine: "EngineMaker | None" = None
    every: int = SAMPLED_EVERY
    check_every: int = 0
    keep_requests: bool = False
    keep_evictions: bool = False
    with_bounds: bool = False
    details: tuple[tuple[str, str], ...] = ()


EngineMaker = Callable[[str, Machine, Settings], tuple[StepScheduler, Memory]]
"""Function that makes the scheduler of an engine for a manager, a machine and settings."""


class Trace:
    """Requests that can be read repeatedly.

    Attributes:
        name: Name that users give the trace.
        read: Function that returns the requests, from the first one on.
        num_requests: Number of requests.
        shortest_tokens: Tokens of the shortest prompt.
        digest: Digest of all requests. It tells traces with the same name apart.
    """

    def __init__(self, name: str, read: Callable[[], Iterator[Request]]) -> None:
        """Read the trace once.

        Raises:
            ValueError: It has no requests, or they are not in the order that
                `jenga.sim.workload.arrivals.Arrivals` asks for. See also
                `jenga.sim.workload.sources.open_source`.
        """
        self.name = name
        self.read = read
        self.num_requests = 0
        self.shortest_tokens = 1 << 62
        self._has_followers = False
        digest = blake2b(digest_size=_ID_BYTES)
        last_s = 0.0
        for request in read():
            self.num_requests += 1
            self.shortest_tokens = min(self.shortest_tokens, request.prompt_tokens)
            digest.update(repr(request).encode())
            if request.after:
                self._has_followers = True
                continue
            if request.arrival_s < last_s:
                msg = (
                    f"{name}: requests must be in the order of their arrival, got "
                    f"{request.name!r} at {request.arrival_s:g} s after one at {last_s:g} s"
                )
                raise ValueError(msg)
            last_s = request.arrival_s
        self.digest = digest.digest()
        self._bounds: dict[tuple[str, int, int], dict[str, float]] = {}
        if not self.num_requests:
            msg = f"trace must have a request, got none in {name!r}"
            raise ValueError(msg)

    def bounds(self, machine: Machine) -> dict[str, float]:
        """Return the hit rates of `jenga.sim.replays.bounds`, computed once for each machine.

        Requests that follow others take the place of their estimated arrival.
        """
        key = machine.model.name, machine.tp, machine.arena_bytes
        if key not in self._bounds:
            best = best_eviction(self.by_arrival(), machine.model, machine.arena_bytes)
            self._bounds[key] = {
                "unlimited_hit_rate": unlimited(self.by_arrival()).hit_rate,
                "best_eviction_hit_rate": best.hit_rate,
            }
        return self._bounds[key]

    def by_arrival(self) -> Iterable[Request]:
        """Read the requests in the order of their estimated arrival."""
        if not self._has_followers:
            return self.read()
        return sorted(self.read(), key=lambda request: request.arrival_s)


def history_query_tokens(model: ModelSpec, speculation: Speculation | None) -> int:
    """Return the most tokens of a decode step, or 0 if no layer keeps a history beside its state.

    See `jenga.state_keeper.StateKeeper`.
    """
    if not keeps_history(model):
        return 0
    return 1 + speculation.draft_tokens if speculation is not None else 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """A replay that ended.

    Attributes:
        row: First row of its run, with its bounds.
        summary: Its summary.
    """

    row: RunRow
    summary: SummaryRow


def run_row(machine: Machine, manager: str, trace: Trace, settings: Settings) -> RunRow:
    """Return the row that names a replay. The same replay always has the same row."""
    options: dict[str, object] = {
        "prefix_caching": settings.prefix_caching,
        "chunk_tokens": settings.chunk_tokens,
        "max_requests": settings.max_requests,
        "async_scheduling": settings.is_asynchronous,
        "every": settings.every,
        "request_rows": settings.keep_requests,
        **({"eviction_rows": True} if settings.keep_evictions else {}),
        "bounds": settings.with_bounds,
        **(_policy_options(manager, settings) if manager in EVICTING else {}),
        **(_host_options(settings) if manager in HOSTING else {}),
        **({"stock": settings.stock.text} if manager == "vllm" and settings.stock.text else {}),
        **({"scheduler": "vllm"} if settings.engine is not None else {}),
        **(asdict(settings.speculation) if settings.speculation is not None else {}),
        **_length_options(machine),
        **dict(settings.details),
    }
    row = RunRow(
        run="",
        model=machine.model.name,
        tp=machine.tp,
        kv_format=machine.kv_format,
        gpu=machine.gpu,
        arena_bytes=machine.arena_bytes,
        manager=manager,
        eviction=settings.eviction if manager in EVICTING else "",
        trace=trace.name,
        num_requests=trace.num_requests,
        options=options,
        jenga_version=_version(),
    )
    digest = blake2b(row_line(row).encode() + trace.digest, digest_size=_ID_BYTES).hexdigest()
    return replace(row, run=digest)


def _policy_options(manager: str, settings: Settings) -> dict[str, object]:
    options: dict[str, object] = {"left_share": _left_share(manager, settings)}
    if source := source_of(settings.eviction):
        digest = blake2b(source.encode(), digest_size=_ID_BYTES)
        options["eviction_source"] = digest.hexdigest()
    return options


def _left_share(manager: str, settings: Settings) -> float:
    if settings.left_share is not None:
        return settings.left_share
    return default_left_share(has_host=manager in HOSTING and settings.host_bytes > 0)


def _length_options(machine: Machine) -> dict[str, object]:
    if machine.max_model_tokens is None:
        return {}
    return {"max_model_len": machine.max_model_tokens}


def _host_options(settings: Settings) -> dict[str, object]:
    if not settings.host_bytes:
        return {}
    return {"host_bytes": settings.host_bytes, "host_bytes_per_s": settings.host_bytes_per_s}


class Running:
    """A replay about to run, from its beginning or from a snapshot.

    Attributes:
        row: First row of its run. While it runs, the row has the bounds, if they were asked for.
        snapshot: Snapshot from which it continues. None to run from the beginning.
        recorder: Recorder that makes its rows.
    """

    def __init__(
        self,
        row: RunRow,
        machine: Machine,
        trace: Trace,
        settings: Settings,
        *,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.row = row
        self.snapshot = snapshot
        self._machine = machine
        self._trace = trace
        self._settings = settings
        if snapshot is not None:
            self.recorder = snapshot.recorder
            return
        self.recorder = Recorder(
            Recording(
                run=row.run,
                every=settings.every,
                check_every=settings.check_every,
                keep_requests=settings.keep_requests,
                keep_evictions=settings.keep_evictions,
            )
        )

    def rows(self, on_step: Callable[[Replay, Step], None] | None = None) -> Iterator[Row]:
        """Run the replay. Yield its rows as they come, the run's row first and the summary last.

        Args:
            on_step: Called in each step, after all rows up to it were taken.

        Raises:
            ValueError: The manager refuses the model or the arena, or no request fits in the arena.
            InvariantError: A check found the manager's records wrong.
        """
        row, machine, trace, settings = self.row, self._machine, self._trace, self._settings
        if self.snapshot is not None:
            row, replay = self.snapshot.row, self.snapshot.replay
            clock = _clock(machine, settings, replay.arena, moved_bytes=replay.moved_bytes)
            replay.go_on(trace.read(), clock=clock, on_end=self.recorder.on_end)
        else:
            replay = self._replay()
            if settings.with_bounds:
                row = replace(row, options=row.options | trace.bounds(machine))
        self.row = row
        yield row
        for each in self.recorder.rows(replay, on_step=on_step):
            if isinstance(each, SummaryRow) and not each.num_requests:
                raise ValueError(_no_request_text(row, machine, trace))
            yield each

    def _replay(self) -> Replay:
        """Make the replay, before its first step."""
        row, machine, trace, settings = self.row, self._machine, self._trace, self._settings
        if settings.engine is not None:
            with _named(row):
                scheduler, memory = settings.engine(row.manager, machine, settings)
            return Replay.under(
                scheduler,
                trace.read(),
                memory,
                clock=_clock(machine, settings, memory),
                max_model_tokens=machine.max_model_tokens,
                is_asynchronous=settings.is_asynchronous,
                on_end=self.recorder.on_end,
            )
        with _named(row):
            arena = _arena(row, machine, settings)
        return Replay(
            trace.read(),
            arena,
            clock=_clock(machine, settings, arena),
            chunk_tokens=settings.chunk_tokens,
            max_requests=settings.max_requests,
            speculation=settings.speculation,
            max_model_tokens=machine.max_model_tokens,
            is_asynchronous=settings.is_asynchronous,
            on_end=self.recorder.on_end,
        )


def _no_request_text(row: RunRow, machine: Machine, trace: Trace) -> str:
    """Return the reason why no request ran."""
    of_trace = (
        f"any of the {trace.num_requests} of {trace.name}, whose shortest prompt has "
        f"{trace.shortest_tokens} tokens"
    )
    most_tokens = machine.max_model_tokens
    if most_tokens is not None and trace.shortest_tokens >= most_tokens:
        return f"the model reads {most_tokens} tokens with an answer, and not {of_trace}"
    return (
        f"arena_bytes must hold a request, got {machine.arena_bytes}: manager {row.manager!r} has "
        f"no room for {of_trace}"
    )


def replay_rows(row: RunRow, machine: Machine, trace: Trace, settings: Settings) -> Iterator[Row]:
    """Run a replay from its beginning; see `Running.rows`."""
    return Running(row, machine, trace, settings).rows()


@contextmanager
def _named(row: RunRow) -> Generator[None]:
    """Name the manager, model and arena in errors of an arena that does not start."""
    try:
        yield
    except ValueError as error:
        msg = (
            f"manager {row.manager!r} does not start for {row.model!r} in an arena of "
            f"{row.arena_bytes} bytes: {error}"
        )
        raise ValueError(msg) from error


def _arena(row: RunRow, machine: Machine, settings: Settings) -> Arena:
    return make_arena(
        row.manager,
        machine.model_of(row.manager),
        machine.arena_bytes,
        prefix_caching=settings.prefix_caching,
        eviction_policy=policy_by_name(settings.eviction),
        left_share=settings.left_share,
        step_tokens=step_tokens_of(machine.clock),
        chunk_tokens=settings.chunk_tokens,
        steps_in_flight=STEPS_IN_FLIGHT[settings.is_asynchronous],
        history_query_tokens=history_query_tokens(machine.model, settings.speculation),
        host_bytes=settings.host_bytes if row.manager in HOSTING else 0,
        stock=settings.stock,
    )


def _clock(
    machine: Machine, settings: Settings, arena: Memory, *, moved_bytes: MovedBytes = NOTHING_MOVED
) -> Clock:
    if not settings.host_bytes:
        return machine.clock
    return HostedTime(machine.clock, arena, settings.host_bytes_per_s, moved_bytes=moved_bytes)


@cache
def _version() -> str:
    """Return the version of this package, and a digest of its code.

    Rows of another code are not this code's, even if the version is the same.
    """
    try:
        number = version("jenga-kv")
    except PackageNotFoundError:
        number = ""
    digest = blake2b(digest_size=_ID_BYTES)
    root = Path(jenga.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return f"{number}+{digest.hexdigest()}"


def outcome_of(rows: Iterable[Row]) -> Outcome:
    """Take all rows of a replay, and return its outcome.

    Raises:
        InvariantError: The row of the run, or the summary, is missing.
    """
    row = summary = None
    for each in rows:
        if isinstance(each, RunRow):
            row = each
        elif isinstance(each, SummaryRow):
            summary = each
    if row is None or summary is None:
        msg = "a replay must begin with a row of its run and end with a summary"
        raise InvariantError(msg)
    return Outcome(row, summary)
