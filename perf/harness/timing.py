"""Common parts of all benchmarks: tests first, one way to measure time, rows, one table.

A benchmark first runs its operation's tests, and stops if one fails. A time is that of one launch
of the operation in a CUDA graph. Before each replay, reading a large buffer empties the L2 cache.
Rows are appended to `results/<gpu>/<benchmark>.jsonl` as they are measured, one per line. At the
end they are printed as one table, under a line that describes the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from perf.harness.machine import ROOT, commit_of, module_of, output_of

FLUSH_BYTES = 512 << 20
"""Bytes that are read before each timed launch: several times the largest L2 cache."""

NUM_WARM_UPS = 3
NUM_REPEATS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Quantiles of the time of one launch, in microseconds."""

    p20_us: float
    p50_us: float
    p80_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        shape: Name of the shape.
        implementation: "jenga" or a peer.
        timing: Time of the launch.
        num_bytes: Least number of bytes that the operation must move.
        num_flops: Number of floating-point operations that it must do.
        details: Further fields of the row.
    """

    shape: str
    implementation: str
    timing: Timing
    num_bytes: int
    num_flops: int = 0
    details: dict[str, object]

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of `num_bytes` at the median time."""
        return self.num_bytes / self.timing.p50_us / 1e3

    @property
    def teraflops(self) -> float:
        """Rate of `num_flops` at the median time."""
        return self.num_flops / self.timing.p50_us / 1e6


class Benchmark:
    """One run of one benchmark: its options, its machine and its rows.

    Args:
        name: Name of the benchmark's module and of its file of rows.
        description: Text of `--help`.
        tests: Test files that must pass first, relative to the repository's root.
        arguments: Command line. None means that of the process.
        configure: Function that adds the benchmark's own options.

    Attributes:
        parser: Parser of the command line.
        options: Parsed options.
        machine: Line that describes the machine.
        path: File of the rows.
    """

    def __init__(
        self,
        name: str,
        description: str,
        tests: Sequence[str],
        arguments: Sequence[str] | None = None,
        *,
        configure: Callable[[argparse.ArgumentParser], None] | None = None,
    ) -> None:
        self.parser = parser = argparse.ArgumentParser(
            prog=f"python -m {module_of(name)}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--only", default="", help="time only shapes whose name contains this text"
        )
        parser.add_argument(
            "--peers",
            default="all",
            help="implementations to compare with, separated by commas; 'none' times only ours",
        )
        parser.add_argument(
            "--results", type=Path, default=ROOT / "perf" / "results", help="folder of the rows"
        )
        parser.add_argument(
            "--skip-tests",
            action="store_true",
            help="skip the tests, while you work on the benchmark",
        )
        parser.add_argument(
            "--tests-passed",
            nargs="*",
            default=[],
            help="test files that have passed and are not run again",
        )
        parser.add_argument(
            "--go-on",
            action="store_true",
            help="skip shapes measured at this commit, except the last one, which may be cut short",
        )
        parser.add_argument(
            "--compile-only",
            action="store_true",
            help="launch each kernel once, so that it is compiled, and time nothing",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="run tiny shapes, also on a CPU; rows go to a temporary folder and mean nothing",
        )
        if configure is not None:
            configure(parser)
        self.options = parser.parse_args(arguments)
        self.name = name
        self.rows: list[Row] = []
        self.is_dry = self.options.dry_run
        if not self.is_dry and not torch.cuda.is_available():
            parser.error("no CUDA GPU here; --dry-run tries the benchmark without one")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.compiles_only = self.options.compile_only
        self._commit, self.machine = commit_of(), machine_line()
        self.path = self.options.results / machine_name() / f"{name}.jsonl"
        if self.is_dry or self.compiles_only:
            self.path = Path(tempfile.mkdtemp(prefix="dry-run-")) / self.path.name
        self._ended = frozenset[str]()
        if self.options.go_on:
            self._ended = measured_before(self.path, self._commit, only=self.options.only)
        self._flush = None
        if self.device.type == "cuda" and not self.compiles_only:
            self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        left = [path for path in tests if path not in self.options.tests_passed]
        if left and not (self.options.skip_tests or self.is_dry or self.compiles_only):
            self._run_tests(left)

    def wants_peer(self, name: str) -> bool:
        """Whether a peer should be measured."""
        return self.options.peers == "all" or name in self.options.peers.split(",")

    def wants_shape(self, name: str) -> bool:
        """Whether a shape should be measured."""
        return self.options.only in name and name not in self._ended

    def measure(self, launch: Callable[[], object]) -> Timing:
        """Time one call that launches GPU work, and whose allocations do not outlive it.

        Raises:
            RuntimeError: The call waits for the GPU, which a CUDA graph cannot capture.
        """
        if self.compiles_only:
            launch()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return Timing(p20_us=0.0, p50_us=0.0, p80_us=0.0)
        if self.device.type == "cpu":
            started = time.perf_counter()
            launch()
            took_us = (time.perf_counter() - started) * 1e6
            return Timing(p20_us=took_us, p50_us=took_us, p80_us=took_us)
        try:
            return self._time(launch)
        except Exception:
            end_without_gpu()
            raise

    def _time(self, launch: Callable[[], object]) -> Timing:
        for _ in range(NUM_WARM_UPS):
            launch()
        # Waiting must be found before the capture: after a failed capture the process cannot
        # capture again.
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        begun = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPEATS)]
        ended = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPEATS)]
        for begin, end in zip(begun, ended, strict=True):
            self._empty_cache()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) * 1e3 for begin, end in zip(begun, ended, strict=True)]
        cuts = statistics.quantiles(times, n=10)
        return Timing(p20_us=cuts[1], p50_us=statistics.median(times), p80_us=cuts[7])

    def add(self, row: Row) -> None:
        """Write a row and print its time."""
        if self.compiles_only:
            print(f"  {row.shape}: {row.implementation} launched", flush=True)
            return
        self.rows.append(row)
        self.write(_as_record(row))
        print(f"  {row.shape}: {row.implementation} {row.timing.p50_us:.1f} us", flush=True)

    def write(self, record: dict[str, object]) -> None:
        """Append a record of any kind to the file, with the commit, the machine and the date."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        date = time.strftime("%Y-%m-%d %H:%M:%S")
        record |= {"commit": self._commit, "machine": self.machine, "date": date}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, *, roofline_gigabytes_per_second: float | None = None) -> Path:
        """Print the rows as a table.

        Args:
            roofline_gigabytes_per_second: Highest rate measured on this machine, for a column of
                the table. None leaves the column empty.

        Returns:
            The file of the rows.
        """
        print(self.machine)
        print(table(self.rows, roofline_gigabytes_per_second))
        print(f"rows: {self.path}")
        return self.path

    def _empty_cache(self) -> None:
        # Reading leaves no dirty cache lines, whose write-back would disturb the timed launch.
        if self._flush is not None:
            self._flush.sum()

    @staticmethod
    def _run_tests(tests: Sequence[str]) -> None:
        print(f"tests first: {' '.join(tests)}", flush=True)
        # Tests that failed before come first. Other versions of torch and Triton give other
        # warnings, which the project's own settings would turn into errors.
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--failed-first", "-m", "not slow"]
        command += ["-W", "default", *tests]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit("the operation's tests fail here: no time is worth measuring")


def end_without_gpu() -> None:
    """End the process if a failure has made its GPU unusable, so that every launch would fail."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.exit(
            f"what ran last has cost this process its GPU, nothing more can run in it: {error}"
        )


def machine_name() -> str:
    """Return the name of this machine's folder of results."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")


def machine_line() -> str:
    """Return a line with the GPU, driver, clocks, versions and commit."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}, jenga {commit_of()}"
    if not torch.cuda.is_available():
        return f"no GPU: times mean nothing, {versions}"
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    state = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    return f"{torch.cuda.get_device_name()}, {fields} = {state}, {versions}"


def table(rows: Sequence[Row], roofline_gigabytes_per_second: float | None = None) -> str:
    """Format rows as text. The last column is a row's time divided by ours for the same shape."""
    ours = {row.shape: row.timing.p50_us for row in rows if row.implementation == "jenga"}
    width = max([5, *(len(row.shape) for row in rows)])
    head = f"{'shape':{width}} {'implementation':16} {'p50 us (p20-p80)':>27} {'GB/s':>7} "
    lines = [head + f"{'% roof':>6} {'TFLOPS':>7} {'jenga is':>9}"]
    for row in rows:
        timing = row.timing
        times = f"{timing.p50_us:.1f} ({timing.p20_us:.1f}-{timing.p80_us:.1f})"
        share = ""
        if roofline_gigabytes_per_second:
            share = f"{100 * row.gigabytes_per_second / roofline_gigabytes_per_second:.0f}"
        ratio = ""
        if row.shape in ours and row.implementation != "jenga":
            ratio = f"{timing.p50_us / ours[row.shape]:.2f}x"
        lines.append(
            f"{row.shape:{width}} {row.implementation:16} {times:>27} "
            f"{row.gigabytes_per_second:7.0f} {share:>6} {row.teraflops:7.1f} {ratio:>9}"
        )
    return "\n".join(lines)


def measured_before(path: Path, commit: str, *, only: str) -> frozenset[str]:
    """Return the shapes that an earlier run measured at this commit.

    The last one is left out, because the run may have ended in the middle of it.
    """
    if not path.exists():
        return frozenset()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    shapes = dict.fromkeys(
        record["shape"]
        for record in records
        if record.get("commit") == commit and only in record["shape"]
    )
    return frozenset(list(shapes)[:-1])


def read_roofline(results: Path) -> float | None:
    """Return the highest read rate of `perf.harness.roofline` on this machine, in GB/s.

    None means that it was not measured.
    """
    path = results / machine_name() / "roofline.jsonl"
    if not path.exists():
        return None
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rates = [record["gigabytes_per_second"] for record in records if record["shape"] == "read"]
    return max(rates, default=None)


def _as_record(row: Row) -> dict[str, object]:
    return {
        "shape": row.shape,
        "implementation": row.implementation,
        "p20_us": row.timing.p20_us,
        "p50_us": row.timing.p50_us,
        "p80_us": row.timing.p80_us,
        "num_bytes": row.num_bytes,
        "num_flops": row.num_flops,
        "gigabytes_per_second": row.gigabytes_per_second,
        "teraflops": row.teraflops,
        **row.details,
    }
