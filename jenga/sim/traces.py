"""Requests from traces of real traffic, read line by line.

Every reader takes a path and yields requests in the order of their arrival; a line that is not what
the format says is an error that names file, line and field.
"""

import csv
import json
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, TextIO, cast

from jenga.sim.workload import MOST_TOKENS, Piece, Request

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of one hash of a Mooncake trace."""


def read_mooncake(path: Path) -> Iterator[Request]:
    """Requests of a trace of Mooncake's.

    A hash names a block of 512 tokens and all that comes before it, so prompts share a prefix as
    far as their hashes are equal. Nothing says what was generated: nobody goes on from it unless
    the hashes of a later prompt happen to, and then it is computed again.

    Args:
        path: JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    Raises:
        ValueError: A line is not one; file, line and field are named.

    Source: Mooncake (FAST 2025), traces of kvcache-ai/Mooncake.
    """
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _mooncake_request(line, _Line(path, number))


def read_azure(path: Path) -> Iterator[Request]:
    """Requests of a trace of Azure's: times and lengths; nothing says what prompts share.

    Args:
        path: CSV of `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; a time that names no zone is
            in UTC.

    Raises:
        ValueError: A line is not one; file, line and field are named.

    Source: AzureLLMInferenceTrace of Azure/AzurePublicDataset, with Splitwise (ISCA 2024).
    """
    first: datetime | None = None
    for where, row in _csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        arrival = where.time("TIMESTAMP", row["TIMESTAMP"])
        first = first or arrival
        yield Request(
            name=str(where.number),
            arrival_s=(arrival - first).total_seconds(),
            prompt=(Piece(f"{where.number}", where.digits("ContextTokens", row["ContextTokens"])),),
            output_tokens=where.digits("GeneratedTokens", row["GeneratedTokens"]),
        )


LENGTH_COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("prompt_len", "output_len"),
    ("input_length", "output_length"),
)
"""Names of the two columns of lengths, in files that have only those."""


def read_lengths(path: Path, *, arrivals_per_s: float = 0.0, seed: int = 0) -> Iterator[Request]:
    """Requests of a file of lengths, such as those of ShareGPT or of arXiv's articles.

    Args:
        path: CSV with one of the pairs of `LENGTH_COLUMNS`; others are passed over.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Of the arrivals.

    Raises:
        ValueError: A line is not one; file, line and field are named.

    Source: the lengths published with microsoft/vidur.
    """
    draw = random.Random(seed)
    arrival_s = 0.0
    columns = _length_columns(path)
    for where, row in _csv_rows(path, columns):
        prompt_tokens, output_tokens = (where.digits(column, row[column]) for column in columns)
        yield Request(
            name=str(where.number),
            arrival_s=arrival_s,
            prompt=(Piece(f"{where.number}", prompt_tokens),),
            output_tokens=output_tokens,
        )
        if arrivals_per_s:
            arrival_s += draw.expovariate(arrivals_per_s)


def _length_columns(path: Path) -> tuple[str, str]:
    names = header_of(path)
    for columns in LENGTH_COLUMNS:
        if set(columns) <= set(names):
            return columns
    pairs = " or ".join(",".join(columns) for columns in LENGTH_COLUMNS)
    msg = f"{path}:1: columns must be {pairs}, got {','.join(names)}"
    raise ValueError(msg)


def open_text(path: Path) -> TextIO:
    """A file of text; what is no UTF-8 in it is left to the line that it stands in to refuse."""
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def header_of(path: Path) -> list[str]:
    """The names in the first line of a CSV file.

    Raises:
        ValueError: It is no line of CSV.
    """
    with open_text(path) as file:
        _, names = next(_cells(path, file), (1, list[str]()))
    return names


def _cells(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Lines of a CSV file with their numbers."""
    reader = csv.reader(file)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        msg = f"{path}:{reader.line_num}: the line must be CSV: {error}"
        raise ValueError(msg) from error


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple["_Line", dict[str, str]]]:
    """Lines of a CSV file with a header, as the columns asked for."""
    with open_text(path) as file:
        lines = _cells(path, file)
        _, names = next(lines, (1, list[str]()))
        missing = [column for column in columns if column not in names]
        if missing:
            msg = f"{path}:1: columns must have {missing[0]}, got {','.join(names)}"
            raise ValueError(msg)
        for number, cells in lines:
            if cells:
                where = _Line(path, number)
                if len(cells) != len(names):
                    where.refuse("the line", f"{len(names)} columns", ",".join(cells))
                yield where, dict(zip(names, cells, strict=True))


_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class _Line:
    """Where a line is, for errors."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self._where = f"{path}:{number}"

    def refuse(self, field: str, expected: str, value: object) -> NoReturn:
        """Raise the error for a field that is not what it must be."""
        msg = f"{self._where}: {field} must be {expected}, got {repr(value)[:_SHOWN]}"
        raise ValueError(msg)

    def count(self, field: str, value: object, *, least: int = 1) -> int:
        """A whole number."""
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(field, f"an integer of at least {least}", value)
        return value

    def tokens(self, field: str, value: object) -> int:
        """Tokens of a prompt, or after it."""
        num_tokens = self.count(field, value)
        if num_tokens > MOST_TOKENS:
            self.refuse(field, f"at most {MOST_TOKENS}", value)
        return num_tokens

    def digits(self, field: str, text: str) -> int:
        """Tokens in digits."""
        try:
            value: object = int(text)
        except ValueError:
            value = text
        return self.tokens(field, value)

    def time(self, field: str, text: str) -> datetime:
        """A time of day."""
        try:
            found = datetime.fromisoformat(text)
            return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        except ValueError:
            self.refuse(field, "a time such as 2023-11-16 18:15:46.680590", text)

    def number_of(self, field: str, value: object) -> float:
        """A finite number that is not negative."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(field, "a number of at least 0", value)
        if not 0 <= value <= sys.float_info.max:
            self.refuse(field, "a number of at least 0", value)
        return float(value)


def _mooncake_request(line: str, where: _Line) -> Request:
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        where.refuse("the line", "one JSON object", line.strip())
    fields = cast("dict[str, object]", row)
    prompt_tokens = where.tokens("input_length", fields.get("input_length"))
    num_blocks = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    found = fields.get("hash_ids")
    hash_ids = cast("list[object]", found) if isinstance(found, list) else []
    if len(hash_ids) != num_blocks:
        expected = f"a list of {num_blocks} hashes, one for each 512 of {prompt_tokens} tokens"
        where.refuse("hash_ids", expected, fields.get("hash_ids"))
    blocks = [
        where.count(f"hash_ids[{index}]", each, least=0) for index, each in enumerate(hash_ids)
    ]
    last_tokens = prompt_tokens - (num_blocks - 1) * MOONCAKE_BLOCK_TOKENS
    return Request(
        name=str(where.number),
        arrival_s=where.number_of("timestamp", fields.get("timestamp")) / 1000,
        prompt=(
            *(Piece(block, MOONCAKE_BLOCK_TOKENS) for block in blocks[:-1]),
            Piece(blocks[-1], last_tokens),
        ),
        output_tokens=where.tokens("output_length", fields.get("output_length")),
    )
