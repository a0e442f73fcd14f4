"""Tables of what a GPU has timed: each shape's newest rows, ours beside those of the same commit.

python -m perf.table_gpu perf/results/h200   # writes summary.md there
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TITLES = {
    "bench_paged_attention": "Paged attention",
    "bench_latent_attention": "Multi-head latent attention",
    "bench_state_update": "One token through recurrent layers",
    "bench_state_scan": "Prompts through recurrent layers",
    "bench_state_replay": "One token, states seldom written",
    "bench_delta": "Gated delta nets",
    "bench_delta_replay": "Gated delta nets, states seldom written",
    "bench_linear_attention": "Linear attention",
    "bench_conv_update": "Causal convolutions",
    "bench_kv_store": "Keys and values into pages",
    "bench_latent_store": "Latents into pages",
    "bench_pages": "Copies, clears, merges",
}
"""File -> what its table is called, in the order of the tables."""

TOGETHER = {"bench_specialized_prefill": "bench_paged_attention"}
"""Files whose rows stand beside another's."""

OURS = "jenga"

INTRODUCTION = """\
Medians of 50 launches from CUDA graphs with a cold L2. A peer's column has its time over ours at
the same commit: above 1 ours is faster. Made by `python -m perf.table_gpu`."""

Rows = dict[str, dict[str, Any]]
"""Implementation -> its row, of one shape at one commit."""


def read(folder: Path) -> dict[str, dict[str, Rows]]:
    """Benchmark -> shape -> newest rows: of the last commit with ours and others, or with ours."""
    found: dict[str, dict[str, dict[str, Rows]]] = {}
    for path in sorted(folder.glob("bench_*.jsonl")):
        by_shape = found.setdefault(TOGETHER.get(path.stem, path.stem), {})
        for line in path.read_text().splitlines():
            row = json.loads(line)
            commits = by_shape.setdefault(row["shape"], {})
            rows = commits.pop(row["commit"], {})
            commits[row["commit"]] = rows | {row["implementation"]: row}
    return {
        name: {shape: newest for shape, commits in shapes.items() if (newest := _newest(commits))}
        for name, shapes in found.items()
    }


def _newest(commits: dict[str, Rows]) -> Rows:
    ours = [rows for rows in commits.values() if OURS in rows]
    ours.sort(key=lambda rows: rows[OURS]["date"])
    compared = [rows for rows in ours if any(not name.startswith(OURS) for name in rows)]
    return (compared or ours or [{}])[-1]


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders names so that the numbers in them count as such."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def table(shapes: dict[str, Rows]) -> str:
    """One benchmark's table, and for each peer the geometric mean of its times over ours."""
    # Rows of other tiles are named "jenga, <tiles>".
    peers = sorted(
        {
            name
            for rows in shapes.values()
            for name in rows
            if name != OURS and not name.startswith(f"{OURS},")
        }
    )
    titles = ["shape", "us (p20 to p80)", "GB/s", "TFLOPS", *peers]
    lines = [f"| {' | '.join(titles)} |", f"|---|{'--:|' * (len(titles) - 1)}"]
    ratios: dict[str, list[float]] = {}
    for shape, rows in sorted(shapes.items(), key=lambda item: _natural(item[0])):
        ours = rows[OURS]
        cells = [f"{ours['p50_us']:.1f} ({ours['p20_us']:.1f} to {ours['p80_us']:.1f})"]
        cells.append(f"{ours['gigabytes_per_second']:.0f}")
        cells.append(f"{ours['teraflops']:.0f}" if ours["teraflops"] >= 1 else "")
        for peer in peers:
            if peer in rows:
                ratio = rows[peer]["p50_us"] / ours["p50_us"]
                ratios.setdefault(peer, []).append(ratio)
                cells.append(f"{ratio:.2f}")
            else:
                cells.append("")
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    means = [
        f"{peer} {statistics.geometric_mean(ratios[peer]):.2f} ({len(ratios[peer])} shapes)"
        for peer in peers
    ]
    if means:
        lines += ["", f"Geometric means: {', '.join(means)}."]
    return "\n".join(lines)


def summary(folder: Path) -> str:
    """All tables of a folder of rows, under a line for each machine that made them."""
    found = read(folder)
    rows = [
        row
        for shapes in found.values()
        for of_shape in shapes.values()
        for row in of_shape.values()
    ]
    machines = sorted({row["machine"] for row in rows})
    parts = [
        f"# {folder.name}",
        INTRODUCTION,
        "\n".join(f"- {machine}" for machine in machines),
    ]
    for name, title in TITLES.items():
        if found.get(name):
            parts += [f"## {title}", table(found[name])]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the summary of a folder.

    Returns:
        0, or 1 where the folder has no rows.
    """
    parser = argparse.ArgumentParser(prog="python -m perf.table_gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="of one GPU's rows")
    folder = parser.parse_args(arguments).folder.resolve()
    if not any(folder.glob("bench_*.jsonl")):
        print(f"{folder} has no bench_*.jsonl", file=sys.stderr)
        return 1
    (folder / "summary.md").write_text(summary(folder))
    print(folder / "summary.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
