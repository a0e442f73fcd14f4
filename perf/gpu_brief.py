"""Use the few minutes for which a GPU is lent: tests of kernels on all cores, then benchmarks.

    python -m perf.gpu_brief --results OUT --minutes 8 [--kernels KERNELS.tar.xz]
        [--bundle DIR:DIR --site SITE] [--list LIST] [--tests NAME ...] [--archive OUT.tar.gz]

All tests run in one pytest, in as many processes as there are cores; one that loses its GPU is
replaced. Then `perf.gpu_list` runs in one process. `perf.gpu_session` does all there is to do,
file by file and each on its own, and takes an hour; PERF_COMMIT names the commit as there.
`--kernels` are those of `perf.precompiled`: with them all tests of kernels took two minutes on 16
cores.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from perf import gpu_bundle
from perf.gpu_stages import KERNEL_TESTS
from perf.harness import ROOT, machine_line, machine_name

TEST_MINUTES = 2.5
"""For tests at most; benchmarks have the rest."""

TEST_HANGS_SECONDS = 60
MAX_PROCESSES_LOST = 40

TEST = r"(?:\S*/)?(?P<file>test_\w+)\.py::(?P<name>.*?)"
ENDED = r"(?P<how>PASSED|FAILED|SKIPPED|ERROR)"
OUTCOMES = (
    re.compile(rf"\[gw\d+\] \[ *\d+%\] {ENDED} {TEST}\s*$"),
    re.compile(rf"{TEST} {ENDED}(?: \(.*\))?\s+\[ *\d+%\]$"),
)
"""Lines of `pytest -v`, with pytest-xdist and without."""

NAMES_SHOWN = 20
"""Of tests that failed."""


def environment(site: Path | None, cache: Path | None) -> dict[str, str]:
    """Get the variables that tests and benchmarks run with."""
    path = [str(ROOT)] + ([] if site is None else [str(site), str(site / "peers")])
    settings = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}
    if site is not None:
        settings |= gpu_bundle.SETTINGS
    if cache is not None:
        settings["TRITON_CACHE_DIR"] = str(cache)
    return os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)}


def run(command: Sequence[str], log: Path, seconds: float, variables: dict[str, str]) -> int | None:
    """Run a command into a log, for so long at most.

    Returns:
        What it returned; None where time ran out.
    """
    with log.open("w") as file:
        try:
            return subprocess.run(
                command,
                cwd=ROOT,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, seconds),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def test_command(names: Sequence[str], num_workers: int) -> list[str]:
    """The command that runs tests of kernels, all or those of the files named."""
    files = [f"{KERNEL_TESTS}/test_{name}.py" for name in names] or [KERNEL_TESTS]
    options = ["-v", "-W", "default", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow"]
    options += ["--timeout", str(TEST_HANGS_SECONDS), "--timeout-method", "thread"]
    # What compiles alone needs no GPU, and no cache of another machine has its texts.
    options += ["-k", "not compile and not few_instructions and not more_pages_than"]
    if num_workers > 1 and find_spec("xdist") is not None:
        options += ["-n", str(num_workers), "--max-worker-restart", str(MAX_PROCESSES_LOST)]
    return [sys.executable, "-m", "pytest", *options, *files]


def outcomes(log: str) -> str:
    """Say of each file how many tests passed and failed, and name those that failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failed: list[str] = []
    for line in log.splitlines():
        match = next((found for each in OUTCOMES if (found := each.match(line))), None)
        if match:
            counts[match["file"]][match["how"].lower()] += 1
            if match["how"] in ("FAILED", "ERROR"):
                failed.append(f"{match['file']}::{match['name']}")
    lines = [
        f"{name}: {', '.join(f'{number} {what}' for what, number in sorted(found.items()))}"
        for name, found in sorted(counts.items())
    ]
    failed = list(dict.fromkeys(failed))
    return "\n".join([*lines, f"{len(failed)} failed", *failed[:NAMES_SHOWN]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests and benchmarks from the command line.

    Returns:
        0, or 1 where one failed or was cut short.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_brief",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of rows and logs")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it")
    parser.add_argument("--kernels", type=Path, help="compiled ahead: perf.precompiled --pack")
    parser.add_argument("--bundle", help="folders of the offline bundle, separated by ':'")
    parser.add_argument("--site", type=Path, help="where the bundle is unpacked")
    parser.add_argument("--list", type=Path, help="of benchmarks; otherwise perf.gpu_list's")
    parser.add_argument("--tests", nargs="*", default=[], help="files of tests: kv_store ...")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--archive", type=Path, help="one file, .tar.gz, to keep the results in")
    options = parser.parse_args(arguments)
    if (options.bundle is None) != (options.site is None):
        parser.error("--bundle and --site must be given together")
    deadline = time.monotonic() + 60 * options.minutes
    results = options.results.resolve()
    folder = results / machine_name()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    cache = None
    if options.kernels is not None:
        cache = results.parent / "kernels"
        command = [sys.executable, "-m", "perf.precompiled", str(cache)]
        subprocess.run([*command, "--unpack", str(options.kernels)], cwd=ROOT, check=True)
    if options.bundle is not None:
        gpu_bundle.unpack(options.bundle, options.site)
    print(machine_line(), flush=True)
    site = None if options.site is None else options.site.resolve()
    variables = environment(site, cache)

    log = folder / "logs" / "native.txt"
    seconds = min(60 * TEST_MINUTES, deadline - time.monotonic())
    tests = run(test_command(options.tests, options.workers), log, seconds, variables)
    text = outcomes(log.read_text(errors="replace"))
    (folder / "tests.txt").write_text(f"{machine_line()}\n{text}\n")
    print(text, "cut short" if tests is None else "", flush=True)

    left = deadline - time.monotonic()
    command = [sys.executable, "-m", "perf.gpu_list", "--seconds", f"{max(0.0, left - 20):.0f}"]
    command += ["--results", str(results)] + ([] if options.list is None else [str(options.list)])
    log = folder / "logs" / "benchmarks.txt"
    benchmarks = run(command, log, left, variables)
    print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    if options.archive is not None:
        with tarfile.open(options.archive, "w:gz") as tar:
            tar.add(results, arcname=".")
    return int(tests != 0 or benchmarks != 0)


if __name__ == "__main__":
    sys.exit(main())
