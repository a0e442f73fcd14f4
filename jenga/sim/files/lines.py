"""Lines of text files that anyone may have written."""

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

MOST_LINE_CHARS = 1 << 26
"""Characters of the longest line read: more than a request of a million tokens takes."""


def open_text(path: Path) -> TextIO:
    """Open a file of text; what is not UTF-8 is replaced, for the line's reader to refuse."""
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def lines_of(path: Path) -> Iterator[str]:
    """Read the lines of a file, their ends included.

    Raises:
        ValueError: A line has more than `MOST_LINE_CHARS` characters; its number is named.
        OSError: The file cannot be read.
    """
    with open_text(path) as file:
        number = 0
        while line := file.readline(MOST_LINE_CHARS + 1):
            number += 1
            if len(line) > MOST_LINE_CHARS:
                msg = f"{path}:{number}: a line must have at most {MOST_LINE_CHARS} characters"
                raise ValueError(msg)
            yield line
