"""Work through a plan while a machine is available: one engine at a time, one row after each run.

The parent process of the engines never touches the GPU, so that each engine finds its memory free.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from perf.engine.planning.models import Scale
from perf.engine.planning.plan import COLD_START_S, TINY_CAP_S, WARM_START_S, Entry
from perf.engine.planning.workloads import Workload
from perf.engine.results import outputs
from perf.engine.results.rows import Row, RowFile, line_of
from perf.engine.runs import export
from perf.engine.runs.jobs import Paths, environment_of, job_of, key_of
from perf.engine.runs.process import LOG_FOLLOWS, EngineError, EngineProcess, EngineTimeoutError
from perf.harness import machine
from perf.harness.machine import ROOT

CLOSE_CAP_S = 10.0
"""Seconds that an engine has to end after its last order."""

JUDGE_CAP_S = 30.0
WARMER_CAP_S = 90.0
TRIALS_CAP_S = 150.0

MEMORY_CAP_S = 30.0
"""Longest wait, in seconds, for the GPU's memory to become free after an engine."""

MEMORY_SLACK_BYTES = 512 << 20
"""GPU memory, in bytes, that may be in use beyond the amount at the start and still count as free.
"""

MAX_WARMERS = 4
"""Number of engines that compile at the same time."""

COMMAND = (sys.executable, "-m", "perf.engine.runs.child")
TRIALS_COMMAND = (sys.executable, "-m", "jenga_kernels.trials")


class Lease:
    """One call's work on a plan.

    Args:
        paths: Places of files.
        scale: Scale of the models.
        seconds: Time from now until all engines must have ended.
        out: Folder that rows are copied to after each run. None means no copies.
        command: Command that runs an engine. The job file is appended.
        say: Function that prints a line for people.
        now: Function that returns the time in seconds.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        scale: Scale,
        seconds: float,
        out: Path | None = None,
        command: Sequence[str] = COMMAND,
        say: Callable[[str], None] = print,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._scale, self._command = paths, scale, tuple(command)
        self._out, self._say, self._now = out, say, now
        self._end_s = now() + seconds
        self._machine = machine.describe()
        self._gpu = machine.gpu_name()
        self._rows = RowFile(paths.rows, commit=machine.commit_of(), scale=scale.value)
        self._used_before = machine.used_gpu_bytes() or 0
        self.num_failed = 0
        for folder in (paths.logs, paths.outputs, paths.caches):
            folder.mkdir(parents=True, exist_ok=True)
        say(f"{self._machine}; {seconds:.0f} s")

    @property
    def left_s(self) -> float:
        """Seconds left until all engines must have ended."""
        return max(0.0, self._end_s - self._now())

    def run(self, entries: Sequence[Entry]) -> bool:
        """Run the entries that lack rows, as long as time is left.

        Returns:
            Whether every entry has been measured or given up.
        """
        for entry in entries:
            if not self._is_over(entry) and self._has_time(entry):
                self._measure(entry)
                self._copy_rows()
        return all(self._is_over(entry) for entry in entries)

    def warm(self, entries: Iterable[Entry]) -> None:
        """Compile the kernels of the next models and sides, in several small engines at once.

        Each engine has a few layers only. Autotuning results are not cached here, because engines
        that run at the same time disturb the timings. Only engines that run alone choose
        configurations.
        """
        cold: dict[tuple[str, str], Entry] = {}
        for entry in entries:
            pair = self._pair(entry)
            if entry.case.model and pair not in self._warmed() and not self._is_over(entry):
                cold.setdefault(pair, entry)
        chosen = dict(list(cold.items())[:MAX_WARMERS])
        if not chosen:
            return
        began_s = self._now()
        with ThreadPoolExecutor(len(chosen)) as pool:
            are_warm = list(pool.map(self._compile, chosen.values()))
        self._note_warmed(pair for pair, is_warm in zip(chosen, are_warm, strict=True) if is_warm)
        took_s = self._now() - began_s
        self._say(f"{sum(are_warm)} of {len(chosen)} warmers have compiled, {took_s:.0f} s")
        self._rows.add({"kind": "compiled", "pairs": list(chosen), "seconds": took_s})

    def hold_trials(self) -> None:
        """Run the trials of GPU-specific kernels, once per commit, if enough time is left."""
        if self._rows.rows("trials") or self.left_s < TRIALS_CAP_S:
            return
        try:
            done = subprocess.run(
                TRIALS_COMMAND,
                cwd=ROOT,
                env=environment_of({}, self._scale, self._paths),
                capture_output=True,
                text=True,
                timeout=min(TRIALS_CAP_S, self.left_s),
                check=False,
            )
            status, lines = done.returncode, (done.stdout + done.stderr).splitlines()
        except subprocess.TimeoutExpired:
            status, lines = None, []
        self._rows.add({"kind": "trials", "status": status, "lines": lines, **self._where()})
        self._copy_rows()
        self._say("\n".join(["trials:", *lines[-8:]]))

    def _measure(self, entry: Entry) -> None:
        """Start an engine, serve the missing runs of an entry, and compare the generated tokens."""
        memory_before = self._await_memory()
        process = self._start(entry, self._scale)
        start: Row | None = None
        served: list[str] = []
        try:
            start = process.reply(self._cap_s(entry.case.start_cap_s))
            start["memory_before_bytes"] = memory_before
            self._say(f"{entry.label}: started in {start['start_s']:.1f} s")
            for workload, run in self._missing(entry):
                if self._run_s(entry, workload) > self.left_s:
                    self._say(f"{entry.label}: no time for {workload.name}")
                    break
                self._serve(process, entry, workload, run, start)
                served.append(workload.name)
            self._note_warmed([self._pair(entry)])
            for name in dict.fromkeys(served):
                self._compare(process, entry, name)
        except EngineError as error:
            self._note_failure(entry, error, stage="run" if start else "start")
        finally:
            process.close(CLOSE_CAP_S)

    def _start(self, entry: Entry, scale: Scale, **variables: str) -> EngineProcess:
        job = self._paths.job(entry.key)
        job.parent.mkdir(parents=True, exist_ok=True)
        job.write_text(json.dumps(job_of(entry.case, entry.side, scale, self._paths)))
        return EngineProcess(
            [*self._command, str(job)],
            environment_of(entry.side.environment(entry.case.model), scale, self._paths)
            | variables,
            self._paths.log(entry.key),
            label=entry.label,
        )

    def _serve(
        self, process: EngineProcess, entry: Entry, workload: Workload, run: int, start: Row
    ) -> None:
        """Serve a workload once, and write its row."""
        case, side, turn = entry.key
        output = self._paths.output(entry.key, workload.name, run)
        process.order(do="serve", workload=asdict(workload), run=run, outputs=str(output))
        reply = process.reply(self._cap_s(workload.cap_s))
        options = entry.case.engine_options(entry.side, self._scale)
        row = {
            "kind": "run",
            "case": case,
            "model": entry.case.model_name,
            "side": side,
            "turn": turn,
            "workload": workload.name,
            "run": run,
            "trace": workload.tiny if self._scale is Scale.TINY else workload.trace,
            "cache_bytes": options["kv_cache_memory_bytes"],
            **reply,
            **start,
            **self._where(),
        }
        self._rows.add(row)
        self._copy_rows()
        self._say(line_of(row))

    def _compare(self, process: EngineProcess, entry: Entry, workload: str) -> None:
        """Compare the tokens of an entry's last run with those of the case's first run."""
        rows = [
            row
            for row in self._rows.rows()
            if (row["case"], row["workload"]) == (entry.case.name, workload)
        ]
        last = max(row["run"] for row in rows if key_of(row) == entry.key)
        first = self._paths.output(key_of(rows[0]), workload, rows[0]["run"])
        ours = self._paths.output(entry.key, workload, last)
        if first == ours or not first.exists():
            return
        found = outputs.compare(outputs.read(first), outputs.read(ours))
        judged = list(found.partings[: outputs.MAX_JUDGED])
        row: Row = {
            "kind": "comparison",
            **dict(zip(("case", "side", "turn"), entry.key, strict=True)),
            "workload": workload,
            "beside": {name: rows[0][name] for name in ("side", "turn", "run")},
            "num_same": found.num_same,
            "num_parted": found.num_parted,
            "num_other_prompts": found.num_other_prompts,
            "earliest_parting": judged[0]["position"] if judged else None,
        }
        line = f"  outputs beside {first.stem}: {found.num_same} same, {found.num_parted} part"
        if judged and self.left_s > 0:
            process.order(do="judge", workload=workload, partings=judged)
            gaps = process.reply(min(self._cap_s(JUDGE_CAP_S), self.left_s))["gaps"]
            row |= outputs.verdict(gaps, entry.case.dtype(self._scale))
            line += f", {row['num_near_ties']} of {len(judged)} near ties"
        self._rows.add(row | self._where())
        self._say(line)

    def _compile(self, entry: Entry) -> bool:
        """Compile kernels in an engine with few layers, and return whether it succeeded."""
        scale = Scale.TINY if self._scale is Scale.TINY else Scale.SHORT
        warmer = entry.warmer()
        process = self._start(warmer, scale, TRITON_CACHE_AUTOTUNING="0")
        try:
            end_s = self._now() + self._cap_s(WARMER_CAP_S)
            process.reply(end_s - self._now())
            process.order(do="compile")
            process.reply(end_s - self._now())
        except EngineError as error:
            self._say(f"{warmer.label}: {error}")
            return False
        finally:
            process.close(CLOSE_CAP_S)
        return True

    def _note_failure(self, entry: Entry, error: EngineError, *, stage: str) -> None:
        """Write a row about a failure.

        An engine that the end of the call cut short did not fail.
        """
        is_cut = isinstance(error, EngineTimeoutError) and not self.left_s
        lines = str(error).splitlines()
        row = {
            "kind": "cut" if is_cut else "failure",
            **dict(zip(("case", "side", "turn"), entry.key, strict=True)),
            "stage": stage,
            "reason": lines[0].removesuffix(LOG_FOLLOWS),
            "error": next((line for line in reversed(lines[1:]) if line.strip()), ""),
            "log_end": lines[1:],
            **self._where(),
        }
        self._rows.add(row)
        self._say(f"{entry.label}: cut short" if is_cut else f"FAILED: {error}")
        self.num_failed += not is_cut

    def _is_over(self, entry: Entry) -> bool:
        """Whether an entry needs no more starts: it is complete, or given up after failures."""
        return not self._missing(entry) or self._rows.is_given_up(entry.key)

    def _missing(self, entry: Entry) -> list[tuple[Workload, int]]:
        """List the runs that an entry lacks."""
        there = self._rows.runs(entry.key)
        return [
            (workload, run)
            for workload in entry.case.workloads
            for run in range(1, entry.num_runs + 1)
            if (workload.name, run) not in there
        ]

    def _has_time(self, entry: Entry) -> bool:
        """Whether a start and one run fit in the time left."""
        workload, _ = self._missing(entry)[0]
        needed_s = self._start_s(entry) + self._run_s(entry, workload)
        if needed_s > self.left_s or not self.left_s:
            self._say(f"{entry.label}: needs {needed_s:.0f} s, {self.left_s:.0f} s are left")
            return False
        return True

    def _start_s(self, entry: Entry) -> float:
        """Estimate the seconds of a start, from earlier rows if there are any."""
        if self._scale is Scale.TINY:
            return 0.0
        if self._pair(entry) not in self._warmed():
            return COLD_START_S
        return self._rows.measured(entry.case.name, entry.side.name, "start_s") or WARM_START_S

    def _run_s(self, entry: Entry, workload: Workload) -> float:
        """Estimate the seconds of a run, including its warm-up."""
        if self._scale is Scale.TINY:
            return 0.0
        side = entry.side.name
        measured = self._rows.measured(entry.case.name, side, "seconds", workload.name)
        return 1.2 * (measured or workload.expected_s) + 3.0

    def _cap_s(self, cap_s: float) -> float:
        """Return a time limit, cut to the time that this call has left."""
        return min(TINY_CAP_S if self._scale is Scale.TINY else cap_s, self.left_s)

    def _await_memory(self) -> int | None:
        """Wait until the GPU's memory is as free as when this call began.

        Returns:
            Bytes in use. None if there is no GPU.
        """
        deadline_s = self._now() + min(MEMORY_CAP_S, self.left_s)
        while True:
            used = machine.used_gpu_bytes()
            if used is None or used <= self._used_before + MEMORY_SLACK_BYTES:
                return used
            if self._now() > deadline_s:
                self._say(f"  {used >> 20} MiB of the GPU are still in use")
                return used
            time.sleep(0.5)

    def _where(self) -> Row:
        date = time.strftime("%Y-%m-%d %H:%M:%S")
        return {"machine": self._machine, "gpu": self._gpu, "date": date}

    @staticmethod
    def _pair(entry: Entry) -> tuple[str, str]:
        return entry.case.model_name, entry.side.name

    def _warmed(self) -> set[tuple[str, str]]:
        """Return the pairs of a model and a side whose kernels are in the caches."""
        path = self._paths.caches / "warmed.json"
        return {tuple(each) for each in json.loads(path.read_text())} if path.exists() else set()

    def _note_warmed(self, pairs: Iterable[tuple[str, str]]) -> None:
        warmed = sorted(self._warmed() | set(pairs))
        (self._paths.caches / "warmed.json").write_text(json.dumps(warmed))

    def _copy_rows(self) -> None:
        if self._out is not None:
            export.copy_rows(self._paths, self._out)
