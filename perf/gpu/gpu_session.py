"""Run everything that needs a GPU, in pieces: kernel tests, benchmarks, engine tests, sweeps.

    python -m perf.gpu.gpu_session --results OUT [--minutes 9] [--bundle DIR:DIR --site SITE]

    # Continue on another machine:
    python -m perf.gpu.gpu_session --results OUT --resume EARLIER

    # The most important part, in a few minutes:
    python -m perf.gpu.gpu_session --results OUT --brief --kernels KERNELS.tar.xz

A stage that ended at this commit is not run again. If `--minutes` cuts a stage short, the next call
runs it again, a benchmark from the shape at which it stopped.

Rows are appended to OUT/<gpu>/<benchmark>.jsonl and OUT/<gpu>/tests.jsonl, each with the machine's
line. Printed output goes to OUT/<gpu>/logs. `--archive FILE.tar.gz` additionally keeps all of OUT
in one file. It is written after each stage and every half minute, and `--resume` accepts it too. If
the files are not a git checkout, PERF_COMMIT must name the commit.

Tests run several at a time on all cores, with pytest-xdist if it is installed. So do the
compilations of the benchmarks. Timed stages run alone. A stage that exceeds its time limit is
stopped, so that it delays no other. The second time it counts as failed. Benchmarks come after the
tests of their kernels. If such a test failed, the benchmark runs it again and refuses to time
anything.

A whole session takes an hour. If a GPU is available only for minutes, use `--brief`. It runs all
kernel tests in one pytest on all cores, and then `perf.gpu.gpu_list` in one process, because
otherwise starting Python and compiling would take all the time. `--kernels` is an archive of
`perf.gpu.precompiled`. With it, all kernel tests took two minutes on 16 cores. `--tests` and
`--list-file` select some of the tests and benchmarks.

A machine needs torch, Triton, pytest, pytest-timeout and hypothesis. The engine and the peers need
vLLM and the peers' libraries. If these cannot be installed, `--bundle` names the folders of an
offline bundle, one of which holds `unpack.sh`. `--site` is the folder to unpack it to. A later call
unpacks parts that have been added.
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
from perf.harness.machine import path_of_test
from perf.harness.timing import ROOT, commit_of, machine_line, machine_name

NOT_BEGUN_SECONDS = 20
"""Least time left, in seconds, for a stage to begin: Python and torch take about that to start."""

ARCHIVE_SECONDS = 30
"""Seconds between two archives while a stage runs."""

NO_TESTS_COLLECTED = 5
"""Exit status of pytest if a file has no test with the selected marks."""

OVER_LIMIT = 124
"""Exit status recorded for a stage that exceeded its own time limit."""

LINES_SHOWN = 12
"""Number of lines shown from the log of a failed stage."""

CORES_OF_A_STAGE = 4

LIST_END_SECONDS = 20
"""Seconds before the end of a session from which a list begins no more shapes."""

TEST = r"(?:\S*/)?(?P<file>test_\w+)\.py::(?P<name>.*?)"
ENDED = r"(?P<how>PASSED|FAILED|SKIPPED|ERROR)"
TEST_LINES = (
    re.compile(rf"\[gw\d+\] \[ *\d+%\] {ENDED} {TEST}\s*$"),
    re.compile(rf"{TEST} {ENDED}(?: \(.*\))?\s+\[ *\d+%\]$"),
)
"""Patterns of result lines of `pytest -v`, with pytest-xdist and without."""

NAMES_SHOWN = 20
"""Largest number of failed tests whose names are shown."""
NEEDED = ("pytest", "pytest_timeout", "hypothesis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a stage.

    Attributes:
        stage: Name of the stage.
        returncode: Exit status of its command. None means that the session's time was over.
        seconds: Seconds that it took.
        commit: Commit at which it ran.
        machine: Line that describes the machine.
    """

    stage: str
    returncode: int | None
    seconds: float
    commit: str
    machine: str

    @property
    def passed(self) -> bool:
        """Whether the stage ended without failures."""
        return self.returncode in (0, NO_TESTS_COLLECTED)


class Session:
    """Stages of one commit on one machine, and their results.

    Args:
        folder: Folder of this machine's rows and logs.
        commit: Commit that is tested.
        machine: Line that describes the machine.
        site: Folder of an unpacked bundle. None if there is none.
        num_jobs: Number of stages that may run at once while none is timed.
        kernels: Triton cache with kernels that were compiled before. None means Triton's default
            cache.
        archive: File that keeps the contents of `folder`'s parent. None means no archive.
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
        """Return the last result at this commit of each stage that has ended.

        A stage that exceeded its time limit only once has not ended.
        """
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
        """Run the stages that have not ended yet, as long as time is left.

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
        """Run a stage. If the timeout stops it, its result has the given return code."""
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
                # Engines start child processes, which must end too.
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
                    passed.append(path_of_test(folder, name.removeprefix(prefix)))
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
        """Return the environment variables of a stage."""
        path = [str(ROOT)]
        if self.site is not None:
            path += [str(self.site)] + ([str(self.site / "peers")] if sees_peers else [])
        if os.environ.get("PYTHONPATH"):
            path.append(os.environ["PYTHONPATH"])
        settings = {} if self.site is None else dict(gpu_bundle.SETTINGS)
        if self.kernels is not None:
            settings["TRITON_CACHE_DIR"] = str(self.kernels)
        # Each peer's compiler would use all cores, and together they would need more memory than
        # there is.
        settings |= {"MAX_JOBS": str(CORES_OF_A_STAGE), "OMP_NUM_THREADS": "2"}
        settings["PYTHONUNBUFFERED"] = "1"
        return os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)}


def tests_by_file(log: str) -> str:
    """Count passed and failed tests of each file, and name the failed ones."""
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
    """Return a line that counts ended and failed stages, and names the failed ones."""
    ended = [outcomes[stage.name] for stage in planned if stage.name in outcomes]
    failed = [outcome.stage for outcome in ended if not outcome.passed]
    text = f"{len(ended)} of {len(planned)} stages ended, {len(failed)} failed"
    return f"{text}: {', '.join(failed)}" if failed else text


def take_up(earlier: Path, results: Path) -> None:
    """Copy an earlier session's results, a folder or an archive, to continue from them."""
    if earlier.is_dir():
        shutil.copytree(earlier, results, dirs_exist_ok=True)
    else:
        shutil.unpack_archive(earlier, results, filter="data")


def _stages_of(options: argparse.Namespace) -> list[Stage]:
    """Return the stages of a brief or a whole session."""
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
        0 if all stages passed, 1 if one failed, 2 if some are left to run.
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
