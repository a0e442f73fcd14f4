"""Fields of untrusted files: each one is checked, or an error names it."""

import math
from datetime import UTC, datetime
from typing import NoReturn, cast

from jenga.sim.workload.requests import MOST_TOKENS

MOST_NUMBER = 1e15
"""Largest number of a field: more milliseconds than any trace lasts, and sums stay exact."""

SHOWN_CHARS = 80
"""Most characters of a wrong value that an error shows."""


class Place:
    """A place in a file, for error messages: path and line, and the fields that lead to a field."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __str__(self) -> str:
        return self._where

    def inside(self, field: str) -> "Place":
        """Return the place of a field inside this place."""
        return Place(f"{self._where}: {field}")

    def refuse(self, field: str, expected: str, value: object) -> NoReturn:
        """Raise the error for a field with a wrong value.

        Raises:
            ValueError: Always.
        """
        msg = f"{self._where}: {field} must be {expected}, got {repr(value)[:SHOWN_CHARS]}"
        raise ValueError(msg)

    def count(self, field: str, value: object, *, least: int = 1) -> int:
        """Return the value if it is an integer of at least `least`."""
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(field, f"an integer of at least {least}", value)
        return value

    def tokens(self, field: str, value: object, *, least: int = 1) -> int:
        """Return the value if it is a possible number of tokens of a prompt or an output."""
        num_tokens = self.count(field, value, least=least)
        if num_tokens > MOST_TOKENS:
            self.refuse(field, f"at most {MOST_TOKENS}", value)
        return num_tokens

    def digits(self, field: str, text: str, *, least: int = 1) -> int:
        """Read a number of tokens from decimal digits."""
        try:
            value: object = int(text)
        except ValueError:
            value = text
        return self.tokens(field, value, least=least)

    def time(self, field: str, text: str) -> datetime:
        """Read a date and time. It is taken as UTC if it names no time zone."""
        try:
            found = datetime.fromisoformat(text)
            return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        except ValueError:
            self.refuse(field, "a time such as 2023-11-16 18:15:46.680590", text)

    def number(self, field: str, value: object) -> float:
        """Return the value if it is a finite number that is not negative."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(field, "a number of at least 0", value)
        if not value >= 0 or value == math.inf:
            self.refuse(field, "a number of at least 0", value)
        if value > MOST_NUMBER:
            self.refuse(field, f"at most {MOST_NUMBER:g}", value)
        return float(value)

    def decimal(self, field: str, text: str) -> float:
        """Read a finite number that is not negative from a decimal text."""
        try:
            value: object = float(text)
        except ValueError:
            value = text
        return self.number(field, value)

    def members(self, field: str, value: object) -> dict[str, object]:
        """Return the value if it is a JSON object."""
        if not isinstance(value, dict):
            self.refuse(field, "a JSON object", value)
        return cast("dict[str, object]", value)

    def items(self, field: str, value: object) -> list[object]:
        """Return the value if it is a JSON list."""
        if not isinstance(value, list):
            self.refuse(field, "a list", value)
        return cast("list[object]", value)
