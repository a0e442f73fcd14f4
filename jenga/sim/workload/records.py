"""JSON objects of an untrusted file, read one after another.

A file is a list of objects, lines of objects, one object, or Parquet, whose rows are objects. The
file may be larger than memory, but no single object may be.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO, cast

from jenga.sim.files.lines import open_text
from jenga.sim.files.parquet import read_table
from jenga.sim.results.rows import is_parquet

MOST_RECORD_CHARS = 1 << 28
"""Most characters of an object. The longest sessions of AgentX take half of it."""

_BATCH_ROWS = 16
"""Rows of Parquet that are in memory together. It is small because a row may be a whole session."""

_CHUNK_CHARS = 1 << 16
_BETWEEN = re.compile(r"[\s,]*")
_UNSURE_CHARS = 16
"""An error within so many characters of the end of the text read so far may be due to that end."""

_SHOWN = 80

Record = dict[str, object]


def records_of(path: Path) -> Iterator[tuple[str, Record]]:
    """Read the objects of a file.

    Yields:
        The object's place for error messages, which is its file and first line, and its members.

    Raises:
        ValueError: Something is no JSON object, or is too large. The message names file and line.
        OSError: The file cannot be read.
        ModuleNotFoundError: The file is Parquet, and pyarrow is not installed.
    """
    if is_parquet(path):
        rows = read_table(path, batch_rows=_BATCH_ROWS)
        for number, record in enumerate(rows, start=1):
            yield f"{path}, row {number}", record
        return
    with open_text(path) as file:
        yield from _Reader(path, file)


class _Reader:
    """Take objects from a text that is read in chunks."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0
        self._line = 1
        self._is_whole = False
        self._decoder = json.JSONDecoder()

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        is_list = False
        while self._skip():
            character = self._text[self._at]
            if character == "[" and not is_list:
                is_list = True
                self._at += 1
            elif character == "]" and is_list:
                self._at += 1
                if self._skip():
                    self._refuse("nothing behind its list")
                return
            elif character == "{":
                where = f"{self._path}:{self._line}"
                yield where, self._record()
            else:
                self._refuse("a JSON object")
        if is_list:
            self._refuse("a list that ends in ]")

    def _skip(self) -> bool:
        """Go to the next character that is no space or comma. Return False if there is none."""
        while True:
            found = cast("re.Match[str]", _BETWEEN.match(self._text, self._at))
            self._advance(found.end())
            if self._at < len(self._text):
                return True
            if not self._read():
                return False

    def _record(self) -> Record:
        while True:
            try:
                record, end = cast(
                    "tuple[Record, int]", self._decoder.raw_decode(self._text, self._at)
                )
            except json.JSONDecodeError as error:
                is_cut = error.pos >= len(self._text) - _UNSURE_CHARS or error.msg.startswith(
                    "Unterminated string"
                )
                if not is_cut or not self._read():
                    line = self._line + self._text.count("\n", self._at, error.pos)
                    self._refuse(f"a JSON object, which ends or breaks at line {line}")
            except (ValueError, RecursionError) as error:
                self._refuse(f"a JSON object that can be read ({error})")
            else:
                self._advance(end)
                return record

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _read(self) -> bool:
        """Read more text, at least as much as is not parsed yet. Return False at the file's end."""
        if self._is_whole:
            return False
        rest = self._text[self._at :]
        if len(rest) >= MOST_RECORD_CHARS:
            self._refuse(f"an object of at most {MOST_RECORD_CHARS} characters")
        more = self._file.read(max(_CHUNK_CHARS, len(rest)))
        self._is_whole = not more
        self._text, self._at = rest + more, 0
        return bool(more)

    def _refuse(self, expected: str) -> NoReturn:
        got = self._text[self._at : self._at + _SHOWN]
        msg = f"{self._path}:{self._line}: must be {expected}, got {got!r}"
        raise ValueError(msg)
