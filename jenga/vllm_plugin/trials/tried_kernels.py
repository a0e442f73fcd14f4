"""Choice of specialised kernels, which are written for one kind of GPU and must pass trials on it.

Layers begin with the generic kernels. Trials are run once an engine's arena is laid out, before it
warms up or captures graphs. Another process makes the calls that the layers will make, with the
same heads, windows and strides between pages. Verdicts are stored by GPU, version of Triton and
sources of the kernels. If a trial lacks time or memory, other ranks of the same start do not repeat
it. A start never waits for trials longer than `START_S`.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TextIO, runtime_checkable

import torch
import triton
from vllm.logger import init_logger

from jenga.vllm_plugin.trials.kept_trials import trials_folder
from jenga_kernels.trial_calls import Call
from jenga_kernels.trial_runs import has_own_kernels
from jenga_kernels.trials import ENDED_S, Verdict, has_trials, hold_trials_apart
from jenga_kernels.triton.lib.tiles import machine_of

logger = init_logger(f"vllm.{__name__}")

START_S = 120.0
"""Largest number of seconds of a rank's start for trials, with those of other ranks that it awaits.

On an H100 four trials in four processes took 30 to 52 s. vLLM allows 600 s for a start.
"""

POLL_S = 0.1
"""Seconds between two attempts to get a lock."""


class KernelChoice:
    """Choice of the kernels of layers, for operations with specialised kernels for their GPU.

    Attributes:
        own: Argument for the operations. True means the specialised kernels, False the generic
            ones, and None the operation's own choice.
        is_open: Whether trials have yet to decide. Until then, the generic kernels are used.
    """

    __slots__ = ("is_open", "own")

    def __init__(self, device: torch.device, *, asked: bool | None) -> None:
        """Start without a trial.

        Args:
            device: Device of the layers.
            asked: Choice of the environment, which is used without a trial. None means that it
                makes no choice.
        """
        self.is_open = asked is None and has_trials(device)
        self.own = False if self.is_open else asked

    def decide(self, *, is_passed: bool) -> None:
        """Choose by the result of the trials."""
        self.own = None if is_passed else False
        self.is_open = False


@runtime_checkable
class TriesKernels(Protocol):
    """A metadata builder whose layers may use specialised kernels."""

    kernels: KernelChoice

    def calls(self) -> list[Call]:
        """Describe the calls of the operation that its layers will make, for trials."""
        ...


def choose_kernels(builders: Iterable[object], device: torch.device, *, start: str) -> None:
    """Choose the kernels of layers whose caches are bound.

    Args:
        builders: Metadata builders of the layers.
        device: Device of the layers.
        start: Name of this start of an engine, the same on all its ranks.
    """
    open_builders = [
        each for each in builders if isinstance(each, TriesKernels) and each.kernels.is_open
    ]
    if not open_builders:
        return
    machine = machine_of(device)
    calls_of = [
        [call for call in builder.calls() if has_own_kernels(call, machine)]
        for builder in open_builders
    ]
    calls: dict[str, Call] = {}
    for call in (call for calls in calls_of for call in calls):
        known = calls.get(call.key)
        if known is None or known.arena_bytes < call.arena_bytes:
            calls[call.key] = call  # of the layer that reaches furthest in the arena
    verdicts = _verdicts(calls, device, start=start) if calls else {}
    for builder, calls_of_one in zip(open_builders, calls_of, strict=True):
        builder.kernels.decide(is_passed=all(verdicts[call.key].is_passed for call in calls_of_one))


def _verdicts(calls: Mapping[str, Call], device: torch.device, *, start: str) -> dict[str, Verdict]:
    """Get verdicts by keys of calls, from stored trials and from trials that are run now."""
    until = time.monotonic() + START_S
    kept = _Kept(_folder(device), start)
    verdicts = kept.read(calls)
    missing = {key: call for key, call in calls.items() if key not in verdicts}
    if missing:
        # All ranks arrive here at about the same time. One runs the trials, and the others wait.
        with kept.locked(missing, until) as is_turn:
            verdicts |= kept.read(missing)
            missing = {key: call for key, call in missing.items() if key not in verdicts}
            if is_turn:
                held = _hold(missing, device, until)
                kept.write(held)
            else:
                held = _untried(missing, f"another process did not end its trials in {START_S:g} s")
            verdicts |= held
    for key, verdict in verdicts.items():
        if not verdict.is_passed:
            logger.warning(
                "The specialised kernels of %s have not passed their trial (%s); the generic "
                "kernels are used, which may be slower.%s",
                verdict.operation,
                verdict.reason,
                kept.hint(key) if verdict.is_final else "",
            )
    return verdicts


def _hold(calls: Mapping[str, Call], device: torch.device, until: float) -> dict[str, Verdict]:
    if not calls:
        return {}
    limit_s = until - time.monotonic()
    if limit_s <= 0:
        return _untried(calls, f"other trials took the {START_S:g} s that a start has for them")
    logger.info(
        "Trying the specialised kernels of %s, once on this machine and for %.0f s at most",
        " and ".join(sorted({call.operation for call in calls.values()})),
        limit_s,
    )
    try:
        held = hold_trials_apart(list(calls.values()), device, limit_s=limit_s)
    except OSError as error:
        return _untried(calls, f"no process could be started for it: {error}")
    return dict(zip(calls, held, strict=True))


def _untried(calls: Mapping[str, Call], reason: str) -> dict[str, Verdict]:
    return {
        key: Verdict(operation=call.operation, is_passed=False, is_final=False, reason=reason)
        for key, call in calls.items()
    }


def _folder(device: torch.device) -> Path | None:
    """Get the folder of verdicts for this GPU, or None if it cannot be made."""
    try:
        folder = trials_folder(torch.cuda.get_device_name(device), triton.__version__)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        logger.warning("Verdicts of kernel trials are not stored: %s", error)
        return None
    return folder


class _Kept:
    """Stored verdicts, in files with keys of calls as names. Without a folder, none are stored.

    A verdict that is not final counts only for the start of an engine in which it was found.
    """

    def __init__(self, folder: Path | None, start: str) -> None:
        self._folder = folder
        self._start = start

    def hint(self, key: str) -> str:
        """Get a sentence that says how to repeat a trial, if its verdict is stored."""
        if self._folder is None:
            return ""
        return f" The trial is repeated once {self._folder / key}.json is removed."

    def read(self, keys: Iterable[str]) -> dict[str, Verdict]:
        """Get the stored verdicts that count for this start, by keys."""
        if self._folder is None:
            return {}
        found = {key: _read(self._folder / f"{key}.json", self._start) for key in keys}
        return {key: verdict for key, verdict in found.items() if verdict is not None}

    def write(self, verdicts: Mapping[str, Verdict]) -> None:
        """Store verdicts, by keys."""
        if self._folder is None:
            return
        try:
            for key, verdict in verdicts.items():
                said = {"verdict": asdict(verdict), "start": self._start}
                partial = self._folder / f"{key}.{os.getpid()}.partial"
                partial.write_text(json.dumps(said) + "\n", encoding="utf-8")
                partial.rename(self._folder / f"{key}.json")
        except OSError as error:
            logger.warning("Verdicts of kernel trials are not stored: %s", error)

    @contextmanager
    def locked(self, keys: Iterable[str], until: float) -> Generator[bool]:
        """Wait until other processes have run the same trials, and make later processes wait.

        The system releases a lock when its holder dies.

        Args:
            keys: Keys of the calls.
            until: Deadline on the clock of `time.monotonic`.

        Yields:
            Whether it is this process's turn.
        """
        name = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:16]
        try:
            file = None if self._folder is None else (self._folder / f"{name}.lock").open("w")
        except OSError as error:
            logger.warning("Kernel trials do not wait for those of other ranks: %s", error)
            file = None
        if file is None:
            yield True
            return
        with file:
            yield _take(file, until)


def _take(file: TextIO, until: float) -> bool:
    """Lock a file.

    Args:
        file: The file.
        until: Deadline on the clock of `time.monotonic`.

    Returns:
        Whether this process may run the trials. False means that another one held the lock until
        `ENDED_S` after the deadline.
    """
    is_waiting = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            # The holder of the lock ends its trials by its deadline, and then writes the verdicts.
            if now > until + ENDED_S:
                return False
            if not is_waiting:
                logger.info(
                    "Another process tries specialised kernels (%s); waiting for it, %.0f s at "
                    "most",
                    file.name,
                    until + ENDED_S - now,
                )
                is_waiting = True
            time.sleep(POLL_S)
        except OSError as error:  # a file system without locks
            logger.warning("Kernel trials do not wait for those of other ranks: %s", error)
            return True
        else:
            return True


def _read(path: Path, start: str) -> Verdict | None:
    """Read a stored verdict. None if it cannot be read, or does not count for this start."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(**said["verdict"])
        return verdict if verdict.is_final or said["start"] == start else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
