"""Versions of the packages that an engine needs, read from their files without importing them."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from jenga.doctor.answers import TorchAnswer
from jenga.doctor.findings import Finding, Section, Status
from jenga.vllm_plugin.patches.patch import SUPPORTED_VERSIONS, series_of

DISTRIBUTION = "jenga-kv"

PACKAGES = ("vllm", "torch", "triton")
"""Packages that an engine imports, without the dependencies that they install."""

LEAST_VERSIONS = {"torch": (2, 11), "triton": (3, 6)}
"""Oldest supported release of a package, as in the extra `kernels` of pyproject.toml."""

TESTED_VERSIONS = {"torch": (2, 13), "triton": (3, 7)}
"""Newest release of a package that tests ran on; see the Makefile."""

PYTHONS = ((3, 11), (3, 14))
"""Oldest and newest supported release of Python, as in pyproject.toml."""

_INSTALL = f"pip install '{DISTRIBUTION}[vllm]' installs it; for CPUs see docs/install.md"

_VERSION_FILES = ("_version.py", "version.py", "__init__.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed package.

    Attributes:
        version: Version with the local part; empty if the files do not say it.
        cuda: Version of CUDA that torch is built with; None for other packages and builds.
        hip: Version of AMD's HIP that torch is built with; None for other packages and builds.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None


def find_packages() -> dict[str, Package | None]:
    """Find the packages that an engine needs, by name; None for a missing one."""
    return {name: _find(name) for name in PACKAGES}


def _find(name: str) -> Package | None:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    for file in _VERSION_FILES:
        values = _strings(folder / file, {"__version__", "cuda", "hip"})
        if "__version__" in values:
            return Package(
                version=values["__version__"], cuda=values.get("cuda"), hip=values.get("hip")
            )
    try:
        return Package(version=version(name))
    except PackageNotFoundError:
        return Package(version="")


def _strings(file: Path, names: set[str]) -> dict[str, str]:
    """Get the strings that a Python file assigns to these names at its top level."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for target in targets:
                if isinstance(target, ast.Name) and target.id in names:
                    found[target.id] = node.value.value
    return found


def own_version() -> str:
    """Get the version of this package; empty if it is on the path but not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def package_findings(packages: Mapping[str, Package | None]) -> Iterator[Finding]:
    """Judge the versions of Python and of the packages.

    Args:
        packages: Packages, as `find_packages` returns them.
    """
    yield python_finding(sys.version_info[:3])
    for name in PACKAGES:
        package = packages[name]
        if package is None:
            yield _finding(name, Status.REFUSED, "not installed", _INSTALL)
        elif not package.version:
            yield _finding(name, Status.NOTE, "unknown version", f"expected {_expected(name)}")
        else:
            yield _version_finding(name, package)


def import_findings(torch: TorchAnswer | str | None) -> Iterator[Finding]:
    """Report when torch or Triton is installed but cannot be imported.

    Args:
        torch: Torch's answer, or the reason why there is none; None if it was not asked.
    """
    if isinstance(torch, str):
        yield _finding("import", Status.REFUSED, "torch and Triton cannot be imported", torch)


def python_finding(version: tuple[int, int, int]) -> Finding:
    """Judge a version of Python."""
    least, greatest = PYTHONS
    found = f"{'.'.join(map(str, version))}, {sys.executable}"
    if least <= version[:2] <= greatest:
        return _finding("python", Status.FINE, found)
    expected = " to ".join(".".join(map(str, each)) for each in PYTHONS)
    return _finding("python", Status.REFUSED, found, f"expected {expected}")


def _version_finding(name: str, package: Package) -> Finding:
    found = package.version
    if name == "torch":
        found += ", for " + (_toolkit(package) or "CPUs")
        if package.hip:
            advice = "the kernels run on NVIDIA GPUs only; AMD GPUs are refused"
            return _finding(name, Status.REFUSED, found, advice)
    if not _is_served(name, package.version):
        return _finding(name, Status.REFUSED, found, f"expected {_expected(name)}")
    release, tested = _release(package.version), TESTED_VERSIONS.get(name)
    if release is not None and tested is not None and release > tested:
        advice = f"newer than {'.'.join(map(str, tested))}, the newest that was tested"
        return _finding(name, Status.NOTE, found, advice)
    return _finding(name, Status.FINE, found)


def _toolkit(package: Package) -> str:
    if package.hip:
        return f"HIP {package.hip}"
    return f"CUDA {package.cuda}" if package.cuda else ""


def _is_served(name: str, text: str) -> bool:
    if name == "vllm":
        try:
            return bool(series_of(text))
        except ValueError:
            return False
    release = _release(text)
    return release is None or release >= LEAST_VERSIONS[name]


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def _expected(name: str) -> str:
    if name == "vllm":
        return " or ".join(f"{series}.*" for series in SUPPORTED_VERSIONS)
    return f"{'.'.join(map(str, LEAST_VERSIONS[name]))} or newer"


def _finding(subject: str, status: Status, found: str, advice: str = "") -> Finding:
    return Finding(
        section=Section.PACKAGES, subject=subject, status=status, found=found, advice=advice
    )
