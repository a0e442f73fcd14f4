"""Measured shares of a GPU's peaks, from the rows of this repository's benchmarks.

The package has the shares that the rows of `perf/results` give, so that seconds do not depend on
how it was installed. `python -m perf.tables.measured_shares` writes them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jenga.sim.batching.step_time import Achieved
from jenga.sim.hardware.gpus import Gpu

_ROOFLINE = ("roofline",)
_ATTENTION = ("bench_specialized_prefill", "bench_paged_attention")
"""Files of rows. If two files have rows of one shape, the row of the later file counts."""

_READ, _MATMUL = "read", "matmul"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One measurement.

    Attributes:
        shape: Name of the measured shape.
        seconds: Median time of one launch.
        num_bytes: Fewest bytes that a launch must move.
        num_flops: Number of operations that a launch must do.
    """

    shape: str
    seconds: float
    num_bytes: float
    num_flops: float


SHARES_FILE = "measured_shares.json"
"""File in the package's assets with the measured shares of each GPU."""


def measured(gpu: Gpu, results: Path | None = None) -> Achieved:
    """Return the measured shares of a GPU's peaks. A share without rows is 1.

    Shares of products with weights are the best rates in the rows of `perf.harness.roofline`: those
    of "read" for bandwidth, and those of "matmul" for arithmetic. Shares of attention come from our
    kernels' rows of `perf.kernels.bench_paged_attention` and
    `perf.kernels.bench_specialized_prefill`. One share is over all shapes that traffic limits, the
    other over all shapes that arithmetic limits. Each is the sum of the least possible times over
    the sum of the measured times. If a shape has several rows, the last one counts.

    Args:
        gpu: A GPU that is known by name.
        results: A folder with one folder of rows for each GPU, such as `perf/results`. None means
            the shares that the package has.

    Raises:
        ValueError: A row has a wrong value, and the message names file, line and field. Or the
            peaks of the GPU are unknown.
    """
    if gpu.bytes_per_s is None:
        msg = f"gpu must be known by name where time is modelled, got {gpu.name!r}"
        raise ValueError(msg)
    if results is None:
        return _of_the_package(gpu)
    bytes_per_s, flops = gpu.bytes_per_s, gpu.flops("bfloat16")
    folders = [each for name in gpu.folders if (each := results / name).is_dir()]
    roofline = _rows(folders, _ROOFLINE, "roofline")
    attention = _rows(folders, _ATTENTION, "jenga")
    by_traffic = [row for row in attention if row.num_bytes / bytes_per_s >= row.num_flops / flops]
    others = [row for row in attention if row not in by_traffic]
    shares = {
        "bandwidth_share": [
            row.num_bytes / bytes_per_s / row.seconds for row in roofline if row.shape == _READ
        ],
        "arithmetic_share": [
            row.num_flops / flops / row.seconds for row in roofline if row.shape == _MATMUL
        ],
        "attention_bandwidth_share": _together(by_traffic, "num_bytes", bytes_per_s),
        "attention_arithmetic_share": _together(others, "num_flops", flops),
    }
    return Achieved(**{name: min(1.0, max(found)) for name, found in shares.items() if found})


def _of_the_package(gpu: Gpu) -> Achieved:
    text = (resources.files("jenga.sim") / "assets" / SHARES_FILE).read_text(encoding="utf-8")
    shares: dict[str, dict[str, float]] = json.loads(text)
    return Achieved(**shares.get(gpu.name, {}))


def _together(rows: list[_Row], what: str, per_s: float) -> list[float]:
    """Share of a peak that rows reach together. The list is empty if there are no rows."""
    if not rows:
        return []
    return [sum(getattr(row, what) for row in rows) / per_s / sum(row.seconds for row in rows)]


def _rows(folders: list[Path], names: tuple[str, ...], implementation: str) -> list[_Row]:
    """Return the last row of each shape."""
    found: dict[str, _Row] = {}
    for path in (folder / f"{name}.jsonl" for folder in folders for name in names):
        if not path.is_file():
            continue
        for where, values in _records(path):
            if values.get("implementation") == implementation:
                row = _row(values, where)
                found[row.shape] = row
    return list(found.values())


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                values = None
            if not isinstance(values, dict):
                msg = f"{where}: a row must be one JSON object, got {line.strip()[:60]!r}"
                raise ValueError(msg)  # noqa: TRY004  the file is wrong, not the call
            yield where, values


def _row(values: dict[str, Any], where: str) -> _Row:
    numbers: dict[str, float] = {}
    for name in ("p50_us", "num_bytes", "num_flops"):
        value = values.get(name)
        least = 0 if name == "num_flops" else 1e-9
        if not isinstance(value, int | float) or value < least:
            msg = f"{where}: {name} must be a positive number, got {value!r}"
            raise ValueError(msg)
        numbers[name] = value
    return _Row(
        shape=str(values.get("shape")),
        seconds=numbers["p50_us"] / 1e6,
        num_bytes=numbers["num_bytes"],
        num_flops=numbers["num_flops"],
    )
