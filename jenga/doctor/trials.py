"""Report the stored verdicts of trials of specialised kernels on this machine. No trial is run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from jenga.doctor.findings import Finding, Section, Status
from jenga.doctor.machine import HOPPER, Machine, distinct_names
from jenga.vllm_plugin.trials.kept_trials import KeptTrial, kept_trials, trials_folder

_SEVERAL = "kernels for one kind of GPU"


def find_trials(machine: Machine, triton_version: str | None) -> dict[str, list[KeptTrial]]:
    """Get the stored verdicts for the GPUs with specialised kernels, by the GPU's name.

    Args:
        machine: This machine.
        triton_version: Version of the installed Triton. None means it is not installed; then
            there are no verdicts.

    Raises:
        ValueError: The folder of the verdicts is unknown.
        OSError: The sources of the kernels cannot be read.
    """
    if triton_version is None:
        return {}
    return {
        name: list(kept_trials(trials_folder(name, triton_version)))
        for name in distinct_names(machine.gpus)
    }


def trial_findings(machine: Machine, trials: Mapping[str, list[KeptTrial]]) -> Iterator[Finding]:
    """Report the results of trials, one finding per operation.

    Args:
        machine: This machine.
        trials: Verdicts, as `find_trials` returns them.
    """
    if not machine.gpus:
        yield _finding(_SEVERAL, Status.FINE, "no trials: this machine has no GPU")
    elif not any(gpu.capability == HOPPER for gpu in machine.gpus):
        yield _finding(_SEVERAL, Status.FINE, "none for this GPU; the generic kernels serve")
    for name, verdicts in trials.items():
        if not verdicts:
            yield _finding(
                _SEVERAL,
                Status.FINE,
                f"none tried on {name} yet",
                "the first engine runs the trials of those that its layers can use; python -m "
                "jenga_kernels.trials runs them without an engine",
            )
        by_operation: defaultdict[str, list[KeptTrial]] = defaultdict(list)
        for verdict in verdicts:
            by_operation[verdict.operation].append(verdict)
        for operation, of_one in sorted(by_operation.items()):
            yield _operation_finding(operation, of_one)


def _operation_finding(operation: str, verdicts: list[KeptTrial]) -> Finding:
    failed = [each for each in verdicts if not each.is_passed]
    calls = f"{len(verdicts)} call{'s' if len(verdicts) != 1 else ''}"
    if not failed:
        return _finding(operation, Status.FINE, f"passed, {calls}")
    first = failed[0]
    advice = "the generic kernels serve instead, which may be slower"
    if first.is_final:
        advice += f"; the trial is repeated once {first.file} is removed"
    else:
        advice += "; the next start of an engine repeats the trial"
    return _finding(
        operation,
        Status.NOTE,
        f"not passed, {len(failed)} of {calls}: {first.reason}",
        advice,
    )


def _finding(subject: str, status: Status, found: str, advice: str = "") -> Finding:
    return Finding(
        section=Section.TRIALS, subject=subject, status=status, found=found, advice=advice
    )
