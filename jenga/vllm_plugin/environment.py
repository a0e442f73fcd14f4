"""The environment variables the plugin reads, all of them here, each checked."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BACKEND_NAME = "JENGA_TRITON"
"""Name of the attention backend, in vLLM's upper-case form."""

_BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
_GEOMETRY_VARIABLE = "JENGA_GEOMETRY"
_MEMORY_LOG_VARIABLE = "JENGA_MEMORY_LOG"
_CACHE_VARIABLE = "JENGA_CACHE"
_LEFT_SHARE_VARIABLE = "JENGA_LEFT_SHARE"
_SPECIALIZED_VARIABLE = "JENGA_SPECIALIZED_PREFILL"
_SPECIALIZED_LATENTS_VARIABLE = "JENGA_SPECIALIZED_LATENTS"
_SPECIALIZED_SCANS_VARIABLE = "JENGA_SPECIALIZED_SCANS"
HISTORY_VARIABLE = "JENGA_HISTORY_TOKENS"
_KNOWN_VARIABLES = frozenset(
    {
        _GEOMETRY_VARIABLE,
        _MEMORY_LOG_VARIABLE,
        _CACHE_VARIABLE,
        _LEFT_SHARE_VARIABLE,
        _SPECIALIZED_VARIABLE,
        _SPECIALIZED_LATENTS_VARIABLE,
        _SPECIALIZED_SCANS_VARIABLE,
        HISTORY_VARIABLE,
    }
)

GEOMETRIES = ("planned", "lcm")
"""Names `JENGA_GEOMETRY` may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for.

    Attributes:
        selects_backend: `VLLM_ATTENTION_BACKEND` names this package's backend.
        geometry: Rule that cuts the arena.
        memory_log: File to append one JSON line per scheduler step to, if any.
        left_share: Of the arena, what an admission leaves at most to those who will read it; None
            for the manager's own.
        has_specialized_prefill: Whether prompts attend by the kernel for Hopper whose warps
            specialise, where it has what a layer needs; None: if it has passed its trial.
        has_specialized_latents: The same of decoding by layers of latent attention.
        has_specialized_scans: The same of prompts that recurrent layers read.
        history_tokens: Tokens of the histories beside recurrent states that are seldom written; 0
            where the environment asks for none.
    """

    selects_backend: bool
    geometry: str
    memory_log: Path | None
    left_share: float | None
    has_specialized_prefill: bool | None
    has_specialized_latents: bool | None
    has_specialized_scans: bool | None
    history_tokens: int


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read and check this package's environment variables.

    `VLLM_ATTENTION_BACKEND` is vLLM's; of its values only those that begin with JENGA concern us.

    Raises:
        ValueError: A variable has a value we do not know, or a `JENGA_` variable is unknown; the
            message names it and what was expected.
    """
    backend = environ.get(_BACKEND_VARIABLE, "").strip().upper()
    if backend.startswith("JENGA") and backend != BACKEND_NAME:
        msg = (
            f"{_BACKEND_VARIABLE}={environ[_BACKEND_VARIABLE]!r} is not a backend of jenga; "
            f"expected {BACKEND_NAME}"
        )
        raise ValueError(msg)
    for name in sorted(environ):
        if name.startswith("JENGA_") and name not in _KNOWN_VARIABLES:
            msg = f"unknown environment variable {name}; expected {sorted(_KNOWN_VARIABLES)}"
            raise ValueError(msg)
    geometry = environ.get(_GEOMETRY_VARIABLE, "planned").strip().lower()
    if geometry not in GEOMETRIES:
        msg = (
            f"{_GEOMETRY_VARIABLE}={environ[_GEOMETRY_VARIABLE]!r} is not a geometry; "
            f"expected one of {', '.join(GEOMETRIES)}"
        )
        raise ValueError(msg)
    memory_log = environ.get(_MEMORY_LOG_VARIABLE, "").strip()
    if memory_log and not Path(memory_log).parent.is_dir():
        msg = f"{_MEMORY_LOG_VARIABLE}={memory_log!r}: its folder does not exist"
        raise ValueError(msg)
    return Settings(
        selects_backend=backend == BACKEND_NAME,
        geometry=geometry,
        memory_log=Path(memory_log) if memory_log else None,
        left_share=_left_share(environ),
        has_specialized_prefill=_switch(environ, _SPECIALIZED_VARIABLE),
        has_specialized_latents=_switch(environ, _SPECIALIZED_LATENTS_VARIABLE),
        has_specialized_scans=_switch(environ, _SPECIALIZED_SCANS_VARIABLE),
        history_tokens=_history_tokens(environ),
    )


def cache_directory() -> Path:
    """Get the directory for files that can be made again.

    It is `JENGA_CACHE` if that is set, else `jenga` in the user's XDG cache directory.
    """
    if chosen := os.environ.get(_CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "jenga"


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    text = environ.get(name, "").strip()
    if text not in {"", "0", "1"}:
        msg = f"{name}={environ[name]!r}: expected 0 or 1"
        raise ValueError(msg)
    return text == "1" if text else None


def _left_share(environ: Mapping[str, str]) -> float | None:
    text = environ.get(_LEFT_SHARE_VARIABLE, "").strip()
    if not text:
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        msg = f"{_LEFT_SHARE_VARIABLE}={text!r}: expected a share of at least 0 and less than 1"
        raise ValueError(msg)
    return share


def _history_tokens(environ: Mapping[str, str]) -> int:
    text = environ.get(HISTORY_VARIABLE, "").strip() or "0"
    if not (text.isascii() and text.isdecimal()):
        msg = f"{HISTORY_VARIABLE}={text!r}: expected a number of tokens, 0 for none"
        raise ValueError(msg)
    return int(text)
