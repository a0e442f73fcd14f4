"""Run everything that needs a GPU, in pieces: native tests, benchmarks, the engine, sweeps.

    python -m perf.gpu.gpu_session --results OUT [--minutes 9] [--bundle DIR:DIR --site SITE]
    python -m perf.gpu.gpu_session --results OUT --resume EARLIER   # on another machine, later
    python -m perf.gpu.gpu_session --results OUT --brief --kernels KERNELS.tar.xz   # in minutes

Stages that ended before at this commit are not run again; what `--minutes` cuts short is run anew
by the next call, a benchmark from the shape it was cut at. Rows go to OUT/<gpu>/<benchmark>.jsonl
and OUT/<gpu>/tests.jsonl as they come, each with the machine's line, and what a stage printed to
OUT/<gpu>/logs; `--archive FILE.tar.gz` keeps all of it in one file besides, written again after
each stage and every half minute, which `--resume` takes too. PERF_COMMIT names the commit where the
files are no checkout of it.

Tests run several at a time, on all cores (pytest-xdist is used where it is installed), and so does
what the benchmarks have to compile; what is timed runs alone. A stage that takes far too long is
stopped, counts as failed the second time, and holds up no other. Benchmarks come after the tests of
their kernels; where one of those failed, the benchmark runs it again and refuses to time anything.

A whole session takes an hour. Where a GPU is lent for minutes, `--brief` runs all tests of kernels
in one pytest, on all cores, and then `perf.gpu.gpu_list` in one process: start-up of Python and
compiling would take all of them otherwise. `--kernels` are those of `perf.gpu.precompiled`; with
them all tests of kernels took two minutes on 16 cores. `--tests` and `--list-file` name some of
either.

A machine needs torch, Triton and what tests run with: pytest, pytest-timeout, hypothesis; for the
engine and the peers vLLM and the libraries. Where these cannot be installed, `--bundle` names the
folders of an offline bundle, one of which holds its `unpack.sh`, and `--site` where to unpack it;
parts that come later are unpacked by a later call.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from perf.gpu import gpu_bundle
from perf.gpu.gpu_list import TIME_IS_UP
from perf.gpu.gpu_stages import (
    BRIEF_TESTS,
    ENGINE_TESTS,
    KERNEL_TESTS,
    Stage,
    brief_stages,
    stages,
)
from perf.harness.timing import ROOT, commit_of, machine_line, machine_name

NOT_BEGUN_SECONDS = 20
"""With less time left no stage is begun: Python and torch take about that to start."""

ARCHIVE_SECONDS = 30
"""Between two archives while a stage runs."""

NO_TESTS_COLLECTED = 5
"""What pytest returns where every test of a file is marked otherwise."""

OVER_LIMIT = 124
"""Written for a stage that took longer than its own limit."""

LINES_SHOWN = 12
"""Of the log of a stage that failed."""

CORES_OF_A_STAGE = 4

LIST_END_SECONDS = 20
"""Before the end of a session, that a list begins no more shapes."""

TEST = r"(?:\S*/)?(?P<file>test_\w+)\.py::(?P<name>.*?)"
ENDED = r"(?P<how>PASSED|FAILED|SKIPPED|ERROR)"
TEST_LINES = (
    re.compile(rf"\[gw\d+\] \[ *\d+%\] {ENDED} {TEST}\s*$"),
    re.compile(rf"{TEST} {ENDED}(?: \(.*\))?\s+\[ *\d+%\]$"),
)
"""Lines of `pytest -v`, with pytest-xdist and without."""

NAMES_SHOWN = 20
"""Of tests that failed."""
NEEDED = ("pytest", "pytest_timeout", "hypothesis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stage ended.

    Attributes:
        stage: Its name.
        returncode: Of its command; None where time ran out.
        seconds: It took.
        commit: The commit it ran at.
        machine: The machine's line.
    """

    stage: str
    returncode: int | None
    seconds: float
    commit: str
    machine: str

    @property
    def passed(self) -> bool:
        """Whether it ended well."""
        return self.returncode in (0, NO_TESTS_COLLECTED)


class Session:
    """The stages of one commit on one machine, and how each ended.

    Args:
        folder: Where rows and logs of this machine go.
        commit: What is tested.
        machine: The machine's line.
        site: Folder of an unpacked bundle, if there is one.
        num_jobs: How many stages may run at once where none is timed.
        kernels: Triton's cache, if it has kernels that were compiled before.
        archive: Keeps the folder above `folder` in one file, if given.
    """

    def __init__(
        self,
        folder: Path,
        *,
        commit: str,
        machine: str,
        site: Path | None,
        num_jobs: int = 1,
        kernels: Path | None = None,
        archive: Path | None = None,
    ) -> None:
        self.folder = folder
        self.commit = commit
        self.machine = machine
        self.site = site
        self.num_jobs = num_jobs
        self.kernels = kernels
        self.archive = archive
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._rows = folder / "tests.jsonl"
        self._lock = threading.Lock()

    def outcomes(self) -> dict[str, Outcome]:
        """Get how each stage last ended at this commit, of those that ended."""
        if not self._rows.exists():
            return {}
        ended: dict[str, Outcome] = {}
        over_limit: set[str] = set()
        for line in self._rows.read_text().splitlines():
            row = Outcome(**json.loads(line))
            is_first_time = row.returncode == OVER_LIMIT and row.stage not in over_limit
            if row.commit != self.commit or row.returncode is None:
                continue
            if is_first_time:
                over_limit.add(row.stage)
            else:
                ended[row.stage] = row
        return ended

    def run(self, planned: Sequence[Stage], *, seconds: float) -> bool:
        """Run what has not ended yet, as far as the time goes.

        Returns:
            Whether every stage has ended.
        """
        deadline = time.monotonic() + seconds
        before = self.outcomes()
        left = [stage for stage in planned if stage.name not in before]
        for is_timed, together in groupby(left, key=lambda stage: stage.is_timed):
            with ThreadPoolExecutor(1 if is_timed else self.num_jobs) as pool:
                list(pool.map(lambda stage: self._run(stage, deadline), together))
        return self.outcomes().keys() >= {stage.name for stage in planned}

    def _run(self, stage: Stage, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left < NOT_BEGUN_SECONDS:
            return
        timeout = min(left, stage.limit_seconds)
        outcome = self._outcome(stage, timeout, returncode=OVER_LIMIT if timeout < left else None)
        if stage.name == BRIEF_TESTS:
            counted = tests_by_file(self._log(stage).read_text(errors="replace"))
            (self.folder / "tests.txt").write_text(f"{self.machine}\n{counted}\n")
            print(counted, flush=True)
        with self._lock, self._rows.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        self._write_archive()
        text = f"{stage.name}: "
        if outcome.returncode is None:
            text += f"cut short after {outcome.seconds:.0f} s"
        elif outcome.passed:
            text += f"passed in {outcome.seconds:.0f} s{self._tests_counted(stage)}"
        else:
            lines = self._log(stage).read_text(errors="replace").splitlines()[-LINES_SHOWN:]
            text += f"FAILED ({outcome.returncode}) after {outcome.seconds:.0f} s, the log ends:"
            text = "\n".join([text, *(f"    {line[:300]}" for line in lines)])
        print(text, flush=True)

    def _outcome(self, stage: Stage, timeout: float, *, returncode: int | None) -> Outcome:
        """Run a stage; one that outlasts the timeout has the return code given."""
        command = [sys.executable, *stage.command]
        if stage.is_timed:
            command += ["--results", str(self.folder.parent)]
        if stage.is_list:
            command += ["--seconds", f"{max(0.0, timeout - LIST_END_SECONDS):.0f}"]
        elif stage.is_timed:
            command += ["--go-on"]
            command += ["--tests-passed", *self._tests_passed()]
        started = time.monotonic()
        with self._log(stage).open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment(sees_peers=stage.sees_peers),
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            if self._ends(process, started + timeout):
                returncode = process.returncode
                if stage.is_list and returncode == TIME_IS_UP:
                    returncode = None
            else:
                # Engines have children of their own.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Outcome(
            stage=stage.name,
            returncode=returncode,
            seconds=round(time.monotonic() - started, 1),
            commit=self.commit,
            machine=self.machine,
        )

    def _ends(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        while True:
            left = deadline - time.monotonic()
            try:
                process.wait(max(0, min(ARCHIVE_SECONDS, left)))
            except subprocess.TimeoutExpired:
                if left <= ARCHIVE_SECONDS:
                    return False
                self._write_archive()
            else:
                return True

    def _log(self, stage: Stage) -> Path:
        return self.folder / "logs" / f"{stage.name.replace(' ', '-')}.txt"

    def _tests_counted(self, stage: Stage) -> str:
        lines = self._log(stage).read_text(errors="replace").splitlines()
        return f": {lines[-1]}" if stage.is_test and lines else ""

    def _tests_passed(self) -> list[str]:
        passed: list[str] = []
        for name, row in self.outcomes().items():
            for prefix, folder in (("native ", KERNEL_TESTS), ("engine ", ENGINE_TESTS)):
                if row.passed and name.startswith(f"{prefix}test_"):
                    passed.append(f"{folder}/{name.removeprefix(prefix)}.py")
        return passed

    def _write_archive(self) -> None:
        if self.archive is None:
            return
        with self._lock:
            part = self.archive.with_name(f"{self.archive.name}.part")
            with tarfile.open(part, "w:gz") as tar:
                tar.add(self.folder.parent, arcname=".")
            part.replace(self.archive)

    def environment(self, *, sees_peers: bool) -> dict[str, str]:
        """Get the variables a stage runs with."""
        path = [str(ROOT)]
        if self.site is not None:
            path += [str(self.site)] + ([str(self.site / "peers")] if sees_peers else [])
        if os.environ.get("PYTHONPATH"):
            path.append(os.environ["PYTHONPATH"])
        settings = {} if self.site is None else dict(gpu_bundle.SETTINGS)
        if self.kernels is not None:
            settings["TRITON_CACHE_DIR"] = str(self.kernels)
        # Compilers of peers would each take all cores, and more memory than there is.
        settings |= {"MAX_JOBS": str(CORES_OF_A_STAGE), "OMP_NUM_THREADS": "2"}
        settings["PYTHONUNBUFFERED"] = "1"
        return os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)}


def tests_by_file(log: str) -> str:
    """Say of each file how many tests passed and failed, and name those that failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failed: list[str] = []
    for line in log.splitlines():
        match = next((found for each in TEST_LINES if (found := each.match(line))), None)
        if match:
            counts[match["file"]][match["how"].lower()] += 1
            if match["how"] in ("FAILED", "ERROR"):
                failed.append(f"{match['file']}::{match['name']}")
    lines = [
        f"{name}: {', '.join(f'{number} {how}' for how, number in sorted(found.items()))}"
        for name, found in sorted(counts.items())
    ]
    failed = list(dict.fromkeys(failed))
    return "\n".join([*lines, f"{len(failed)} failed", *failed[:NAMES_SHOWN]])


def summary(planned: Sequence[Stage], outcomes: dict[str, Outcome]) -> str:
    """Say in a line how far the session is, and name what failed."""
    ended = [outcomes[stage.name] for stage in planned if stage.name in outcomes]
    failed = [outcome.stage for outcome in ended if not outcome.passed]
    text = f"{len(ended)} of {len(planned)} stages ended, {len(failed)} failed"
    return f"{text}: {', '.join(failed)}" if failed else text


def take_up(earlier: Path, results: Path) -> None:
    """Copy an earlier session's results, a folder or an archive, before going on from them."""
    if earlier.is_dir():
        shutil.copytree(earlier, results, dirs_exist_ok=True)
    else:
        shutil.unpack_archive(earlier, results, filter="data")


def _stages_of(options: argparse.Namespace) -> list[Stage]:
    """Get the stages of a brief session or a whole one."""
    has_xdist = find_spec("xdist") is not None
    if not options.brief:
        return stages(num_workers=CORES_OF_A_STAGE if options.jobs > 1 and has_xdist else 0)
    return brief_stages(
        tests=options.tests,
        list_path=options.list_file,
        test_seconds=60 * options.test_minutes,
        num_workers=max(1, (os.cpu_count() or 1) - 2) if has_xdist else 1,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session from the command line.

    Returns:
        0 where all stages have passed, 1 where one failed, 2 where some are still to run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.gpu_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of rows and logs")
    parser.add_argument(
        "--resume", type=Path, help="results of an earlier session, which are copied first"
    )
    parser.add_argument("--archive", type=Path, help="also write the results to this .tar.gz file")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of this call (default: %(default)s)"
    )
    parser.add_argument("--bundle", help="folders of the offline bundle, separated by ':'")
    parser.add_argument("--site", type=Path, help="folder to which the bundle is unpacked")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="run only stages whose name begins with one of these",
    )
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, cores // CORES_OF_A_STAGE),
        help="number of stages that run at once",
    )
    parser.add_argument("--list", action="store_true", help="print the stages and exit")
    parser.add_argument(
        "--kernels", type=Path, help="kernels packed by perf.gpu.precompiled --pack"
    )
    brief = parser.add_argument_group("in minutes")
    brief.add_argument(
        "--brief", action="store_true", help="run all tests at once, and then a list"
    )
    brief.add_argument("--tests", nargs="*", default=[], help="files of tests, such as kv_store")
    brief.add_argument("--test-minutes", type=float, default=2.5, help="time limit of all tests")
    brief.add_argument(
        "--list-file", type=Path, help="list of benchmarks (default: that of perf.gpu.gpu_list)"
    )
    options = parser.parse_args(arguments)
    every = _stages_of(options)
    planned = [stage for stage in every if stage.name.startswith(tuple(options.only))]
    if options.list:
        print("\n".join(stage.name for stage in planned))
        return 0
    if (options.bundle is None) != (options.site is None):
        parser.error("--bundle and --site must be given together")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        parser.error(f"the tests need {', '.join(missing)}, which are not installed here")
    started = time.monotonic()
    if options.resume is not None:
        take_up(options.resume, options.results)
    if options.bundle is not None:
        gpu_bundle.unpack(options.bundle, options.site)
    kernels = None
    if options.kernels is not None:
        kernels = options.results.resolve().parent / "kernels"
        command = [sys.executable, "-m", "perf.gpu.precompiled", str(kernels)]
        subprocess.run([*command, "--unpack", str(options.kernels)], cwd=ROOT, check=True)
    session = Session(
        options.results.resolve() / machine_name(),
        commit=commit_of(),
        machine=machine_line(),
        site=None if options.site is None else options.site.resolve(),
        num_jobs=options.jobs,
        kernels=kernels,
        archive=options.archive,
    )
    print(session.machine, flush=True)
    used = time.monotonic() - started
    has_ended = session.run(planned, seconds=options.minutes * 60 - used)
    outcomes = session.outcomes()
    print(summary(planned, outcomes))
    if not has_ended:
        print(f"to go on: the same command again, or --resume {options.results} elsewhere")
        return 2
    return int(not all(outcomes[stage.name].passed for stage in planned))


if __name__ == "__main__":
    sys.exit(main())
