"""Figures of README and docs, drawn as SVG from committed rows and from the planner.

    python -m perf.tables.doc_figures [--check]

With `--check` nothing is written. The exit status is 1 if a file differs from the drawn figure.
Both figures have a light background of their own, so that they are readable on dark pages.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import log
from pathlib import Path

from jenga.geometry import Geometry, PageTable
from jenga.models.known import known_model
from jenga.planning.planner import plan
from perf.tables.readme_tables import ROOT, WORKLOADS, factor, factors, mean, replays
from perf.tables.recipe_plans import ROWS, read_rows

IMAGES = ROOT / "docs" / "images"

BLUE, ORANGE, GREY, INK, FAINT = "#0072b2", "#d55e00", "#d9d9d9", "#222222", "#8a8a8a"
"""Colours that can be distinguished without red and green (Okabe and Ito), and greys."""

WIDTH = 760
"""Width of a figure, in pixels at its natural size."""

MARGIN = 24
ROOM = WIDTH - 2 * MARGIN
"""Width between the margins, in pixels."""

PICTURED_MODEL = "gemma-3-27b"


def text(x: float, y: float, words: str, *, anchor: str = "start", **look: str) -> str:
    """Make a line of text.

    Args:
        x: Position of its anchor, in pixels.
        y: Position of its base line, in pixels.
        words: Text, not escaped.
        anchor: `start`, `middle` or `end`.
        **look: Further attributes, with `_` instead of `-`.
    """
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in look.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Make a filled rectangle with a white edge."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'fill="{colour}" stroke="#ffffff"/>'
    )


def line(x: float, top: float, bottom: float, colour: str) -> str:
    """Make a vertical line."""
    return f'<path d="M{x:g} {top:g}V{bottom:g}" stroke="{colour}"/>'


def figure(height: float, title: str, parts: Sequence[str]) -> str:
    """Put parts on a light background of a figure's width."""
    return "\n".join(
        (
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
                f'width="{WIDTH}" height="{height:g}" role="img" fill="{INK}" '
                f'font-family="Helvetica, Arial, sans-serif" font-size="13">'
            ),
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#fbfbfb"/>',
            *parts,
            "</svg>",
            "",
        )
    )


# The large page


def pictured_geometry() -> Geometry:
    """Plan the pictured model for the arena of its row in docs/recipes.md."""
    (row,) = (row for row in read_rows(ROWS) if row["model"] == PICTURED_MODEL)
    return plan(known_model(PICTURED_MODEL).spec(), arena_bytes=row["arena_bytes"])


def large_page() -> str:
    """Draw the arena, and one of its large pages as cut by each of two layer types."""
    geometry = pictured_geometry()
    full, sliding = (
        next(table for table in geometry.page_tables if table.name == name)
        for name in ("full", "sliding")
    )
    megabytes = geometry.large_page_bytes / 1e6
    holders = "fsfs.fssf.sfss"
    width = ROOM / len(holders)

    def middle(index: int) -> float:
        return MARGIN + (index + 0.5) * width

    colours = {"f": BLUE, "s": ORANGE, ".": GREY}
    parts = [
        text(MARGIN, 30, f"The arena: large pages of {megabytes:.1f} MB", font_weight="bold"),
        *(
            box(MARGIN + index * width, 42, width, 30, colours[holder])
            for index, holder in enumerate(holders)
        ),
        text(WIDTH / 2, 92, "Any layer type may take any free (grey) page.", anchor="middle"),
        *_cut(sliding, ORANGE, "sliding window", middle(holders.rindex("s")), 240),
        *_cut(full, BLUE, "full attention", middle(holders.index("f")), 150),
    ]
    return figure(310, "One large page, cut by either of two layer types", parts)


def _cut(table: PageTable, colour: str, words: str, x: float, top: float) -> Iterator[str]:
    """Draw an enlarged large page as small pages of one layer type.

    `x` is its middle in the arena.
    """
    count = table.small_pages_per_large_page
    yield (
        f'<path d="M{x:g} 72V{top - 34:g}" stroke="{colour}" fill="none" stroke-dasharray="3 3"/>'
    )
    megabytes = table.small_page_bytes / 1e6
    yield text(
        MARGIN,
        top - 12,
        f"{words}: {count} small pages of {megabytes:.2f} MB, "
        f"{table.tokens_per_page} tokens in {table.layer_end - table.layer_start} layers each",
        fill=colour,
        font_weight="bold",
    )
    yield from (
        box(MARGIN + place * ROOM / count, top, ROOM / count, 36, colour) for place in range(count)
    )


# The workloads


def workloads() -> str:
    """Draw the gain of each model on each workload. Losses have a colour of their own."""
    found = [(name, factors(of_models)) for name, of_models in replays().items()]
    found.sort(key=lambda item: mean(item[1]))
    every = [gained for _, of_models in found for gained in of_models.values()]
    low, high = min(0.9, *every), max(every) * 1.05
    left, right, top, step = 296, WIDTH - 70, 84, 30

    def place(value: float) -> float:
        return left + (right - left) * log(value / low) / log(high / low)

    bottom = top + step * len(found)
    parts = [
        text(MARGIN, 30, "Modelled speed-up of whole runs over vLLM's manager", font_weight="bold"),
        text(
            MARGIN, 50, "A dot is a model; the bar is the geometric mean. Orange: slower.", fill=INK
        ),
    ]
    for tick in (1, 2, 3, 4, 5, 6):
        if low <= tick <= high:
            parts += [
                line(place(tick), top - 10, bottom - 8, INK if tick == 1 else GREY),
                text(place(tick), bottom + 10, f"{tick}x", anchor="middle", fill=FAINT),
            ]
    for index, (name, gained) in enumerate(found):
        y = top + step * index + 6
        parts.append(text(left - 14, y + 4, WORKLOADS[name], anchor="end", font_size="12"))
        parts += [
            f'<circle cx="{place(value):.1f}" cy="{y:g}" r="4" fill-opacity="0.6" '
            f'fill="{ORANGE if factor(value) < "1.00" else BLUE}"/>'
            for value in sorted(gained.values(), reverse=True)
        ]
        parts += [
            f'<rect x="{place(mean(gained)) - 1.5:.1f}" y="{y - 9:g}" width="3" height="18"/>',
            text(WIDTH - MARGIN, y + 4, f"{factor(mean(gained))}x", anchor="end"),
        ]
    return figure(bottom + 26, "Modelled speed-up of whole runs over vLLM's manager", parts)


# Command

FIGURES: dict[str, Callable[[], str]] = {"large-page.svg": large_page, "workloads.svg": workloads}
"""File in docs/images -> function that draws it."""


def write(*, checks_only: bool, folder: Path = IMAGES) -> list[str]:
    """Draw all figures, or only compare them.

    Returns:
        Names of the files that differed from the drawn figures.
    """
    wrong: list[str] = []
    for name, draw in FIGURES.items():
        path, drawn = folder / name, draw()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            wrong.append(name)
            if not checks_only:
                path.write_text(drawn, encoding="utf-8")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        1 if a file differed from the drawn figure, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.tables.doc_figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and only compare")
    wrong = write(checks_only=parser.parse_args(arguments).check)
    print("\n".join(f"docs/images/{name} has changed" for name in wrong) or "nothing has changed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
