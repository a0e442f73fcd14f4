"""The report of `jenga doctor`, as text for people and as JSON for programs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from jenga.doctor.findings import Finding, Section, Status
from jenga.doctor.machine import Machine
from jenga.doctor.versions import DISTRIBUTION, Package
from jenga.sim.drawing.text import wrapped
from jenga.sim.planning.plan import Plan
from jenga.sim.planning.plan_text import WIDTH, geometry_text, plan_json, types_text
from jenga.vllm_plugin.trials.kept_trials import KeptTrial

SCHEMA = 1
"""Version of the JSON's schema.

It changes when a field is renamed, removed or given another meaning, and not when one is added.
"""

_TITLES = {
    Section.MACHINE: "Machine",
    Section.PACKAGES: "Packages",
    Section.PLUGIN: "Plugin",
    Section.TRIALS: "Trials of kernels",
    Section.MODEL: "Model",
}

_WORDS = {Status.FINE: "ok", Status.NOTE: "note", Status.REFUSED: "REFUSED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was found.

    Attributes:
        version: Version of this package; empty if it is on the path but not installed.
        findings: All findings, section by section.
        machine: The machine.
        packages: Packages by name; None for a missing one.
        settings: Environment variables of this package that are set.
        trials: Stored verdicts of trials, by the GPU's name.
        plan: Plan of the model; None if no model was named, or the model is refused.
        is_fit_decided: Whether the findings say if the model fits.
        fit_note: Sentences on the GPU that the model was planned for. Often empty.
    """

    version: str
    findings: tuple[Finding, ...]
    machine: Machine
    packages: Mapping[str, Package | None]
    settings: Mapping[str, str]
    trials: Mapping[str, list[KeptTrial]]
    plan: Plan | None
    is_fit_decided: bool = True
    fit_note: str = ""

    @property
    def refused(self) -> tuple[Finding, ...]:
        """Findings that would keep an engine from serving."""
        return tuple(each for each in self.findings if each.status is Status.REFUSED)


def report_text(report: Report) -> str:
    """Return the report as text, for a terminal."""
    parts = [f"{DISTRIBUTION} {report.version or '(not installed)'} on {report.machine.system}"]
    for section, findings in groupby(report.findings, key=lambda each: each.section):
        parts.append("\n".join([_TITLES[section], *_lines(list(findings))]))
    if report.plan is not None:
        parts.append(_plan_text(report.plan))
    parts.append(_verdict(report))
    return "\n\n".join(parts)


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(each.subject) for each in findings)
    lines: list[str] = []
    for each in findings:
        head = f"  {_WORDS[each.status]:7}  {each.subject:{width}}  "
        said = f"{each.found}: {each.advice}" if each.advice else each.found
        first, *rest = wrapped(said, width=WIDTH - len(head))
        lines += [head + first, *(" " * len(head) + line for line in rest)]
    return lines


def _plan_text(plan: Plan) -> str:
    lines = [types_text(plan), "", geometry_text(plan)]
    ours = plan.systems[0]
    fits = [f"{fit.num_requests:,} of {fit.num_tokens:,} tokens" for fit in ours.fits]
    longest = "no limit" if ours.longest_tokens is None else f"{ours.longest_tokens:,} tokens"
    if fits:
        where = "" if plan.budget is None else f" on {plan.budget.ranks} x {plan.budget.gpu.name}"
        text = (
            f"Requests that fit at once{where}: {', or '.join(fits)}. Longest request alone: "
            f"{longest}."
        )
        lines += ["", *wrapped(text, width=WIDTH)]
    lines += wrapped("`jenga plan` shows more, and compares with vLLM's planner.", width=WIDTH)
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    text = "No finding prevents an engine from serving on JENGA_TRITON."
    if report.refused:
        names = ", ".join(each.subject for each in report.refused)
        text = f"An engine on JENGA_TRITON would not serve here: {names}."
    return "\n".join(wrapped(f"{text} {report.fit_note}".rstrip(), width=WIDTH))


def report_json(report: Report) -> str:
    """Return the report as JSON, of version `SCHEMA`."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "version": report.version,
            "serves": not report.refused,
            "is_fit_decided": report.is_fit_decided,
            "findings": [
                {
                    "section": each.section.value,
                    "subject": each.subject,
                    "status": each.status.value,
                    "found": each.found,
                    "advice": each.advice,
                }
                for each in report.findings
            ],
            "machine": asdict(report.machine) | {"driver": report.machine.driver},
            "packages": {
                name: None if package is None else asdict(package)
                for name, package in report.packages.items()
            },
            "settings": dict(report.settings),
            "trials": {
                gpu: [asdict(each) | {"file": str(each.file)} for each in verdicts]
                for gpu, verdicts in report.trials.items()
            },
            "model": None if report.plan is None else json.loads(plan_json(report.plan)),
        },
        indent=2,
    )
