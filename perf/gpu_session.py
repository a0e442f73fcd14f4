"""Run everything that needs a GPU, in pieces: native tests, then each benchmark, then the engine.

    python -m perf.gpu_session --results OUT [--minutes 9] [--bundle DIR:DIR --site SITE]
    python -m perf.gpu_session --results OUT --resume EARLIER   # on another machine, later

Stages that ended before at this commit are not run again; what `--minutes` cuts short is run anew
by the next call. Rows go to OUT/<gpu>/<benchmark>.jsonl and OUT/<gpu>/tests.jsonl, each with the
machine's line, and what a stage printed to OUT/<gpu>/logs. Benchmarks come after the tests of
their kernels; where one of those failed, the benchmark runs it again and refuses to time anything.

Where vLLM and the peers are not installed, `--bundle` names the folders of an offline bundle, one
of which holds its `unpack.sh`, and `--site` where to unpack it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perf.harness import ROOT, machine_line, machine_name

BENCHMARKS = (
    "roofline",
    "bench_kv_store",
    "bench_paged_attention --only D",
    "bench_paged_attention --only P",
    "bench_paged_attention --only X",
    "bench_latent_attention",
    "bench_conv_update",
    "bench_state_update",
    "bench_state_scan",
    "bench_delta",
    "bench_latent_store",
    "bench_pages",
    "sweep_page_size",
    "sweep_tokens_per_page",
)
"""In the order of what they tell; the longest is run by the first letter of its shapes' names."""

HOST_BENCHMARKS = ("bench_manager", "bench_replay", "sweep_eviction_order")
"""Benchmarks that time the host alone, and so need no GPU's minutes."""

ENGINE_TESTS = "tests/vllm_plugin"
NOT_BEGUN_SECONDS = 20
"""With less time left no stage is begun: Python and torch take about that to start."""

NO_TESTS_COLLECTED = 5
"""What pytest returns where every test of a file is marked otherwise."""

LINES_SHOWN = 12
"""Of the log of a stage that failed."""

BUNDLE_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is imported for sampling otherwise
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command, and whether it is a test.

    Attributes:
        name: Names its row and its log.
        command: What runs, without the interpreter.
        is_test: Whether it runs tests, and not a benchmark.
        sees_peers: Whether libraries to compare with are on the path: vLLM chooses others then.
    """

    name: str
    command: tuple[str, ...]
    is_test: bool = True
    sees_peers: bool = False


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


def stages(root: Path = ROOT) -> list[Stage]:
    """List all stages in the order they run."""

    def tests(folder: str, marks: str, prefix: str) -> list[Stage]:
        return [
            Stage(
                name=f"{prefix} {path.stem}",
                command=("-m", "pytest", "-q", "-m", marks, f"{folder}/{path.name}"),
            )
            for path in sorted((root / folder).glob("test_*.py"))
        ]

    return [
        *tests("tests/kernels", "not slow", "native"),
        *(
            Stage(
                name=benchmark,
                command=("-m", *f"perf.{benchmark}".split()),
                is_test=False,
                sees_peers=True,
            )
            for benchmark in BENCHMARKS
        ),
        *tests(ENGINE_TESTS, "not slow", "engine"),
        *tests("tests/kernels", "slow", "native slow"),
        *tests(ENGINE_TESTS, "slow", "engine slow"),
    ]


class Session:
    """The stages of one commit on one machine, and how each ended.

    Args:
        folder: Where rows and logs of this machine go.
        commit: What is tested.
        machine: The machine's line.
        site: Folder of an unpacked bundle, if there is one.
    """

    def __init__(self, folder: Path, *, commit: str, machine: str, site: Path | None) -> None:
        self.folder = folder
        self.commit = commit
        self.machine = machine
        self.site = site
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._rows = folder / "tests.jsonl"

    def outcomes(self) -> dict[str, Outcome]:
        """Get how each stage last ended at this commit, of those that ended."""
        if not self._rows.exists():
            return {}
        rows = [Outcome(**json.loads(line)) for line in self._rows.read_text().splitlines()]
        return {
            row.stage: row
            for row in rows
            if row.commit == self.commit and row.returncode is not None
        }

    def run(self, planned: Sequence[Stage], *, seconds: float) -> bool:
        """Run what has not ended yet, as far as the time goes.

        Returns:
            Whether every stage has ended.
        """
        deadline = time.monotonic() + seconds
        for stage in planned:
            if stage.name in self.outcomes():
                continue
            left = deadline - time.monotonic()
            if left < NOT_BEGUN_SECONDS:
                return False
            outcome = self._run(stage, timeout=left)
            with self._rows.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            if outcome.returncode is None:
                print(f"{stage.name}: cut short after {outcome.seconds:.0f} s", flush=True)
                return False
            if outcome.passed:
                print(f"{stage.name}: passed in {outcome.seconds:.0f} s", flush=True)
            else:
                print(f"{stage.name}: FAILED ({outcome.returncode}), the log ends:", flush=True)
                lines = self._log(stage).read_text(errors="replace").splitlines()
                print("\n".join(f"    {line}" for line in lines[-LINES_SHOWN:]), flush=True)
        return True

    def _run(self, stage: Stage, *, timeout: float) -> Outcome:
        command = [sys.executable, *stage.command]
        if not stage.is_test:
            command += ["--results", str(self.folder.parent)]
            if self._kernels_passed():
                command.append("--skip-tests")
        started = time.monotonic()
        with self._log(stage).open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment(sees_peers=stage.sees_peers),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                returncode = process.wait(timeout)
            except subprocess.TimeoutExpired:
                # Engines have children of their own.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                returncode = None
        return Outcome(
            stage=stage.name,
            returncode=returncode,
            seconds=round(time.monotonic() - started, 1),
            commit=self.commit,
            machine=self.machine,
        )

    def _log(self, stage: Stage) -> Path:
        return self.folder / "logs" / f"{stage.name.replace(' ', '-')}.txt"

    def _kernels_passed(self) -> bool:
        ended = [row for name, row in self.outcomes().items() if name.startswith("native ")]
        return bool(ended) and all(row.passed for row in ended)

    def environment(self, *, sees_peers: bool) -> dict[str, str]:
        """Get the variables a stage runs with."""
        path = [str(ROOT)]
        if self.site is not None:
            path += [str(self.site)] + ([str(self.site / "peers")] if sees_peers else [])
        if os.environ.get("PYTHONPATH"):
            path.append(os.environ["PYTHONPATH"])
        settings = {} if self.site is None else BUNDLE_SETTINGS
        return os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)}


def unpack(bundle: str, site: Path) -> None:
    """Unpack an offline bundle, unless that was done before.

    Args:
        bundle: Its folders, separated by ":".
        site: Where to.

    Raises:
        ValueError: No folder holds `unpack.sh`.
    """
    if (site / "env.sh").exists():
        return
    scripts = (Path(folder, "unpack.sh") for folder in bundle.split(":"))
    script = next((path for path in scripts if path.exists()), None)
    if script is None:
        msg = f"--bundle must name a folder that holds unpack.sh, got {bundle}"
        raise ValueError(msg)
    subprocess.run(
        ["bash", str(script), bundle, str(site)],
        check=True,
        env=os.environ | {"PYTHON": sys.executable},
    )


def commit_of(root: Path = ROOT) -> str:
    """Name what is tested: the commit, or JENGA_COMMIT where there is no repository."""
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or os.environ.get("JENGA_COMMIT", "unknown")


def summary(planned: Sequence[Stage], outcomes: dict[str, Outcome]) -> str:
    """Say in a line how far the session is, and name what failed."""
    ended = [outcomes[stage.name] for stage in planned if stage.name in outcomes]
    failed = [outcome.stage for outcome in ended if not outcome.passed]
    text = f"{len(ended)} of {len(planned)} stages ended, {len(failed)} failed"
    return f"{text}: {', '.join(failed)}" if failed else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session from the command line.

    Returns:
        0 where all stages have passed, 1 where one failed, 2 where some are still to run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of rows and logs")
    parser.add_argument("--resume", type=Path, help="results of an earlier session, copied first")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin and run for so long")
    parser.add_argument("--bundle", help="folders of the offline bundle, separated by ':'")
    parser.add_argument("--site", type=Path, help="where the bundle is unpacked")
    parser.add_argument("--only", default="", help="stages whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the stages and end")
    options = parser.parse_args(arguments)
    planned = [stage for stage in stages() if options.only in stage.name]
    if options.list:
        print("\n".join(stage.name for stage in planned))
        return 0
    if (options.bundle is None) != (options.site is None):
        parser.error("--bundle and --site must be given together")
    started = time.monotonic()
    if options.resume is not None:
        shutil.copytree(options.resume, options.results, dirs_exist_ok=True)
    if options.bundle is not None:
        unpack(options.bundle, options.site)
    session = Session(
        options.results.resolve() / machine_name(),
        commit=commit_of(),
        machine=machine_line(),
        site=None if options.site is None else options.site.resolve(),
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
