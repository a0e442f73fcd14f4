"""Stored verdicts of kernels' trials on a machine, for engines and for users.

A verdict is a JSON file with the key of its call as its name. It is in a folder for the GPU, the
release of Triton and the sources of the kernels. `tried_kernels` writes them. This module does not
import torch or vLLM.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jenga.vllm_plugin.settings.environment import cache_directory

_VERDICT = "*.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTrial:
    """A stored verdict.

    Attributes:
        operation: Operation whose kernels were tried.
        is_passed: Whether the kernels passed, and so are used on this machine.
        is_final: Whether the verdict also counts for later starts of an engine.
        reason: Why the kernels did not pass.
        file: File with the verdict.
    """

    operation: str
    is_passed: bool
    is_final: bool
    reason: str
    file: Path


def trials_folder(gpu_name: str, triton_version: str) -> Path:
    """Get the folder of verdicts for a GPU. It need not exist.

    Args:
        gpu_name: Name of the GPU, as the driver and torch give it.
        triton_version: Version of Triton, with its local part.

    Raises:
        ValueError: See `cache_directory`.
        OSError: The sources of the kernels cannot be read.
    """
    digest = hashlib.sha256()
    for part in (gpu_name, triton_version):
        digest.update(part.encode() + b"\0")
    folder = _sources()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return cache_directory() / "trials" / digest.hexdigest()[:16]


def _sources() -> Path:
    """Get the folder of the kernels' sources."""
    import jenga_kernels

    return Path(jenga_kernels.__path__[0])


def kept_trials(folder: Path) -> Iterator[KeptTrial]:
    """Read the verdicts of a folder, in the order of file names. Invalid files are left out."""
    for file in sorted(folder.glob(_VERDICT)):
        try:
            said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["verdict"]
            yield KeptTrial(
                operation=str(said["operation"]),
                is_passed=bool(said["is_passed"]),
                is_final=bool(said["is_final"]),
                reason=str(said["reason"]),
                file=file,
            )
        except (OSError, ValueError, TypeError, KeyError):
            continue
