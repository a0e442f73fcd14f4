"""Check whether vLLM will find the plugin, whether it is selected, and the variables it reads."""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from jenga.doctor.answers import VllmAnswer
from jenga.doctor.findings import Finding, Section, Status, one_line
from jenga.doctor.versions import DISTRIBUTION, own_version
from jenga.vllm_plugin.settings.environment import (
    BACKEND_NAME,
    BACKEND_VARIABLE,
    read_settings,
    selects_backend,
)

GROUP = "vllm.general_plugins"
"""Group of entry points in which vLLM looks for plugins."""

NAME = "jenga"
"""Name of our entry point."""

_PLUGINS_VARIABLE = "VLLM_PLUGINS"
_INTERPRETER_VARIABLE = "TRITON_INTERPRET"


def own_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Get the variables of this package that are set, including unknown names, sorted by name."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("JENGA_") and value.strip()
    }


def plugin_findings(
    environ: Mapping[str, str], *, has_gpu: bool, vllm: VllmAnswer | str | None
) -> Iterator[Finding]:
    """Judge how the plugin is installed and configured.

    Args:
        environ: Variables of the environment.
        has_gpu: Whether kernels would run on a GPU.
        vllm: VLLM's answer, or the reason why there is none; None if it was not asked.
    """
    yield _registered(environ)
    if vllm is not None:
        yield _names(vllm)
    yield _selected(environ)
    yield from _interpreter(environ, has_gpu=has_gpu)
    for name, value in own_settings(environ).items():
        yield _setting(name, value)


def _registered(environ: Mapping[str, str]) -> Finding:
    version = own_version()
    if not list(entry_points(group=GROUP, name=NAME)):
        where = f"{DISTRIBUTION} {version}" if version else f"{DISTRIBUTION} is not installed"
        return _finding(
            "registered",
            Status.REFUSED,
            f"no: {where}; {GROUP} has no entry point {NAME!r}",
            f"vLLM would not know {BACKEND_NAME}; run pip install {DISTRIBUTION}",
        )
    allowed = environ.get(_PLUGINS_VARIABLE)
    if allowed is not None and NAME not in allowed.split(","):  # vLLM does not strip spaces either
        return _finding(
            "registered",
            Status.REFUSED,
            f"as {NAME!r}, but {_PLUGINS_VARIABLE}={allowed!r} leaves it out",
            f"add {NAME!r} to it, or unset it",
        )
    return _finding("registered", Status.FINE, f"as {NAME!r} of {GROUP}, {DISTRIBUTION} {version}")


def _names(vllm: VllmAnswer | str) -> Finding:
    if isinstance(vllm, str):
        return _finding("names", Status.REFUSED, f"vLLM could not be asked: {vllm}")
    if vllm.mismatches:
        return _finding(
            "names",
            Status.REFUSED,
            f"{len(vllm.mismatches)} of {vllm.num_names} replaced names of vLLM are not as "
            f"expected",
            "; ".join(vllm.mismatches),
        )
    if vllm.unknown:
        return _finding(
            "names",
            Status.NOTE,
            f"{len(vllm.unknown)} of {vllm.num_names} replaced names of vLLM could not be compared",
            vllm.unknown[0],
        )
    return _finding(
        "names", Status.FINE, f"all {vllm.num_names} replaced names of vLLM are as expected"
    )


def _selected(environ: Mapping[str, str]) -> Finding:
    value = environ.get(BACKEND_VARIABLE, "").strip()
    try:
        is_selected = selects_backend(environ)
    except ValueError as error:
        return _finding("selected", Status.REFUSED, "no", one_line(error))
    if is_selected:
        return _finding("selected", Status.FINE, f"by {BACKEND_VARIABLE}={value}")
    found = f"not by {BACKEND_VARIABLE}" + (f", which is {value!r}" if value else "")
    advice = f"set it to {BACKEND_NAME}, or start vLLM with --attention-backend {BACKEND_NAME}"
    return _finding("selected", Status.NOTE, found, advice)


def _interpreter(environ: Mapping[str, str], *, has_gpu: bool) -> Iterator[Finding]:
    value = environ.get(_INTERPRETER_VARIABLE, "")
    interprets = value.strip().lower() in {"1", "true", "yes", "on", "y"}
    if interprets and has_gpu:
        yield _finding(
            _INTERPRETER_VARIABLE,
            Status.NOTE,
            value,
            "Triton's interpreter would run the kernels on the CPU, thousands of times slower; "
            "unset it",
        )
    elif interprets:
        yield _finding(
            _INTERPRETER_VARIABLE,
            Status.NOTE,
            value,
            "Triton's interpreter runs the kernels; without it PyTorch references are faster",
        )
    elif not has_gpu:
        yield _finding(
            _INTERPRETER_VARIABLE,
            Status.FINE,
            f"{repr(value) if value else 'not set'}: PyTorch references compute attention and "
            f"states",
        )


def _setting(name: str, value: str) -> Finding:
    try:
        read_settings({name: value})
    except ValueError as error:
        return _finding(name, Status.REFUSED, value, one_line(error))
    return _finding(name, Status.FINE, value)


def _finding(subject: str, status: Status, found: str, advice: str = "") -> Finding:
    return Finding(
        section=Section.PLUGIN, subject=subject, status=status, found=found, advice=advice
    )
