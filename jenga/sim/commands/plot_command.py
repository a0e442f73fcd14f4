"""`jenga plot`: draw a figure from the rows of replays."""

import argparse
from pathlib import Path
from typing import Any

from jenga.sim.drawing.figures import save
from jenga.sim.report import plots
from jenga.sim.results.runs import Run, read_runs

DESCRIPTION = """\
Draw a figure from rows that `jenga replay --out` wrote. Several runs, from one file or from several
files, are drawn in one figure. This needs matplotlib (extra `plots`)."""

EPILOG = """\
examples:
  jenga plot timeline rows.jsonl --out timeline.svg
  jenga plot batch jenga.jsonl vllm.jsonl --out batch.png
  jenga plot hits articles.jsonl --parameter n --out hits.svg
  jenga plot waste rows/*.jsonl --out waste.svg"""

FIGURES = {
    "timeline": "used, wasted, cached and unallocated bytes of each step, and bytes of each page "
    "table",
    "batch": "number of decoding requests in each step",
    "hits": "hit rate against the number of articles",
    "latency": "time to first token (or --metric) against the request rate",
    "waste": "waste of each model and manager",
    "throughput": "tokens per second (or --metric) of each model and manager",
}
"""Names of the figures, each with a description of what it shows."""

_PARAMETERS = {"hits": "n", "latency": "rate"}

_METRICS = {
    "hits": "hit_rate",
    "latency": "ttft_s",
    "waste": "waste",
    "throughput": "tokens_per_s",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `jenga plot`."""
    parser.add_argument(
        "figure",
        choices=tuple(FIGURES),
        metavar="FIGURE",
        help="; ".join(f"{name}: {words}" for name, words in FIGURES.items()),
    )
    parser.add_argument(
        "rows", nargs="+", type=Path, metavar="ROWS", help="files that `jenga replay --out` wrote"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file of the figure: .svg, .png or .pdf",
    )
    parser.add_argument(
        "--over",
        choices=tuple(plots.AXES),
        default="steps",
        help="horizontal axis of timeline and batch (default: %(default)s)",
    )
    parser.add_argument(
        "--metric",
        choices=tuple(plots.METRICS),
        help="number that hits, latency, waste or throughput draws instead of its own",
    )
    parser.add_argument(
        "--parameter",
        metavar="NAME",
        help="horizontal axis of hits and latency: an option of the runs, or a number in the "
        "names of their traces (default: n for hits, rate for latency)",
    )
    parser.set_defaults(run=run, extras="jenga-kv[plots]")


def run(options: argparse.Namespace) -> int:
    """Draw one figure into a file.

    Raises:
        ValueError: Rows cannot be read or lack the numbers of the figure, or the file's name has an
            unknown ending.
    """
    save(_figure(options, read_runs(options.rows)), options.out)
    print(options.out)
    return 0


def _figure(options: argparse.Namespace, runs: list[Run]) -> Any:  # noqa: ANN401  matplotlib
    name = options.figure
    metric = options.metric or _METRICS.get(name, "")
    match name:
        case "timeline":
            return plots.timeline(runs, over=options.over)
        case "batch":
            return plots.decode_batch(runs, over=options.over)
        case "hits" | "latency":
            parameter = options.parameter or _PARAMETERS[name]
            return plots.against(runs, parameter=parameter, metric=metric)
        case _:
            return plots.bars(runs, metric=metric)
