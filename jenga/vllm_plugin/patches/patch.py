"""One name of vLLM and what takes its place."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jenga.vllm_plugin.settings.refusals import Refusal

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""Release series of vLLM whose names are known to be as the replacements say."""

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One name of vLLM and what takes its place.

    Attributes:
        module: Where the name is looked up at run time.
        name: The name, dotted for a method.
        reason: Why no official hook serves.
        parameters: The original's parameter names, which must be as when this was written.
        make: Builds the replacement from the original.
        series: Release series of vLLM in which it is needed and fits.
    """

    module: str
    name: str
    reason: str
    parameters: tuple[str, ...]
    make: Callable[[Function], Function]
    series: tuple[str, ...] = SUPPORTED_VERSIONS

    @property
    def is_applied(self) -> bool:
        """Whether it is in place."""
        owner, attribute = self._owner()
        return getattr(getattr(owner, attribute, None), "replaced_by_jenga", False)

    def check(self) -> None:
        """Check that vLLM has the name, with the signature this was written for.

        Raises:
            ValueError: It has not; the message names the function and both signatures.
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
        """Put it in place."""
        owner, attribute = self._owner()
        original = getattr(owner, attribute)
        function = self.make(original)
        function.replaced_by_jenga = True  # pyright: ignore[reportFunctionMemberAccess]
        is_method = inspect.ismethod(original)
        setattr(owner, attribute, staticmethod(function) if is_method else function)

    def _owner(self) -> tuple[Any, str]:
        """Find the object that holds the name, and the attribute's name in it."""
        owner: Any = importlib.import_module(self.module)
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        if path == ["current_platform"]:
            owner = type(owner)  # the platform's methods are class methods
        return owner, attribute


def series_of(version: str) -> str:
    """Get the release series of a version of vLLM, one whose names are known.

    Raises:
        ValueError: It is not; the message names it and the supported ones.
    """
    series = ".".join(version.split(".")[:2])
    if series not in SUPPORTED_VERSIONS:
        raise Refusal.VERSION.error(version)
    return series


def of_installed_vllm(replacements: Sequence[Replacement]) -> list[Replacement]:
    """Get those that the installed vLLM needs.

    Raises:
        ValueError: It is no vLLM that the plugin was written for.
    """
    import vllm

    series = series_of(vllm.__version__)
    return [each for each in replacements if series in each.series]


def put_in_place(replacements: Sequence[Replacement]) -> None:
    """Check the names of the installed vLLM, then replace them, each once.

    Raises:
        ValueError: vLLM, or a name of it, is not as the plugin was written for; nothing was
            replaced.
    """
    missing = [each for each in of_installed_vllm(replacements) if not each.is_applied]
    for each in missing:
        each.check()
    for each in missing:
        each.apply()
