"""Several replays into one file of rows: which are still to run, and running them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jenga.errors import InvariantError
from jenga.eviction_order import EVICTION_ORDERS
from jenga.sim.arena import Arena
from jenga.sim.bounds import best_eviction, unlimited
from jenga.sim.managers import make_arena
from jenga.sim.record import SAMPLED_EVERY, Recorder, Recording
from jenga.sim.replay import Clock, Replay, Step
from jenga.sim.rows import Row, RunRow, SummaryRow, read_rows, row_line
from jenga.sim.scheduler import CHUNK_TOKENS, MAX_REQUESTS
from jenga.sim.workload import Request
from jenga.spec import ModelSpec

_ID_BYTES = 6
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model and where it runs.

    Attributes:
        model: Its layers, of one rank.
        arena_bytes: Of one rank.
        clock: Seconds of a step.
        tp: Ranks.
        kv_format: How keys and values are stored.
        gpu: Its name.
    """

    model: ModelSpec
    arena_bytes: int
    clock: Clock
    tp: int = 1
    kv_format: str = "auto"
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How requests are scheduled and what is written.

    Attributes:
        eviction: Of `EVICTION_ORDERS`; only our manager has a choice.
        prefix_caching: Whether pages are kept for others.
        chunk_tokens: Tokens computed in a step, of all requests together.
        max_requests: Requests running at once.
        every: Steps between two step rows.
        check_every: Steps between two checks of the manager's books; 0 for none.
        keep_requests: Whether every request gets a row.
        with_bounds: Whether the run's row has the bounds of `jenga.sim.bounds`.
        details: Further options, written and not read.
    """

    eviction: str = "wanted"
    prefix_caching: bool = True
    chunk_tokens: int = CHUNK_TOKENS
    max_requests: int = MAX_REQUESTS
    every: int = SAMPLED_EVERY
    check_every: int = 0
    keep_requests: bool = False
    with_bounds: bool = False
    details: tuple[tuple[str, str], ...] = ()


class Trace:
    """Requests that can be read again and again."""

    def __init__(self, name: str, read: Callable[[], Iterator[Request]]) -> None:
        """Read it once.

        Raises:
            ValueError: It has no requests, or they are not in the order of their arrival; or see
                `jenga.sim.sources.open_source`.
        """
        self.name = name
        self.read = read
        self.num_requests = 0
        self.shortest_tokens = 1 << 62
        last_s = 0.0
        for request in read():
            self.num_requests += 1
            self.shortest_tokens = min(self.shortest_tokens, request.prompt_tokens)
            if request.arrival_s < last_s:
                msg = (
                    f"{name}: requests must be in the order of their arrival, got "
                    f"{request.name!r} at {request.arrival_s:g} s after one at {last_s:g} s"
                )
                raise ValueError(msg)
            last_s = request.arrival_s
        self._bounds: dict[tuple[str, int, int], dict[str, float]] = {}
        if not self.num_requests:
            msg = f"trace must have a request, got none in {name!r}"
            raise ValueError(msg)

    def bounds(self, machine: Machine) -> dict[str, float]:
        """Hit rates of `jenga.sim.bounds`, found once for each machine."""
        key = machine.model.name, machine.tp, machine.arena_bytes
        if key not in self._bounds:
            best = best_eviction(self.read(), machine.model, machine.arena_bytes)
            self._bounds[key] = {
                "unlimited_hit_rate": unlimited(self.read()).hit_rate,
                "best_eviction_hit_rate": best.hit_rate,
            }
        return self._bounds[key]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A replay that ended.

    Attributes:
        row: As it was asked for, with its bounds.
        summary: What it came to.
    """

    row: RunRow
    summary: SummaryRow


class RowFile:
    """A file of rows that replays add to.

    A replay that was interrupted leaves rows without a summary: it is run again, and its rows go.
    """

    def __init__(self, path: Path) -> None:
        """Read what is there.

        Raises:
            ValueError: The file has something else in it.
        """
        self.path = path
        self._done: dict[str, Outcome] = {}
        runs: dict[str, RunRow] = {}
        if path.exists():
            _drop_half_a_line(path)
            for row in read_rows(path):
                if isinstance(row, RunRow):
                    runs[row.run] = row
                elif isinstance(row, SummaryRow) and row.run in runs:
                    self._done[row.run] = Outcome(runs[row.run], row)
        self._broken = runs.keys() - self._done.keys()

    def outcome_of(self, run: str) -> Outcome | None:
        """What a replay came to, if it ended."""
        return self._done.get(run)

    def written(self, run: str, rows: Iterable[Row]) -> Iterator[Row]:
        """Write the rows of a replay as they come."""
        if run in self._broken:
            self._forget(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(row_line(row))
                yield row

    def _forget(self, run: str) -> None:
        """Write the file again without a replay that was interrupted."""
        kept = self.path.with_name(f"{self.path.name}.part")
        with kept.open("w", encoding="utf-8") as file:
            file.writelines(row_line(row) for row in read_rows(self.path) if row.run != run)
        kept.replace(self.path)
        self._broken.discard(run)


def _drop_half_a_line(path: Path) -> None:
    """Cut off a last line that has no end: whoever wrote it was interrupted."""
    with path.open("rb+") as file:
        size = end = file.seek(0, 2)
        while end:
            start = max(0, end - _READ_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start + found + 1
            if found >= 0:
                break
            end = start
        if end < size:
            file.truncate(end)


def run_row(machine: Machine, manager: str, trace: Trace, settings: Settings) -> RunRow:
    """The row that names a replay; the same replay has the same row, whenever it is asked for."""
    options: dict[str, object] = {
        "prefix_caching": settings.prefix_caching,
        "chunk_tokens": settings.chunk_tokens,
        "max_requests": settings.max_requests,
        "every": settings.every,
        "request_rows": settings.keep_requests,
        "bounds": settings.with_bounds,
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
        eviction="" if manager == "vllm" else settings.eviction,
        trace=trace.name,
        num_requests=trace.num_requests,
        options=options,
        jenga_version=_version(),
    )
    digest = blake2b(row_line(row).encode(), digest_size=_ID_BYTES).hexdigest()
    return replace(row, run=digest)


def replay_rows(
    row: RunRow,
    machine: Machine,
    trace: Trace,
    settings: Settings,
    progress: Callable[[Replay, Step], None] | None = None,
) -> Iterator[Row]:
    """Run a replay; its rows as they come, its own first and its summary last.

    Raises:
        ValueError: The manager refuses the model or the arena, or the arena holds no request.
        InvariantError: A check found the manager's books wrong.
    """
    arena = _arena(row, machine, settings)
    if settings.with_bounds:
        row = replace(row, options=row.options | trace.bounds(machine))
    recorder = Recorder(
        Recording(
            run=row.run,
            every=settings.every,
            check_every=settings.check_every,
            keep_requests=settings.keep_requests,
        )
    )
    replay = Replay(
        trace.read(),
        arena,
        clock=machine.clock,
        chunk_tokens=settings.chunk_tokens,
        max_requests=settings.max_requests,
        on_end=recorder.on_end,
    )
    yield row
    for each in recorder.rows(replay, progress=progress):
        if isinstance(each, SummaryRow) and not each.num_requests:
            msg = (
                f"arena_bytes must hold a request, got {machine.arena_bytes}: manager "
                f"{row.manager!r} has no room for any of the {trace.num_requests} of {trace.name}, "
                f"whose shortest prompt has {trace.shortest_tokens} tokens"
            )
            raise ValueError(msg)
        yield each


def _arena(row: RunRow, machine: Machine, settings: Settings) -> Arena:
    try:
        return make_arena(
            row.manager,
            machine.model,
            machine.arena_bytes,
            prefix_caching=settings.prefix_caching,
            eviction_order=EVICTION_ORDERS[settings.eviction](),
            chunk_tokens=settings.chunk_tokens,
        )
    except ValueError as error:
        msg = (
            f"manager {row.manager!r} does not start for {row.model!r} in an arena of "
            f"{machine.arena_bytes} bytes: {error}"
        )
        raise ValueError(msg) from error


def _version() -> str:
    try:
        return version("jenga-kv")
    except PackageNotFoundError:
        return ""


def outcome_of(rows: Iterable[Row]) -> Outcome:
    """Run rows of a replay to their end, for what it came to.

    Raises:
        InvariantError: There is no row of the run, or no summary.
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
