"""Checks of the options of `jenga replay` that argparse cannot make: ranges, and which go together.

An option without any effect is refused by name. If it has an effect on some of the chosen managers
only, a note names the others.
"""

import argparse
import math
from collections.abc import Iterator

from jenga.sim.arenas.by_name import EVICTING, HOSTING
from jenga.sim.batching.step_time import SHARES

_POSITIVE = ("every", "requests", "chunk_tokens", "max_requests", "step_seconds")

_MANAGERS_OF = {
    "eviction": EVICTING,
    "left_share": EVICTING,
    "eviction_rows": EVICTING,
    "host": HOSTING,
    "host_bandwidth": HOSTING,
    "vllm": ("vllm",),
}
"""Options that only some managers have, and the names of these."""

_OF_A_CACHE = ("host", "eviction", "left_share", "eviction_rows")
"""Options about cached prefixes."""

_OF_THE_ROOFLINE = (*SHARES, "overhead_seconds", "measured")
"""Options of modelled seconds."""


def check_options(options: argparse.Namespace) -> None:
    """Check options, before any model or trace is read.

    Raises:
        ValueError: An option is out of range, or has no effect with the others.
    """
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            msg = f"{_flag(name)} must be a positive number, got {value}"
            raise ValueError(msg)
    if options.check < 0:
        msg = f"--check must be at least 0, got {options.check}"
        raise ValueError(msg)
    if options.measured is not None and not options.measured.is_dir():
        msg = f"--measured must be a folder with one for each GPU, got {options.measured}"
        raise ValueError(msg)
    for name, managers in _MANAGERS_OF.items():
        if _is_given(options, name) and not set(options.manager) & set(managers):
            msg = (
                f"{_flag(name)} has no effect with --manager {' '.join(options.manager)}: it is "
                f"for {', '.join(managers)}"
            )
            raise ValueError(msg)
    for name in filter(lambda name: _is_given(options, name), _OF_A_CACHE):
        if options.no_prefix_caching:
            msg = f"{_flag(name)} has no effect with --no-prefix-caching, which caches no prefixes"
            raise ValueError(msg)
    for name in filter(lambda name: _is_given(options, name), _OF_THE_ROOFLINE):
        if options.step_seconds is not None:
            msg = f"{_flag(name)} has no effect with --step-seconds, which times all steps alike"
            raise ValueError(msg)
    for name, needed in (("host_bandwidth", "host"), ("request_rows", "out")):
        if _is_given(options, name) and not _is_given(options, needed):
            msg = f"{_flag(name)} has no effect without {_flag(needed)}"
            raise ValueError(msg)


def notes_on_managers(options: argparse.Namespace) -> Iterator[str]:
    """Yield a note on the options that do not apply to some of the chosen managers, if any."""
    parts: list[str] = []
    for name, managers in _MANAGERS_OF.items():
        others = [each for each in options.manager if each not in managers]
        if _is_given(options, name) and others:
            parts.append(f"{_flag(name)} does not apply to {', '.join(dict.fromkeys(others))}")
    if parts:
        yield f"{'; '.join(parts)}."


def _is_given(options: argparse.Namespace, name: str) -> bool:
    """Whether an option has another value than none, zero or off."""
    return bool(getattr(options, name)) or (name == "left_share" and options.left_share is not None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
