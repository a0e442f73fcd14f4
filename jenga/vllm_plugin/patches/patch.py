"""Replacements of names in vLLM: how one is described, checked and applied."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jenga.vllm_plugin.settings.refusals import Refusal

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""Release series of vLLM whose names and signatures are known to match the replacements."""

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One name of vLLM and its replacement.

    Attributes:
        module: Module in which the name is looked up at run time.
        name: The name, dotted for a method.
        reason: Why the name is replaced, and no official hook is used.
        parameters: Parameter names that the original must have.
        make: Function that builds the replacement from the original.
        series: Release series of vLLM in which the replacement is needed and fits.
    """

    module: str
    name: str
    reason: str
    parameters: tuple[str, ...]
    make: Callable[[Function], Function]
    series: tuple[str, ...] = SUPPORTED_VERSIONS

    @property
    def is_applied(self) -> bool:
        """Whether the name is replaced in this process."""
        owner, attribute = self._owner()
        return getattr(getattr(owner, attribute, None), "replaced_by_jenga", False)

    def check(self) -> None:
        """Check that vLLM has the name with the expected signature.

        Raises:
            ValueError: It does not. The message has the name and both signatures.
        """
        owner, attribute = self._owner()
        original = getattr(owner, attribute, None)
        if original is None:
            msg = f"vLLM has no {self.module}.{self.name}"
            raise ValueError(msg)
        parameters = tuple(inspect.signature(original).parameters)
        if parameters != self.parameters:
            msg = (
                f"{self.module}.{self.name} takes {parameters}, but this plugin was written for "
                f"{self.parameters} of vLLM {', '.join(self.series)}"
            )
            raise ValueError(msg)

    def apply(self) -> None:
        """Replace the name in this process."""
        owner, attribute = self._owner()
        original = getattr(owner, attribute)
        function = self.make(original)
        function.replaced_by_jenga = True  # pyright: ignore[reportFunctionMemberAccess]
        is_method = inspect.ismethod(original)
        setattr(owner, attribute, staticmethod(function) if is_method else function)

    def _owner(self) -> tuple[Any, str]:
        """Find the object that has the name, and the name of its attribute."""
        owner: Any = importlib.import_module(self.module)
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        if path == ["current_platform"]:
            owner = type(owner)  # the platform's methods are class methods
        return owner, attribute


def series_of(version: str) -> str:
    """Get the release series of a version of vLLM.

    Raises:
        ValueError: The series is not supported. The message has the version and supported series.
    """
    series = ".".join(version.split(".")[:2])
    if series not in SUPPORTED_VERSIONS:
        raise Refusal.VERSION.error(version)
    return series


def of_installed_vllm(replacements: Sequence[Replacement]) -> list[Replacement]:
    """Get the replacements that the installed vLLM needs.

    Raises:
        ValueError: The plugin was not written for the installed version of vLLM.
    """
    import vllm

    series = series_of(vllm.__version__)
    return [each for each in replacements if series in each.series]


def put_in_place(replacements: Sequence[Replacement]) -> None:
    """Check the names of the installed vLLM, then replace those that are not yet replaced.

    Raises:
        ValueError: vLLM's version, or the signature of a name, is not supported. Nothing was
            replaced.
    """
    missing = [each for each in of_installed_vllm(replacements) if not each.is_applied]
    for each in missing:
        each.check()
    for each in missing:
        each.apply()
