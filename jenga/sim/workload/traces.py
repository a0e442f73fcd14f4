"""Requests from traces of real traffic, read line by line.

Every reader takes a path and yields requests in the order of their arrival. A line in another
format is an error that names file, line and field.
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import cast

from jenga.sim.files.lines import lines_of
from jenga.sim.workload.fields import Place
from jenga.sim.workload.requests import Piece, Request

MOONCAKE_BLOCK_TOKENS = 512
"""Number of tokens of one hash in a Mooncake trace."""

_SHOWN = 80


def read_mooncake(path: Path) -> Iterator[Request]:
    """Read the requests of a Mooncake trace.

    A hash names a block of 512 tokens and everything before it, so prompts share a prefix as far as
    their hashes are equal. The trace does not identify generated tokens. A later prompt may contain
    them under hashes of its own, and they are then computed again.

    Args:
        path: JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    Raises:
        ValueError: A line is not in this format. The message names file, line and field.

    Source: Mooncake (FAST 2025), traces of kvcache-ai/Mooncake.
    """
    for number, line in enumerate(lines_of(path), start=1):
        if line.strip():
            yield _mooncake_request(line, number, Place(f"{path}:{number}"))


def read_azure(path: Path) -> Iterator[Request]:
    """Read the requests of an Azure trace: times and lengths, without shared prefixes.

    The trace does not record which prompts share a prefix.

    Args:
        path: CSV of `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. A time without a time zone is
            in UTC.

    Raises:
        ValueError: A line is not in this format. The message names file, line and field.

    Source: AzureLLMInferenceTrace of Azure/AzurePublicDataset, with Splitwise (ISCA 2024).
    """
    first: datetime | None = None
    for number, where, row in _csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        arrival = where.time("TIMESTAMP", row["TIMESTAMP"])
        first = first or arrival
        if arrival < first:
            where.refuse("TIMESTAMP", f"no earlier than {first} of the first line", str(arrival))
        yield Request(
            name=str(number),
            arrival_s=(arrival - first).total_seconds(),
            prompt=(Piece(f"{number}", where.digits("ContextTokens", row["ContextTokens"])),),
            output_tokens=where.digits("GeneratedTokens", row["GeneratedTokens"]),
        )


def read_burstgpt(path: Path) -> Iterator[Request]:
    """Read the requests of a BurstGPT trace: times and lengths, without shared prefixes.

    The trace does not record which prompts share a prefix. A failed request has no response tokens.
    It is skipped, because it was never served.

    Args:
        path: CSV of `Timestamp` (seconds), `Request tokens` and `Response tokens`. Other columns
            are ignored.

    Raises:
        ValueError: A line is not in this format. The message names file, line and field.

    Source: BurstGPT (arXiv 2401.17644), HPMLL/BurstGPT.
    """
    first_s: float | None = None
    columns = ("Timestamp", "Request tokens", "Response tokens")
    for number, where, row in _csv_rows(path, columns):
        time_s = where.decimal("Timestamp", row["Timestamp"])
        prompt_tokens = where.digits("Request tokens", row["Request tokens"], least=0)
        output_tokens = where.digits("Response tokens", row["Response tokens"], least=0)
        if not prompt_tokens or not output_tokens:
            continue
        first_s = time_s if first_s is None else first_s
        if time_s < first_s:
            where.refuse("Timestamp", f"at least {first_s:g}, that of the first line", time_s)
        yield Request(
            name=str(number),
            arrival_s=time_s - first_s,
            prompt=(Piece(f"{number}", prompt_tokens),),
            output_tokens=output_tokens,
        )


LENGTH_COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("prompt_len", "output_len"),
    ("input_length", "output_length"),
)
"""Possible names of the two columns of lengths, in files that have only lengths."""


def read_lengths(path: Path, *, arrivals_per_s: float = 0.0, seed: int = 0) -> Iterator[Request]:
    """Read requests from a file of lengths, such as those of ShareGPT or of arXiv's articles.

    Args:
        path: CSV with one of the pairs of `LENGTH_COLUMNS`. Other columns are ignored.
        arrivals_per_s: Requests a second, at random; 0 for all at once.
        seed: Seed of the arrivals.

    Raises:
        ValueError: A line is not in this format. The message names file, line and field.

    Source: the lengths published with microsoft/vidur.
    """
    draw = random.Random(seed)
    arrival_s = 0.0
    columns = _length_columns(path)
    for number, where, row in _csv_rows(path, columns):
        prompt_tokens, output_tokens = (where.digits(column, row[column]) for column in columns)
        yield Request(
            name=str(number),
            arrival_s=arrival_s,
            prompt=(Piece(f"{number}", prompt_tokens),),
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
    msg = f"{path}:1: columns must be {pairs}, got {','.join(names)[:_SHOWN]!r}"
    raise ValueError(msg)


def header_of(path: Path) -> list[str]:
    """Return the names in the first line of a CSV file.

    Raises:
        ValueError: The line is not CSV.
    """
    _, names = next(_cells(path), (1, list[str]()))
    return names


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a CSV file with their numbers."""
    reader = csv.reader(lines_of(path))
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        msg = f"{path}:{reader.line_num}: the line must be CSV: {error}"
        raise ValueError(msg) from error


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Place, dict[str, str]]]:
    """Yield the lines of a CSV file with a header: number, place, and cells by column."""
    lines = _cells(path)
    _, names = next(lines, (1, list[str]()))
    missing = [column for column in columns if column not in names]
    if missing:
        msg = f"{path}:1: columns must have {missing[0]}, got {','.join(names)[:_SHOWN]!r}"
        raise ValueError(msg)
    for number, cells in lines:
        if cells:
            where = Place(f"{path}:{number}")
            if len(cells) != len(names):
                where.refuse("the line", f"{len(names)} columns", ",".join(cells))
            yield number, where, dict(zip(names, cells, strict=True))


def _mooncake_request(line: str, number: int, where: Place) -> Request:
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
        name=str(number),
        arrival_s=where.number("timestamp", fields.get("timestamp")) / 1000,
        prompt=(
            *(Piece(block, MOONCAKE_BLOCK_TOKENS) for block in blocks[:-1]),
            Piece(blocks[-1], last_tokens),
        ),
        output_tokens=where.tokens("output_length", fields.get("output_length")),
    )
