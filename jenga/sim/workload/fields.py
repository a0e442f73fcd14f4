"""Fields of files that anyone may have written: each is what it must be, or is named."""

import math
from datetime import UTC, datetime
from typing import NoReturn, cast

from jenga.sim.workload.requests import MOST_TOKENS

MOST_NUMBER = 1e15
"""The largest number of a field: more milliseconds than any trace lasts, and sums stay exact."""

SHOWN_CHARS = 80
"""Characters of a wrong value that an error shows."""


class Place:
    """A place in a file, for errors: its path and line, and what leads to a field from there."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __str__(self) -> str:
        return self._where

    def inside(self, field: str) -> "Place":
        """Get the place of a part."""
        return Place(f"{self._where}: {field}")

    def refuse(self, field: str, expected: str, value: object) -> NoReturn:
        """Raise the error for a field that is not what it must be.

        Raises:
            ValueError: Always.
        """
        msg = f"{self._where}: {field} must be {expected}, got {repr(value)[:SHOWN_CHARS]}"
        raise ValueError(msg)

    def count(self, field: str, value: object, *, least: int = 1) -> int:
        """A whole number."""
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(field, f"an integer of at least {least}", value)
        return value

    def tokens(self, field: str, value: object, *, least: int = 1) -> int:
        """Tokens of a prompt, or after it."""
        num_tokens = self.count(field, value, least=least)
        if num_tokens > MOST_TOKENS:
            self.refuse(field, f"at most {MOST_TOKENS}", value)
        return num_tokens

    def digits(self, field: str, text: str, *, least: int = 1) -> int:
        """Tokens in digits."""
        try:
            value: object = int(text)
        except ValueError:
            value = text
        return self.tokens(field, value, least=least)

    def time(self, field: str, text: str) -> datetime:
        """A time of day, in UTC where it names no zone."""
        try:
            found = datetime.fromisoformat(text)
            return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        except ValueError:
            self.refuse(field, "a time such as 2023-11-16 18:15:46.680590", text)

    def number(self, field: str, value: object) -> float:
        """A finite number that is not negative."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(field, "a number of at least 0", value)
        if not value >= 0 or value == math.inf:
            self.refuse(field, "a number of at least 0", value)
        if value > MOST_NUMBER:
            self.refuse(field, f"at most {MOST_NUMBER:g}", value)
        return float(value)

    def decimal(self, field: str, text: str) -> float:
        """A finite number in digits that is not negative."""
        try:
            value: object = float(text)
        except ValueError:
            value = text
        return self.number(field, value)

    def members(self, field: str, value: object) -> dict[str, object]:
        """A JSON object."""
        if not isinstance(value, dict):
            self.refuse(field, "a JSON object", value)
        return cast("dict[str, object]", value)

    def items(self, field: str, value: object) -> list[object]:
        """A JSON list."""
        if not isinstance(value, list):
            self.refuse(field, "a list", value)
        return cast("list[object]", value)
