"""Requests from traces of real traffic, read line by line.

Every reader takes a path and yields requests in the order of their arrival; a line that is not what
the format says is an error that names file, line and field.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, cast

from jenga.sim.workload import Piece, Request

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
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _mooncake_request(line, _Line(path, number))


class _Line:
    """Where a line is, for errors."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self._where = f"{path}:{number}"

    def refuse(self, field: str, expected: str, value: object) -> NoReturn:
        """Raise the error for a field that is not what it must be."""
        msg = f"{self._where}: {field} must be {expected}, got {value!r}"
        raise ValueError(msg)

    def count(self, field: str, value: object, *, least: int = 1) -> int:
        """A whole number."""
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(field, f"an integer of at least {least}", value)
        return value

    def number_of(self, field: str, value: object) -> float:
        """A number that is not negative."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            self.refuse(field, "a number of at least 0", value)
        return float(value)


def _mooncake_request(line: str, where: _Line) -> Request:
    try:
        row: object = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        where.refuse("the line", "one JSON object", line.strip()[:60])
    fields = cast("dict[str, object]", row)
    prompt_tokens = where.count("input_length", fields.get("input_length"))
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
        output_tokens=where.count("output_length", fields.get("output_length")),
    )
