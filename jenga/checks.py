"""Checks of numbers that callers pass, with the same error messages everywhere.

Types are checked too. A float that counts tokens, or NaN, would pass comparisons and corrupt the
manager's counts later.
"""

import math


def check_count(name: str, value: object, *, least: int = 0) -> None:
    """Refuse a value that is not an integer of at least `least`. True and False are refused too.

    Args:
        name: Name of the value in the message.
        value: Value to check.
        least: Lowest value that is accepted.

    Raises:
        ValueError: The message has the name, the bound and the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"at least {least} and an integer"
        msg = f"{name} must be {wanted}, got {value!r}"
        raise ValueError(msg)


def check_positive(owner: str, field: str, value: object) -> None:
    """Refuse a value that is not a positive integer.

    Raises:
        ValueError: The message has the owner, the field and the value.
    """
    check_count(f"{owner}: {field}", value, least=1)


def check_multiple(name: str, value: object, *, unit_name: str, unit: int) -> None:
    """Refuse a value that is neither 0 nor a positive multiple of `unit`. False is refused too.

    Raises:
        ValueError: The message has the names, the unit and the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value % unit:
        msg = f"{name} must be 0 or a multiple of {unit_name}, {unit}, got {value!r}"
        raise ValueError(msg)


def check_bytes(name: str, value: object) -> None:
    """Refuse a value that is not bytes.

    Raises:
        ValueError: The message has the name and the value.
    """
    if not isinstance(value, bytes):
        msg = f"{name} must be bytes, got {value!r}"
        raise ValueError(msg)  # noqa: TRY004  every mistake of a caller is one kind of error


def check_number(name: str, value: object, *, below: float = math.inf) -> None:
    """Refuse a value that is not a number of at least 0 and less than `below`, such as NaN.

    Raises:
        ValueError: The message has the name, the bounds and the value.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < below:
        bounds = (
            "finite and not negative"
            if below == math.inf
            else f"at least 0 and less than {below:g}"
        )
        msg = f"{name} must be {bounds}, got {value!r}"
        raise ValueError(msg)
