"""One thing that was looked at, and whether it would keep an engine from starting."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """Effect of a finding on an engine that serves on JENGA_TRITON."""

    FINE = "fine"
    NOTE = "note"
    """Served, or nothing to do with serving; a reader should know."""
    REFUSED = "refused"
    """An engine would not start, or would fail at its first step."""


class Section(Enum):
    """Part of the report that a finding stands in."""

    MACHINE = "machine"
    PACKAGES = "packages"
    PLUGIN = "plugin"
    TRIALS = "trials"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        section: Part of the report that it stands in.
        subject: Name of the thing, such as "vLLM" or "gpu 0".
        status: Effect on an engine.
        found: The thing as it is on this machine.
        advice: Consequence, and the way out; empty where the thing is as it should be.
    """

    section: Section
    subject: str
    status: Status
    found: str
    advice: str = ""


def looked_at(
    section: Section, subject: str, look: Callable[[], Iterable[Finding]]
) -> list[Finding]:
    """Get the findings of one look; a failure of the look is a finding too, and no traceback.

    Args:
        section: Part of the report for a failure.
        subject: Name for a failure.
        look: Returns the findings.
    """
    try:
        return list(look())
    except Exception as error:
        return [
            Finding(
                section=section,
                subject=subject,
                status=Status.NOTE,
                found=f"could not be examined: {one_line(error)}",
            )
        ]


def one_line(error: BaseException) -> str:
    """Get the message of an error in one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
