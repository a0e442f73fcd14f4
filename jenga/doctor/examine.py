"""Examine everything, section by section. A check that fails becomes a finding."""

from collections.abc import Mapping

from jenga.doctor.answers import Questions, TorchAnswer
from jenga.doctor.findings import Finding, Section, looked_at
from jenga.doctor.machine import find_machine, machine_findings
from jenga.doctor.model import examine_model, find_target
from jenga.doctor.plugin import own_settings, plugin_findings
from jenga.doctor.report import Report
from jenga.doctor.trials import find_trials, trial_findings
from jenga.doctor.versions import find_packages, import_findings, own_version, package_findings
from jenga.sim.hardware.gpus import Gpu
from jenga.vllm_plugin.trials.kept_trials import KeptTrial


def examine(
    environ: Mapping[str, str],
    *,
    model: str | None,
    imports: bool,
    gpu: Gpu | None = None,
    ranks: int | None = None,
) -> Report:
    """Examine this machine, and a model if one is named.

    Args:
        environ: Variables of the environment.
        model: A folder, a `config.json` or a known name; None for no model.
        imports: Whether to import torch and vLLM, in separate processes, and to ask vLLM for the
            layers of a model folder. It takes about 10 s.
        gpu: GPU to plan the model for; None for those of this machine.
        ranks: Tensor-parallel ranks of the model; None for as few as hold its weights.
    """
    packages = find_packages()
    has_torch = packages["torch"] is not None and packages["triton"] is not None
    has_vllm = has_torch and packages["vllm"] is not None
    with Questions(asks_torch=imports and has_torch, asks_vllm=imports and has_vllm) as questions:
        machine = find_machine()
        asks_vllm = imports and has_vllm
        examined = None
        if model is not None:
            target = find_target(machine, gpu=gpu, ranks=ranks)
            examined = examine_model(model, target, asks_vllm=asks_vllm)
        torch, vllm = questions.torch(), questions.vllm()

    package, triton = packages["torch"], packages["triton"]
    seen = torch if isinstance(torch, TorchAnswer) else None
    findings = looked_at(
        Section.MACHINE, "GPU", lambda: machine_findings(machine, package=package, torch=seen)
    )
    findings += looked_at(Section.PACKAGES, "packages", lambda: package_findings(packages))
    findings += looked_at(Section.PACKAGES, "import", lambda: import_findings(torch))
    has_gpu = bool(machine.gpus or machine.trouble) and (package is None or bool(package.cuda))
    findings += looked_at(
        Section.PLUGIN, "plugin", lambda: plugin_findings(environ, has_gpu=has_gpu, vllm=vllm)
    )
    trials: dict[str, list[KeptTrial]] = {}

    def look_at_trials() -> list[Finding]:
        trials.update(find_trials(machine, triton.version if triton else None))
        return list(trial_findings(machine, trials))

    findings += looked_at(Section.TRIALS, "trials", look_at_trials)
    if examined is not None:
        findings += examined.findings
    return Report(
        version=own_version(),
        findings=tuple(findings),
        machine=machine,
        packages=packages,
        settings=own_settings(environ),
        trials=trials,
        plan=None if examined is None else examined.plan,
        is_fit_decided=examined is None or examined.is_fit_decided,
        fit_note="" if examined is None else examined.fit_note,
    )
