"""Examine a model: plan it as `jenga plan` does, for the GPUs that are here or for another."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from jenga.doctor.findings import Finding, Section, Status, one_line
from jenga.doctor.machine import Machine
from jenga.models import KvFormat, ModelFacts, ReadOptions, find_model, known_type
from jenga.models.unserved import unserved_features, unserved_format
from jenga.sim.drawing.text import bytes_text
from jenga.sim.hardware.budget import Budget, memory_budget
from jenga.sim.hardware.gpus import Gpu, find_gpu
from jenga.sim.planning.engine_layers import (
    Question,
    declared_model,
    difference_text,
    find_served_model,
    is_installed,
)
from jenga.sim.planning.plan import LENGTHS, Plan, formats_of, plan_model
from jenga.spec import LayerType
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

USUAL_GPU = "H100-80G"
"""Example of a GPU if this machine has none and the user names none."""

_REMOTE_CODE = "auto_map"
"""Configuration field of a model that comes with its own code, which `jenga doctor` never runs."""

FLOAT8_CAPABILITY = 89
"""Compute capability, times ten, of the first GPUs that convert to and from float8_e4m3fn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Result of the examination of a model.

    Attributes:
        plan: Plan of the model; None if the model is refused, does not fit or could not be
            examined.
        findings: Findings about the model.
        is_fit_decided: Whether the findings say if the model fits. They do not if no GPU is known.
        fit_note: Sentences on the GPU that was planned for. Empty if it is the one that is here.
    """

    plan: Plan | None
    findings: tuple[Finding, ...]
    is_fit_decided: bool = True
    fit_note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """GPUs to plan a model for.

    Attributes:
        gpu: Each of them.
        num_gpus: Their number.
        ranks: Tensor-parallel ranks that the user asked for; None for as few as hold the weights.
        has_float8: Whether they convert to and from float8_e4m3fn; None if unknown.
        is_example: Whether the GPU is only an example, because this machine has none.
        is_named: Whether the user named the GPU.
    """

    gpu: Gpu
    num_gpus: int
    ranks: int | None
    has_float8: bool | None
    is_example: bool = False
    is_named: bool = False


def find_target(machine: Machine, *, gpu: Gpu | None = None, ranks: int | None = None) -> Target:
    """Choose the GPUs to plan for: those that the user names, or else those of this machine.

    Args:
        machine: This machine. If its GPUs differ, the one with the least memory counts.
        gpu: GPU that the user names.
        ranks: Tensor-parallel ranks that the user asks for.
    """
    if gpu is not None:
        return Target(
            gpu=gpu, num_gpus=ranks or 1, ranks=ranks, has_float8=gpu.has_float8, is_named=True
        )
    known = [each for each in machine.gpus if each.memory_bytes]
    if not known:
        example = find_gpu(USUAL_GPU)
        return Target(
            gpu=example, num_gpus=ranks or 1, ranks=ranks, has_float8=None, is_example=True
        )
    least = min(known, key=lambda each: each.memory_bytes or 0)
    capabilities = [each.capability for each in known if each.capability is not None]
    return Target(
        gpu=Gpu(name=least.name, memory_bytes=least.memory_bytes or 0),
        num_gpus=len(known),
        ranks=ranks,
        has_float8=min(capabilities) >= FLOAT8_CAPABILITY if capabilities else None,
    )


def examine_model(text: str, target: Target, *, asks_vllm: bool) -> Examined:
    """Plan a model on some GPUs, and ask vLLM's classes for its layers.

    Args:
        text: A folder, a `config.json` or a known name.
        target: The GPUs.
        asks_vllm: Whether to ask vLLM, if it is installed. It takes about 10 s.
    """
    try:
        facts = _find(text, asks_vllm=asks_vllm)
        return _planned(text, facts, target, asks_vllm=asks_vllm)
    except (OSError, RecursionError, ValueError) as error:
        finding = _finding("model", Status.REFUSED, text, one_line(error))
        return Examined(plan=None, findings=(finding,))
    except Exception as error:
        finding = _finding("model", Status.NOTE, f"{text} could not be examined", one_line(error))
        return Examined(plan=None, findings=(finding,))


def _find(text: str, *, asks_vllm: bool) -> ModelFacts:
    """Find a model. If no reader knows it, use vLLM's classes instead, if they may be asked.

    Raises:
        ValueError: The model is not found, or not understood.
    """
    if asks_vllm:
        return find_served_model(text)
    facts = find_model(text)
    if known_type(facts.config) is None:
        model_type = facts.config.as_dict().get("model_type")
        msg = (
            f"no reader is for model_type {model_type!r}, and vLLM's own classes are asked only if "
            f"vLLM is installed and --quick is not given"
        )
        raise ValueError(msg)
    return facts


def _planned(text: str, facts: ModelFacts, target: Target, *, asks_vllm: bool) -> Examined:
    kv_format, model_dtype = formats_of("auto", facts)
    options = ReadOptions(kv_format=kv_format, model_dtype=model_dtype)
    facts.spec(options)  # reports first that the model is not understood, whatever the GPU
    if refused := unserved_features(facts.config):
        msg = f"{BACKEND_NAME} does not support: {'; '.join(each.text() for each in refused)}"
        raise ValueError(msg)
    budget = _budget(facts, target)
    options = replace(options, tensor_parallel=budget.ranks)
    layer_types = facts.spec(options).layer_types
    is_asked = asks_vllm and is_installed() and not facts.model_id
    with ExitStack() as stack:
        question = (
            stack.enter_context(Question(facts.config.as_dict(), options))
            if is_asked and facts.reader is not declared_model
            else None
        )
        findings = list(_memory_findings(facts, target, budget))
        plan = None
        if target.is_example and budget.arena_bytes <= 0:
            findings.append(_finding("model", Status.FINE, f"{facts.name} is understood"))
        else:
            plan = plan_model([facts], arena=budget, options=options, lengths=_lengths(facts))
            findings += _plan_findings(plan, target)
        findings += _cache_findings(kv_format, target)
        if question is not None:
            findings += _declared(facts, layer_types, question)
    return Examined(
        plan=plan,
        findings=tuple(findings),
        is_fit_decided=not target.is_example,
        fit_note=_fit_note(text, target, budget),
    )


def _fit_note(text: str, target: Target, budget: Budget) -> str:
    if target.is_named:
        return f"The model was planned for {target.gpu.name}, as asked."
    if not target.is_example:
        return ""
    ranks = budget.enough_ranks or 1
    command = f"jenga doctor {text} --gpu {target.gpu.name}{f' --tp {ranks}' if ranks > 1 else ''}"
    return (
        f"Whether the model fits is not decided, because no GPU was found on this machine. To "
        f"decide it, name a GPU: `{command}`."
    )


def _budget(facts: ModelFacts, target: Target) -> Budget:
    """Divide the weights over the ranks that were asked for, or else over as few as hold them."""
    weight_bytes = 0 if facts.weight_bytes is None else None
    budget = memory_budget([facts], target.gpu, ranks=target.ranks or 1, weight_bytes=weight_bytes)
    enough = budget.enough_ranks
    if target.ranks is None and enough is not None and enough <= target.num_gpus:
        budget = replace(budget, ranks=enough)
    return budget


def _lengths(facts: ModelFacts) -> tuple[int, ...]:
    """Get the usual request lengths, in tokens, that the model can read; at least one."""
    context_tokens = facts.context_tokens or LENGTHS[-1]
    return tuple(each for each in LENGTHS if each <= context_tokens) or (context_tokens,)


def _memory_findings(facts: ModelFacts, target: Target, budget: Budget) -> Iterator[Finding]:
    gpu = target.gpu.name
    try:
        arena = (
            f"{bytes_text(budget.require_arena())} for caches on each {gpu}, after "
            f"{bytes_text(budget.weight_bytes)} for weights and "
            f"{bytes_text(budget.reserved_bytes)} set aside for activations (assumed)"
        )
    except ValueError as error:
        if not target.is_example:
            raise
        arena = one_line(error)
    if target.is_example:
        yield _finding(
            "memory",
            Status.NOTE,
            "not known, as no GPU was found on this machine",
            f"for example, {arena}",
        )
    else:
        yield _finding("memory", Status.FINE, arena)
    if facts.weight_bytes is None:
        yield _finding(
            "weights", Status.NOTE, "no weights found; planned as if they took no memory"
        )
    elif target.ranks is None and budget.ranks > 1:
        yield _finding(
            "weights",
            Status.NOTE,
            f"too large for one {gpu}; they fit on {budget.ranks}",
            f"start vLLM with --tensor-parallel-size {budget.ranks}",
        )
    if target.ranks is not None and target.ranks > target.num_gpus:
        yield _finding(
            "ranks",
            Status.REFUSED,
            f"{target.ranks} tensor-parallel ranks need as many GPUs, and this machine has "
            f"{target.num_gpus}",
        )


def _plan_findings(plan: Plan, target: Target) -> Iterator[Finding]:
    ours = plan.systems[0]
    name = plan.model.name
    misfit = Status.NOTE if target.is_example else Status.REFUSED
    if ours.refusal:
        yield _finding("model", misfit, name, ours.refusal)
        return
    yield _finding("model", Status.FINE, f"{name} is understood")
    shortest = ours.fits[0]
    if not shortest.num_requests:
        yield _finding(
            "requests",
            misfit,
            f"not even one request of {shortest.num_tokens:,} tokens fits",
            "use a GPU with more memory, or more GPUs",
        )


def _cache_findings(kv_format: KvFormat, target: Target) -> Iterator[Finding]:
    """Report when the model asks for a cache format that is not served."""
    if reason := unserved_format(kv_format, has_float8=target.has_float8):
        yield _finding(
            "cache",
            Status.REFUSED,
            f"the checkpoint asks for keys and values in {kv_format.value}",
            f"{reason}; another --kv-cache-dtype, such as bfloat16, is served",
        )


def _declared(
    facts: ModelFacts, layer_types: Sequence[LayerType], question: Question
) -> Iterator[Finding]:
    """Report whether vLLM's own classes declare the same layers, or refuse the model."""
    answer = question.answer()
    if not isinstance(answer, str):
        different = difference_text(facts, layer_types, answer)
        status = Status.NOTE if different else Status.FINE
        yield _finding(
            "classes",
            status,
            different or "vLLM's own classes declare the same layers",
        )
    elif BACKEND_NAME in answer:
        yield _finding("classes", Status.REFUSED, "refused", answer)
    elif facts.config.names(_REMOTE_CODE):
        yield _finding(
            "classes", Status.NOTE, "could not be asked: the model comes with its own code", answer
        )
    else:
        yield _finding("classes", Status.REFUSED, "vLLM's own classes refuse it", answer)


def _finding(subject: str, status: Status, found: str, advice: str = "") -> Finding:
    return Finding(
        section=Section.MODEL, subject=subject, status=status, found=found, advice=advice
    )
