"""Lines of untrusted text files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

MOST_LINE_CHARS = 1 << 26
"""Most characters of a line: more than a request of a million tokens takes."""


def open_text(path: Path) -> TextIO:
    """Open a text file. Bytes that are not UTF-8 are replaced, so that readers refuse the line."""
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file, with their line ends.

    Raises:
        ValueError: A line has more than `MOST_LINE_CHARS` characters. The message names its number.
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
