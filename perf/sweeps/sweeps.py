"""Common code of sweeps: shapes along an axis, measured like those of the attention benchmark."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perf.harness.timing import Benchmark, Row, read_roofline
from perf.kernels.bench_paged_attention import IMPLEMENTATIONS, measure_shape
from perf.shapes.attention_shapes import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One shape of a sweep.

    Attributes:
        series: Name of the plot's line that it belongs to.
        x: Position on the axis.
        shape: Shape to measure. Its name is unique in the sweep.
    """

    series: str
    x: float
    shape: AttentionShape


def run_sweep(
    name: str,
    description: str,
    points: Iterable[Point],
    *,
    dry: Iterable[Point],
    axis: str,
    arguments: Sequence[str] | None = None,
) -> None:
    """Measure all points, write their rows, and draw a plot beside the rows' file.

    Args:
        name: Name of the file of rows and of the plot.
        description: Text of `--help`.
        points: Points to measure.
        dry: Points to measure in a dry run.
        axis: Label of the plot's axis.
        arguments: Command line. None means that of the process.
    """
    benchmark = Benchmark(
        name, description, ["tests/kernels/attention/test_paged_attention.py"], arguments
    )
    measured: list[tuple[Point, Row]] = []
    for point in dry if benchmark.is_dry else points:
        if not benchmark.wants_shape(point.shape.name):
            continue
        first = len(benchmark.rows)
        measure_shape(benchmark, point.shape, IMPLEMENTATIONS)
        measured += [(point, row) for row in benchmark.rows[first:]]
        if benchmark.device.type == "cuda":
            torch.cuda.empty_cache()
    path = benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))
    picture = path.with_suffix(".svg")
    draw(measured, picture, axis=axis)
    print(f"picture: {picture}")


def draw(measured: Sequence[tuple[Point, Row]], path: Path, *, axis: str) -> None:
    """Draw a line for each series and implementation: times relative to its least time."""
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[float, float]]] = {}
    for point, row in measured:
        line = lines.setdefault(f"{point.series}, {row.implementation}", [])
        line.append((point.x, row.timing.p50_us))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, places in lines.items():
        x, times_us = zip(*sorted(places), strict=True)
        least_us = min(times_us)
        label = f"{name}: least {least_us:.0f} us"
        axes.plot(x, [each / least_us for each in times_us], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(axis)
    axes.set_ylabel("time over the least of the line")
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize="small")
    figure.savefig(path)
