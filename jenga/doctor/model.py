"""Examine a model on this machine: plan it as `jenga plan` does, for the GPUs that are here."""

from collections.abc import Iterator
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
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

USUAL_GPU = "H100-80G"
"""GPU to plan for if this machine has none, as in `jenga plan`."""

_REMOTE_CODE = "auto_map"
"""Configuration field of a model that comes with its own code, which `jenga doctor` never runs."""

FLOAT8_CAPABILITY = 89
"""Compute capability, times ten, of the first GPUs that convert to and from float8_e4m3fn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Result of the examination of a model.

    Attributes:
        plan: Plan of the model; None if the model is refused or could not be examined.
        findings: Findings about the model.
    """

    plan: Plan | None
    findings: tuple[Finding, ...]


def examine_model(text: str, machine: Machine, *, asks_vllm: bool) -> Examined:
    """Plan a model on the GPUs of a machine, and ask vLLM's classes for its layers.

    Args:
        text: A folder, a `config.json` or a known name.
        machine: This machine.
        asks_vllm: Whether to ask vLLM, if it is installed. It takes about 10 s.
    """
    try:
        facts = _find(text, asks_vllm=asks_vllm)
        plan, findings = _planned(facts, machine, asks_vllm=asks_vllm)
    except (OSError, RecursionError, ValueError) as error:
        finding = _finding("model", Status.REFUSED, text, one_line(error))
        return Examined(plan=None, findings=(finding,))
    except Exception as error:
        finding = _finding("model", Status.NOTE, f"{text} could not be examined", one_line(error))
        return Examined(plan=None, findings=(finding,))
    return Examined(plan=plan, findings=tuple(findings))


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


def _planned(facts: ModelFacts, machine: Machine, *, asks_vllm: bool) -> tuple[Plan, list[Finding]]:
    kv_format, model_dtype = formats_of("auto", facts)
    options = ReadOptions(kv_format=kv_format, model_dtype=model_dtype)
    facts.spec(options)  # reports first that the model is not understood, whatever the GPU
    if refused := unserved_features(facts.config):
        msg = f"{BACKEND_NAME} does not support: {'; '.join(each.text() for each in refused)}"
        raise ValueError(msg)
    budget = _budget(facts, machine)
    options = replace(options, tensor_parallel=budget.ranks)
    is_asked = asks_vllm and is_installed() and not facts.model_id
    with ExitStack() as stack:
        question = (
            stack.enter_context(Question(facts.config.as_dict(), options))
            if is_asked and facts.reader is not declared_model
            else None
        )
        plan = plan_model([facts], arena=budget, options=options, lengths=_lengths(facts))
        findings = [*_memory_findings(facts, machine, budget), *_plan_findings(plan)]
        findings += _cache_findings(kv_format, machine)
        if question is not None:
            findings += _declared(facts, plan, question)
    return plan, findings


def _budget(facts: ModelFacts, machine: Machine) -> Budget:
    """Divide the weights over as few of this machine's GPUs as can hold them."""
    gpu, num_gpus = _gpu(machine)
    weight_bytes = 0 if facts.weight_bytes is None else None
    budget = memory_budget([facts], gpu, weight_bytes=weight_bytes)
    enough = budget.enough_ranks
    if budget.arena_bytes <= 0 and enough is not None and enough <= num_gpus:
        budget = replace(budget, ranks=enough)
    return budget


def _gpu(machine: Machine) -> tuple[Gpu, int]:
    """Get the GPU to plan for, the one with the least memory, and the number of GPUs."""
    known = [each for each in machine.gpus if each.memory_bytes]
    if not known:
        return find_gpu(USUAL_GPU), 1
    least = min(known, key=lambda each: each.memory_bytes or 0)
    return Gpu(name=least.name, memory_bytes=least.memory_bytes or 0), len(known)


def _lengths(facts: ModelFacts) -> tuple[int, ...]:
    """Get the usual request lengths, in tokens, that the model can read; at least one."""
    context_tokens = facts.context_tokens or LENGTHS[-1]
    return tuple(each for each in LENGTHS if each <= context_tokens) or (context_tokens,)


def _memory_findings(facts: ModelFacts, machine: Machine, budget: Budget) -> Iterator[Finding]:
    gpu = budget.gpu.name
    arena = (
        f"{bytes_text(budget.arena_bytes)} for caches on each {gpu}, after "
        f"{bytes_text(budget.weight_bytes)} for weights and {bytes_text(budget.reserved_bytes)} "
        f"set aside for activations (assumed)"
    )
    if not machine.gpus:
        yield _finding(
            "memory", Status.NOTE, arena, "this machine has no GPU, so this one is assumed"
        )
    elif budget.arena_bytes > 0:
        yield _finding("memory", Status.FINE, arena)
    if facts.weight_bytes is None:
        yield _finding(
            "weights", Status.NOTE, "no weights found; planned as if they took no memory"
        )
    elif budget.ranks > 1:
        yield _finding(
            "weights",
            Status.NOTE,
            f"too large for one {gpu}; they fit on {budget.ranks}",
            f"start vLLM with --tensor-parallel-size {budget.ranks}",
        )


def _plan_findings(plan: Plan) -> Iterator[Finding]:
    ours = plan.systems[0]
    name = plan.model.name
    if ours.refusal:
        yield _finding("model", Status.REFUSED, name, ours.refusal)
        return
    yield _finding("model", Status.FINE, f"{name} is understood")
    shortest = ours.fits[0]
    if not shortest.num_requests:
        yield _finding(
            "requests",
            Status.REFUSED,
            f"not even one request of {shortest.num_tokens:,} tokens fits",
            "use a GPU with more memory, or more GPUs",
        )


def _cache_findings(kv_format: KvFormat, machine: Machine) -> Iterator[Finding]:
    """Report when the model asks for a cache format that is not served here."""
    known = [each.capability for each in machine.gpus if each.capability is not None]
    has_float8 = min(known) >= FLOAT8_CAPABILITY if known else None
    if reason := unserved_format(kv_format, has_float8=has_float8):
        yield _finding(
            "cache",
            Status.REFUSED,
            f"the checkpoint asks for keys and values in {kv_format.value}",
            f"{reason}; another --kv-cache-dtype, such as bfloat16, is served",
        )


def _declared(facts: ModelFacts, plan: Plan, question: Question) -> Iterator[Finding]:
    """Report whether vLLM's own classes declare the same layers, or refuse the model."""
    answer = question.answer()
    if not isinstance(answer, str):
        different = difference_text(facts, plan.model.layer_types, answer)
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
