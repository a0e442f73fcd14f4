"""Findings: one examined thing each, and whether it would keep an engine from starting."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """Effect of a finding on an engine that serves on JENGA_TRITON."""

    FINE = "fine"
    NOTE = "note"
    """An engine would serve, but a reader should know this."""
    REFUSED = "refused"
    """An engine would not start, or would fail at its first step."""


class Section(Enum):
    """Section of the report."""

    MACHINE = "machine"
    PACKAGES = "packages"
    PLUGIN = "plugin"
    TRIALS = "trials"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was examined.

    Attributes:
        section: Section of the report that lists it.
        subject: Name of the thing, such as "vLLM" or "GPU 0".
        status: Effect on an engine.
        found: State of the thing on this machine.
        advice: Consequence and remedy; empty if there is nothing to say.
    """

    section: Section
    subject: str
    status: Status
    found: str
    advice: str = ""


def looked_at(
    section: Section, subject: str, look: Callable[[], Iterable[Finding]]
) -> list[Finding]:
    """Get the findings of one check. If the check itself fails, that becomes a finding.

    Args:
        section: Section of the report for a failed check.
        subject: Subject of the finding for a failed check.
        look: Function that returns the findings.
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
    """Get the message of an error in one line, or the error's type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
