"""Eviction policies by name."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

from jenga.eviction.learned import LearnedReuse
from jenga.eviction.policy import EvictionPolicy, LeastRecentlyUsed

DEFAULT_POLICY = "learned"
"""Name of the default eviction policy."""

EVICTION_POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "learned": LearnedReuse,
    "lru": LeastRecentlyUsed,
}
"""Eviction policies of this package by name."""

_MEMBERS = ("begin", "observe", "learn", "worth", "heir_of", "weighs_guesses")
"""Names that a policy must have; see `jenga.eviction.policy.EvictionPolicy`."""


@cache
def policy_by_name(name: str) -> Callable[[], EvictionPolicy]:
    """Return the class of an eviction policy.

    Args:
        name: A name in `EVICTION_POLICIES`, or `module:Class` for a policy of your own. Python must
            be able to import its module.

    Raises:
        ValueError: There is no such policy, its module cannot be imported, or it lacks a method of
            `EvictionPolicy`.
    """
    if name in EVICTION_POLICIES:
        return EVICTION_POLICIES[name]
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        msg = (
            f"eviction policy must be one of {', '.join(EVICTION_POLICIES)}, or module:Class, "
            f"got {name!r}"
        )
        raise ValueError(msg)
    try:
        module = import_module(module_name)
    except Exception as error:
        msg = f"eviction policy {name!r}: its module cannot be imported: {error}"
        raise ValueError(msg) from error
    policy = getattr(module, class_name, None)
    if not isinstance(policy, type):
        msg = f"eviction policy {name!r}: module {module_name!r} has no class {class_name!r}"
        raise ValueError(msg)  # noqa: TRY004  the name is wrong, not its type
    if missing := [member for member in _MEMBERS if not hasattr(policy, member)]:
        msg = f"eviction policy {name!r}: its class must have {', '.join(missing)}"
        raise ValueError(msg)
    return policy


def source_of(name: str) -> str:
    """Return the source of a policy's module. Empty for policies of this package.

    Raises:
        ValueError: See `policy_by_name`.
    """
    if name in EVICTION_POLICIES:
        return ""
    module = inspect.getmodule(policy_by_name(name))
    try:
        return inspect.getsource(module) if module is not None else ""
    except OSError:
        return ""
