"""Kernels written for one kind of GPU, used where they have passed their trials on it.

The first engine on a machine holds the trials that its layers need, in other processes, which takes
about a minute; what came of them is kept beside the demo's weights until the kernels, Triton or the
GPU are others.
"""

import fcntl
import functools
import hashlib
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from vllm.logger import init_logger

import jenga_kernels
from jenga.vllm_plugin.environment import cache_directory
from jenga_kernels.trials import Verdict, has_trials, hold_trial_apart

logger = init_logger(f"vllm.{__name__}")


def own_kernels(operation: str, device: torch.device, *, asked: bool | None) -> bool | None:
    """Whether layers use the kernels that an operation has for their GPU alone.

    Args:
        operation: One with trials.
        device: Of the layers.
        asked: What the environment asks for; that is done, without a trial.

    Returns:
        False: those of all GPUs. None: what the operation chooses.
    """
    if asked is not None or not has_trials(device):
        return asked
    return None if _verdict(operation, device).is_passed else False


@functools.cache
def _verdict(operation: str, device: torch.device) -> Verdict:
    """What came of a trial, held or kept from another engine."""
    path = cache_directory() / "trials" / f"{operation}-{_state_of(device)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The workers of an engine come here at one time: one holds the trial, others wait for it.
        with _locked(path.with_suffix(".lock")):
            verdict = _read(path)
            if verdict is None:
                verdict = _hold(operation, device)
                if verdict.is_final:
                    _write(path, verdict)
    except OSError as error:
        logger.warning("What comes of trials of kernels is not kept: %s", error)
        verdict = _hold(operation, device)
    if not verdict.is_passed:
        logger.warning(
            "The kernels of %s for this GPU have not passed their trial (%s); those of all GPUs "
            "are used, which may be slower.%s",
            operation,
            verdict.reason,
            f" Another trial is held once {path} is removed." if verdict.is_final else "",
        )
    return verdict


def _hold(operation: str, device: torch.device) -> Verdict:
    logger.info("Trying the kernels of %s for this GPU, once on this machine", operation)
    return hold_trial_apart(operation, device)


def _state_of(device: torch.device) -> str:
    """Name of all that a trial depends on: the GPU, Triton and the kernels."""
    digest = hashlib.sha256()
    for part in (torch.cuda.get_device_name(device), triton.__version__):
        digest.update(part.encode() + b"\0")
    folder = Path(jenga_kernels.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold a lock between processes; the system frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Verdict | None:
    """The verdict of an earlier trial; None if there is none that can be read."""
    try:
        return Verdict(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write(path: Path, verdict: Verdict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(verdict)) + "\n", encoding="utf-8")
    partial.rename(path)
