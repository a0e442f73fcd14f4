"""Numbers and tables in readable text."""

from collections.abc import Sequence

LEFT, RIGHT = "<", ">"

_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB")
_UNIT = 1000


def heading(text: str) -> str:
    """Return a line with a rule below it."""
    return f"{text}\n{'-' * len(text)}"


def bytes_text(num_bytes: float) -> str:
    """Write bytes with three or four digits and a decimal unit: "34.1 MB"."""
    value = float(num_bytes)
    for unit in _DECIMAL_UNITS:
        if abs(value) < _UNIT or unit == _DECIMAL_UNITS[-1]:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= _UNIT
    return ""


def count_text(count: float) -> str:
    """Write a number of parameters in words: "27.4 billion"."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.4g} {word}"
    return f"{count:,.0f}"


def share_text(share: float) -> str:
    """Write a share as a percentage with one digit, or with two if it is below one percent."""
    percent = 100 * share
    return f"{percent:.2f} %" if 0 < abs(percent) < 1 else f"{percent:.1f} %"


def aligned(rows: Sequence[Sequence[str]], *, alignment: str = "") -> list[str]:
    """Write rows as lines with aligned columns.

    Args:
        rows: Rows of equal length, the header first.
        alignment: `LEFT` or `RIGHT` for each column. By default the first column is aligned to the
            left, and all others to the right.
    """
    alignment = alignment or LEFT + RIGHT * (len(rows[0]) - 1)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}"
            for cell, side, width in zip(row, alignment, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def wrapped(text: str, *, width: int, indent: str = "") -> list[str]:
    """Break a text into lines of at most `width` characters, all of them indented."""
    lines: list[str] = []
    line = indent
    for word in text.split():
        if len(line) + 1 + len(word) > width and line.strip():
            lines.append(line)
            line = indent
        line += word if line == indent else f" {word}"
    return [*lines, line]
