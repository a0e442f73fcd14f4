"""Tables of a GPU's times: the newest rows of each shape, ours and the peers' of the same commit.

python -m perf.tables.table_gpu perf/results/h200   # writes summary.md there
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.tables.gpu_rows import (
    GROUPS,
    OURS,
    UNSHIPPED,
    Comparison,
    Group,
    Shape,
    compare,
    read_groups,
    unsteady,
)

INTRODUCTION = f"""\
Made by `python -m perf.tables.table_gpu`.
A row is one run: the median of 50 launches from CUDA graphs,
with a cold L2, and their 20th to 80th percentile. A peer's column has its time over ours at the
same commit: above 1 ours is faster. Columns that begin with "{OURS}-" are ours with other kernels
or tiles. "{UNSHIPPED}" is the benchmark's own choice where another is shipped. Means are
geometric, over the shapes of one table.

"Changed since" compares this checkout with the row's commit (`perf/tables/kernel_sources.py`).
"kernel": the code of the kernel that serves the shape on Hopper has changed, so the row is
superseded.
"tiles": only the functions that choose tiles have changed, and may choose the same for the shape.
"unknown": git does not know the commit."""

FEW = 2
"""Number of ratios up to which each is printed, because their mean would say nothing."""


def count_of(num_shapes: int) -> str:
    """Format a number of shapes."""
    return "one shape" if num_shapes == 1 else f"{num_shapes} shapes"


def table(group: Group, shapes: Sequence[Shape]) -> str:
    """Make one group's table, and below it a sentence on each peer."""
    # Rows of other tiles are named "jenga, <tiles>".
    others = sorted(
        {
            name
            for shape in shapes
            for name in shape.rows
            if name != OURS and not name.startswith(f"{OURS},")
        }
    )
    peers = [name for name in others if not name.startswith(OURS)]
    columns = peers + [name for name in others if name.startswith(OURS)]
    titles = ["shape", "us (p20 to p80)", "GB/s", "TFLOPS", *columns, "commit", "changed since"]
    lines = [f"| {' | '.join(titles)} |", f"|---|{'--:|' * (3 + len(columns))}---|---|"]
    for shape in shapes:
        ours = shape.rows[OURS]
        cells = [f"{ours['p50_us']:.1f} ({ours['p20_us']:.1f} to {ours['p80_us']:.1f})"]
        cells.append(f"{ours['gigabytes_per_second']:.0f}")
        cells.append(f"{ours['teraflops']:.0f}" if ours["teraflops"] >= 1 else "")
        ratios = [shape.ratio(name) for name in columns]
        cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        cells += [shape.commit, shape.changed]
        lines.append(f"| {shape.name} | {' | '.join(cells)} |")
    tokens = sorted(
        {row["page_tokens"] for each in shapes if "page_tokens" in (row := each.rows[OURS])}
    )
    settings = [group.setting] if group.setting else []
    if tokens:
        settings.append(f"pages of {' and '.join(map(str, tokens))} tokens")
    setting = "; ".join(settings)
    setting = setting[:1].upper() + setting[1:]
    compared = [(peer, found) for peer in peers if (found := compare(shapes, peer))]
    parts = [f"## {group.title}", *([f"{setting}."] if setting else []), "\n".join(lines)]
    if compared:
        parts.append("\n".join(f"- {peer}: {sentence(found)}" for peer, found in compared))
    return "\n\n".join(parts)


def sentence(found: Comparison) -> str:
    """Format a comparison with a peer in words."""
    count = len(found.ratios)
    if count <= FEW:
        text = (
            f"{' and '.join(f'{ratio:.2f}' for ratio in sorted(found.ratios))}, {count_of(count)}"
        )
    else:
        text = (
            f"{min(found.ratios):.2f} to {max(found.ratios):.2f}, geometric mean {found.mean:.2f}, "
            f"median {found.median:.2f}, {count} shapes, {found.num_behind} of them below 1.00"
        )
    if found.num_changed:
        text += f"; changed since: {found.num_changed}"
    return text + "."


def changes(found: dict[str, list[Shape]]) -> str:
    """List the tables that have rows older than their kernels."""
    lines: list[str] = []
    for group in GROUPS:
        shapes = found.get(group.name, [])
        counts = collections.Counter(shape.changed for shape in shapes if shape.changed)
        if counts:
            words = ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))
            lines.append(f"- {group.title}: {words} of {len(shapes)}")
    return "\n".join(lines or ["- none"])


def summary(folder: Path) -> str:
    """Make all tables of a folder of rows, after a line for each machine that made them."""
    found = read_groups(folder)
    machines = sorted(
        {
            row["machine"]
            for shapes in found.values()
            for each in shapes
            for row in each.rows.values()
        }
    )
    parts = [
        f"# {folder.name}",
        INTRODUCTION,
        "\n".join(f"- {machine}" for machine in machines),
    ]
    moved = unsteady(folder)
    if moved:
        name, peer, ratio = moved
        parts.append(
            f"How far single runs can be trusted: of the peers' times of 50 us and more that were "
            f"taken at two commits, the one that moved most is {peer}'s of {name}, by "
            f"{100 * (ratio - 1):.0f} %."
        )
    parts += ["## Changed since their rows", changes(found)]
    parts += [table(group, found[group.name]) for group in GROUPS if group.name in found]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the summary of a folder.

    Returns:
        0, or 1 if the folder has no rows.
    """
    parser = argparse.ArgumentParser(prog="python -m perf.tables.table_gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with the rows of one GPU")
    folder = parser.parse_args(arguments).folder.resolve()
    if not any(folder.glob("bench_*.jsonl")):
        print(f"{folder} has no bench_*.jsonl", file=sys.stderr)
        return 1
    (folder / "summary.md").write_text(summary(folder), encoding="utf-8")
    print(folder / "summary.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
