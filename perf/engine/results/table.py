"""Make a page from engines' rows: each side of each case compared with stock vLLM, with a chart.

    python -m perf.engine.results.table ROWS.jsonl ... --out docs/engines.md

Nothing is written if no row was measured on a GPU.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.engine.planning.models import Scale
from perf.engine.planning.sides import OURS_PLAIN, SIDES, STOCK
from perf.engine.results.rows import Row, read

INTRODUCTION = """\
# Engines beside stock vLLM

One engine at a time serves the same requests on the same GPU, with the same bytes for its cache and
an empty cache each time. Weights are random, at the widths of the models named. A number is the
median of a side's runs; "of stock" is a side's requests a second over those of `stock`. Runs during
which something was compiled are left out where there are others, and marked \u2020 where there are
none. `perf/engine/README.md` says what the sides are and how to run this; made by
`python -m perf.engine.results.table`."""

MARK = "\u2020"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        title: Text of the column's head.
        text: Function that makes a cell from a side's runs.
    """

    title: str
    text: Callable[["Runs"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of one side of a case's workload.

    Attributes:
        side: Name of the side.
        rows: Rows of the runs. Runs during which something was compiled are left out if there are
            others.
        num_runs: Number of all runs, including those left out.
        requests_of_stock: Median requests per second, divided by that of stock vLLM. Not a number
            if stock has no runs.
    """

    side: str
    rows: tuple[Row, ...]
    num_runs: int
    requests_of_stock: float = math.nan

    def median(self, field: str) -> float:
        """Return the median of a field."""
        return statistics.median(row[field] for row in self.rows)

    @property
    def is_disturbed(self) -> bool:
        """Whether something was compiled during every run."""
        return all(row["is_disturbed"] for row in self.rows)


def _pair(first: str, second: str, form: str) -> Callable[[Runs], str]:
    return lambda runs: f"{runs.median(first):{form}} / {runs.median(second):{form}}"


def _share(runs: Runs) -> str:
    return "" if math.isnan(runs.requests_of_stock) else f"{runs.requests_of_stock:.2f}"


COLUMNS = (
    Column(title="side", text=lambda runs: runs.side + MARK * runs.is_disturbed),
    Column(title="runs", text=lambda runs: str(runs.num_runs)),
    Column(title="seconds", text=lambda runs: f"{runs.median('seconds'):.2f}"),
    Column(title="requests/s", text=lambda runs: f"{runs.median('requests_per_s'):.2f}"),
    Column(title="of stock", text=_share),
    Column(title="tokens/s out", text=lambda runs: f"{runs.median('output_tokens_per_s'):.0f}"),
    Column(title="TTFT p50 / p99, s", text=_pair("ttft_p50_s", "ttft_p99_s", ".2f")),
    Column(title="TPOT p50 / p99, ms", text=_pair("tpot_p50_ms", "tpot_p99_ms", ".1f")),
    Column(title="found", text=lambda runs: f"{runs.median('found_share'):.0%}"),
    Column(title="running", text=lambda runs: f"{runs.median('mean_running'):.1f}"),
    Column(title="preempted", text=lambda runs: f"{runs.median('num_preemptions'):.0f}"),
    Column(title="start, s", text=lambda runs: f"{runs.median('start_s'):.0f}"),
)

Group = tuple[str, str, str, str]
"""GPU, commit, case and workload."""


def groups_of(rows: Iterable[Row]) -> dict[Group, list[Runs]]:
    """Group runs that can be compared: same GPU, commit, case and workload."""
    found: dict[Group, dict[str, list[Row]]] = {}
    for row in rows:
        group = (row["gpu"], row["commit"], row["case"], row["workload"])
        found.setdefault(group, {}).setdefault(row["side"], []).append(row)
    return {group: _sides(sides) for group, sides in found.items()}


def _sides(by_side: dict[str, list[Row]]) -> list[Runs]:
    order = list(SIDES)
    sides: list[Runs] = []
    for name in sorted(by_side, key=order.index):
        rows = by_side[name]
        calm = [row for row in rows if not row["is_disturbed"]]
        sides.append(Runs(side=name, rows=tuple(calm or rows), num_runs=len(rows)))
    stock = next((each for each in sides if each.side == STOCK.name), None)
    if stock is None:
        return sides
    per_s = stock.median("requests_per_s")
    return [
        Runs(
            side=each.side,
            rows=each.rows,
            num_runs=each.num_runs,
            requests_of_stock=each.median("requests_per_s") / per_s,
        )
        for each in sides
    ]


def table(sides: Sequence[Runs]) -> str:
    """Make one table, with one line for each side."""
    lines = [
        f"| {' | '.join(column.title for column in COLUMNS)} |",
        f"|---|{'--:|' * (len(COLUMNS) - 1)}",
    ]
    lines += [f"| {' | '.join(column.text(each) for column in COLUMNS)} |" for each in sides]
    return "\n".join(lines)


def agreement(rows: Iterable[Row], group: Group) -> list[str]:
    """List sentences on how the outputs of a group's sides agree."""
    lines: list[str] = []
    for row in rows:
        if (row["gpu"], row["commit"], row["case"], row["workload"]) != group:
            continue
        beside = row["beside"]
        line = (
            f"- {row['side']} {row['turn']} beside {beside['side']} {beside['turn']}: "
            f"{row['num_same']} outputs are the same, {row['num_parted']} part"
        )
        if row["num_other_prompts"]:
            line += f", {row['num_other_prompts']} follow another answer"
        if row["num_parted"]:
            line += f", the first of them at token {row['earliest_parting']}"
        if row.get("num_judged"):
            line += (
                f"; {row['num_near_ties']} of {row['num_judged']} looked at were near ties "
                f"(within {row['near_tie_nats']:g} nats)"
            )
        lines.append(line + ".")
    return lines


def page(rows: Sequence[Row], picture: str | None) -> str:
    """Make the page.

    Args:
        rows: Rows of all kinds, measured on GPUs.
        picture: Name of the chart's file. None means no chart.
    """
    runs = [row for row in rows if row["kind"] == "run"]
    compared = [row for row in rows if row["kind"] == "comparison"]
    lines = [INTRODUCTION, ""]
    if picture is not None:
        lines += [f"![Requests a second over stock vLLM's]({picture})", ""]
    machine = ("", "")
    for group, sides in groups_of(runs).items():
        gpu, commit, case, workload = group
        if (gpu, commit) != machine:
            machine = gpu, commit
            lines += [f"## {gpu}, {commit}", "", *_machines(runs, machine), ""]
        first = sides[0].rows[0]
        lines += [f"### {case}, {workload}", ""]
        lines += [f"`{first['trace']}`, {first['cache_bytes'] / 2**30:g} GiB", ""]
        lines += [table(sides), ""]
        if said := agreement(compared, group):
            lines += [*said, ""]
    failed = [row for row in rows if row["kind"] == "failure"]
    if failed:
        lines += ["## Failed", ""]
        lines += [f"- {row['reason']}: `{row['error']}`" for row in failed]
        lines.append("")
    return "\n".join(lines)


def _machines(runs: Sequence[Row], machine: tuple[str, str]) -> list[str]:
    """List the machines and package versions behind the rows of a GPU and a commit."""
    found: dict[str, None] = {}
    for row in runs:
        if (row["gpu"], row["commit"]) == machine:
            versions = ", ".join(f"{name} {each}" for name, each in row["versions"].items())
            found[f"{row['machine']}; {versions}"] = None
    return list(found)


def draw(groups: dict[Group, list[Runs]], path: Path) -> bool:
    """Draw our requests per second relative to stock's, one bar for each workload.

    Returns:
        Whether there was anything to draw.
    """
    bars = [
        (f"{case}, {workload}", each.requests_of_stock)
        for (_, _, case, workload), sides in groups.items()
        for each in sides
        if each.side == OURS_PLAIN.name and not math.isnan(each.requests_of_stock)
    ]
    if not bars:
        return False
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "engines"
    figure = Figure(figsize=(9, 1 + 0.35 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    names, shares = zip(*reversed(bars), strict=True)
    drawn = axes.barh(names, shares, color="tab:blue")
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("requests a second on Jenga over stock vLLM's")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page.

    Returns:
        0, or 1 if no row was measured on a GPU.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.engine.results.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="+", type=Path, help="files of rows")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="file of the page; the chart goes into the same folder",
    )
    options = parser.parse_args(arguments)
    rows = [row for path in options.rows for row in read(path)]
    measured = [row for row in rows if row["scale"] == Scale.FULL.value and row.get("gpu") != "cpu"]
    runs = [row for row in measured if row["kind"] == "run"]
    if not runs:
        print("no row was measured on a GPU: there is nothing to say", file=sys.stderr)
        return 1
    picture = options.out.with_suffix(".svg")
    has_picture = draw(groups_of(runs), picture)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(measured, picture.name if has_picture else None) + "\n")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
