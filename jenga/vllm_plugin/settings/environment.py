"""All environment variables that the plugin reads, with their checks.

A variable that is empty or only spaces counts as not set. `selects_backend` tells whether the
environment selects the backend. The other settings are read only once a configuration selects it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jenga.eviction.known import DEFAULT_POLICY, policy_by_name

BACKEND_NAME = "JENGA_TRITON"
"""Name of the attention backend, in vLLM's upper-case form."""

BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
_GEOMETRY_VARIABLE = "JENGA_GEOMETRY"
MEMORY_LOG_VARIABLE = "JENGA_MEMORY_LOG"
_MEMORY_LOG_BYTES_VARIABLE = "JENGA_MEMORY_LOG_BYTES"
_CACHE_VARIABLE = "JENGA_CACHE"
_LEFT_SHARE_VARIABLE = "JENGA_LEFT_SHARE"
_EVICTION_VARIABLE = "JENGA_EVICTION"
_SPECIALIZED_VARIABLE = "JENGA_SPECIALIZED_PREFILL"
_SPECIALIZED_LATENTS_VARIABLE = "JENGA_SPECIALIZED_LATENTS"
_SPECIALIZED_SCANS_VARIABLE = "JENGA_SPECIALIZED_SCANS"
HISTORY_VARIABLE = "JENGA_HISTORY_TOKENS"
HISTORY_REQUESTS_VARIABLE = "JENGA_HISTORY_REQUESTS"
IMAGES_VARIABLE = "JENGA_IMAGE_EMBEDDINGS"
EMBEDDINGS_VARIABLE = "JENGA_EMBEDDINGS_IN_KV_PAGES"
SCRATCH_VARIABLE = "JENGA_PROMPT_SCRATCH_BYTES"
SHARED_ARENA_VARIABLE = "JENGA_SHARED_ARENA"
GUARANTEE_VARIABLE = "JENGA_SHARED_ARENA_GUARANTEE"
_LIMIT_VARIABLE = "JENGA_SHARED_ARENA_LIMIT"
KNOWN_VARIABLES = frozenset(
    {
        _GEOMETRY_VARIABLE,
        MEMORY_LOG_VARIABLE,
        _MEMORY_LOG_BYTES_VARIABLE,
        _CACHE_VARIABLE,
        _LEFT_SHARE_VARIABLE,
        _EVICTION_VARIABLE,
        _SPECIALIZED_VARIABLE,
        _SPECIALIZED_LATENTS_VARIABLE,
        _SPECIALIZED_SCANS_VARIABLE,
        HISTORY_VARIABLE,
        HISTORY_REQUESTS_VARIABLE,
        IMAGES_VARIABLE,
        EMBEDDINGS_VARIABLE,
        SCRATCH_VARIABLE,
        SHARED_ARENA_VARIABLE,
        GUARANTEE_VARIABLE,
        _LIMIT_VARIABLE,
    }
)
"""Names of all variables of the package."""

GEOMETRIES = ("planned", "lcm")
"""Values that `JENGA_GEOMETRY` may have. The first is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the environment.

    Attributes:
        geometry: Rule that cuts the arena, one of `GEOMETRIES`.
        memory_log: File to append one JSON line per scheduler step to. None means no log.
        memory_log_bytes: Size of that file in bytes at which it is rotated. 0 means no limit.
        eviction: Name of the eviction policy, as `jenga.eviction.known.policy_by_name` takes it.
        left_share: Largest share of the arena, 0 to 1, that an admission leaves to cached content.
            None means the manager's default.
        has_specialized_prefill: Whether prompts use the warp-specialised attention kernel for
            Hopper in layers that it supports. None means only if it has passed its trial.
        has_specialized_latents: The same for decoding in layers of latent attention.
        has_specialized_scans: The same for prompts in recurrent layers.
        history_tokens: Number of tokens in the histories beside recurrent states that are seldom
            written. 0 means no histories. None means that drafts decide.
        history_requests: Fewest requests of a decode step that does not write all of its states,
            padding included. None means that the bytes of a step's states decide.
        keeps_image_embeddings: Whether a vision encoder's output is kept in the arena, where that
            is possible.
        embeddings_in_kv_pages: Whether it is kept in the slots that full attention has for the same
            tokens, instead of in pages of its own.
        prompt_scratch_bytes: Bytes of the scratch to which prompts restore quantised keys and
            values. 0 means that they read the quantised pages.
        shared_arena: Folder of an arena that several engines share. None means an arena of its own.
        guarantee_bytes: Bytes of the shared arena that this engine always has.
        limit_bytes: Most bytes of the shared arena that it may have. 0 means all of it.
    """

    geometry: str
    memory_log: Path | None
    memory_log_bytes: int
    eviction: str
    left_share: float | None
    has_specialized_prefill: bool | None
    has_specialized_latents: bool | None
    has_specialized_scans: bool | None
    history_tokens: int | None
    shared_arena: Path | None
    guarantee_bytes: int
    limit_bytes: int
    keeps_image_embeddings: bool = True
    embeddings_in_kv_pages: bool = False
    prompt_scratch_bytes: int = 0
    history_requests: int | None = None


def selects_backend(environ: Mapping[str, str]) -> bool:
    """Whether `VLLM_ATTENTION_BACKEND` names this package's backend.

    The variable is vLLM's. Only values that begin with JENGA are checked here.

    Raises:
        ValueError: The value begins with JENGA and is not the backend's name.
    """
    backend = _value(environ, BACKEND_VARIABLE).upper()
    if backend.startswith("JENGA") and backend != BACKEND_NAME:
        msg = (
            f"{BACKEND_VARIABLE}={environ[BACKEND_VARIABLE]!r} is not a backend of jenga; "
            f"expected {BACKEND_NAME}"
        )
        raise ValueError(msg)
    return backend == BACKEND_NAME


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read and check this package's own variables.

    Raises:
        ValueError: A variable has an unknown value, or a `JENGA_` variable is unknown. The message
            has its name, its value and the expected values.
    """
    for name in sorted(environ):
        if name.startswith("JENGA_") and name not in KNOWN_VARIABLES and _value(environ, name):
            msg = (
                f"unknown environment variable {name}={environ[name]!r}; expected one of "
                f"{', '.join(sorted(KNOWN_VARIABLES))}"
            )
            raise ValueError(msg)
    geometry = _value(environ, _GEOMETRY_VARIABLE).lower() or GEOMETRIES[0]
    if geometry not in GEOMETRIES:
        msg = (
            f"{_GEOMETRY_VARIABLE}={environ[_GEOMETRY_VARIABLE]!r} is not a geometry; "
            f"expected one of {', '.join(GEOMETRIES)}"
        )
        raise ValueError(msg)
    memory_log = _value(environ, MEMORY_LOG_VARIABLE)
    if _value(environ, _CACHE_VARIABLE):
        cache_directory(environ)
    return Settings(
        geometry=geometry,
        memory_log=Path(memory_log) if memory_log else None,
        memory_log_bytes=_number(environ, _MEMORY_LOG_BYTES_VARIABLE, "bytes, 0 for no limit"),
        eviction=_eviction(environ),
        left_share=_left_share(environ),
        has_specialized_prefill=_switch(environ, _SPECIALIZED_VARIABLE),
        has_specialized_latents=_switch(environ, _SPECIALIZED_LATENTS_VARIABLE),
        has_specialized_scans=_switch(environ, _SPECIALIZED_SCANS_VARIABLE),
        history_tokens=_number_if_set(environ, HISTORY_VARIABLE, "tokens, 0 for none"),
        history_requests=_number_if_set(environ, HISTORY_REQUESTS_VARIABLE, "requests"),
        keeps_image_embeddings=_switch(environ, IMAGES_VARIABLE) is not False,
        embeddings_in_kv_pages=_embeddings_in_kv_pages(environ),
        prompt_scratch_bytes=_number(environ, SCRATCH_VARIABLE, "bytes, 0 for no scratch"),
        shared_arena=_shared_arena(environ),
        guarantee_bytes=_number(environ, GUARANTEE_VARIABLE, "bytes"),
        limit_bytes=_number(environ, _LIMIT_VARIABLE, "bytes, 0 for no limit"),
    )


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Get the directory for files that can be made again.

    It is `JENGA_CACHE` if that is set, else `jenga` in the user's XDG cache directory, else
    `.cache/jenga` in the user's home.

    Args:
        environ: Environment variables. None means those of this process.

    Raises:
        ValueError: The directory is in a home directory that is not known. The message names
            `JENGA_CACHE` and its value.
    """
    environ = os.environ if environ is None else environ
    chosen = _value(environ, _CACHE_VARIABLE)
    base = _value(environ, "XDG_CACHE_HOME") or "~/.cache"
    path = Path(chosen) if chosen else Path(base) / "jenga"
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        msg = f"{_CACHE_VARIABLE}={chosen!r}: the home directory of {str(path)!r} is not known"
        raise ValueError(msg) from error


def _value(environ: Mapping[str, str], name: str) -> str:
    """Get the text of a variable without spaces around it. Without the variable it is empty."""
    return environ.get(name, "").strip()


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    text = _value(environ, name)
    if text not in {"", "0", "1"}:
        msg = f"{name}={environ[name]!r}: expected 0 or 1"
        raise ValueError(msg)
    return text == "1" if text else None


def _embeddings_in_kv_pages(environ: Mapping[str, str]) -> bool:
    is_asked = _switch(environ, EMBEDDINGS_VARIABLE) is True
    if is_asked and _switch(environ, IMAGES_VARIABLE) is False:
        msg = f"{EMBEDDINGS_VARIABLE}=1 has no effect with {IMAGES_VARIABLE}=0"
        raise ValueError(msg)
    return is_asked


def _eviction(environ: Mapping[str, str]) -> str:
    name = _value(environ, _EVICTION_VARIABLE) or DEFAULT_POLICY
    try:
        policy_by_name(name)
    except ValueError as error:
        msg = f"{_EVICTION_VARIABLE}={environ[_EVICTION_VARIABLE]!r}: {error}"
        raise ValueError(msg) from error
    return name


def _left_share(environ: Mapping[str, str]) -> float | None:
    text = _value(environ, _LEFT_SHARE_VARIABLE)
    if not text:
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        msg = (
            f"{_LEFT_SHARE_VARIABLE}={environ[_LEFT_SHARE_VARIABLE]!r}: expected a share of at "
            f"least 0 and less than 1"
        )
        raise ValueError(msg)
    return share


def _shared_arena(environ: Mapping[str, str]) -> Path | None:
    folder = _value(environ, SHARED_ARENA_VARIABLE)
    for name in (GUARANTEE_VARIABLE, _LIMIT_VARIABLE):
        if not folder and _value(environ, name):
            msg = f"{name}={environ[name]!r} has no effect without {SHARED_ARENA_VARIABLE}"
            raise ValueError(msg)
    if folder and not _number(environ, GUARANTEE_VARIABLE, "bytes"):
        msg = (
            f"{GUARANTEE_VARIABLE}={environ.get(GUARANTEE_VARIABLE, '')!r}: expected a positive "
            f"number of bytes, which this engine always has of {SHARED_ARENA_VARIABLE}={folder!r}"
        )
        raise ValueError(msg)
    return Path(folder) if folder else None


def _number_if_set(environ: Mapping[str, str], name: str, expected: str) -> int | None:
    return _number(environ, name, expected) if _value(environ, name) else None


def _number(environ: Mapping[str, str], name: str, expected: str) -> int:
    text = _value(environ, name) or "0"
    if not (text.isascii() and text.isdecimal()):
        msg = f"{name}={environ[name]!r}: expected a number of {expected}"
        raise ValueError(msg)
    return int(text)
