"""Kernels written for one kind of GPU, used where they have passed their trials on it.

Layers begin with the kernels of all GPUs. Once an engine's arena is laid out, and before it warms
up or records graphs, the calls that its layers will make are tried in another process: with their
heads, windows and pages as far apart as theirs. What came of it is kept, by GPU, Triton and the
sources of the kernels. A trial that has no time or no memory is not held again by other ranks of
the same start, which never waits for trials longer than `START_S`.
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
"""Most seconds of a rank's start for trials, those of other ranks that it waits for included.

On an H100 four trials in four processes took 30 to 52 s; vLLM gives a start 600 s.
"""

POLL_S = 0.1
"""From one look at a lock to the next."""


class KernelChoice:
    """Which kernels layers use where an operation has some for their GPU alone.

    Attributes:
        own: As operations take it. False: those of all GPUs. None: what the operation chooses.
        is_open: Whether trials are to decide; until then, those of all GPUs are used.
    """

    __slots__ = ("is_open", "own")

    def __init__(self, device: torch.device, *, asked: bool | None) -> None:
        """Before any trial.

        Args:
            device: Of the layers.
            asked: What the environment asks for; that is done, without a trial.
        """
        self.is_open = asked is None and has_trials(device)
        self.own = False if self.is_open else asked

    def decide(self, *, is_passed: bool) -> None:
        """Take what came of the trials."""
        self.own = None if is_passed else False
        self.is_open = False


@runtime_checkable
class TriesKernels(Protocol):
    """A metadata builder whose layers may use kernels of their GPU's own."""

    kernels: KernelChoice

    def calls(self) -> list[Call]:
        """Describe the calls that its layers will make of the operation, which are to be tried."""
        ...


def choose_kernels(builders: Iterable[object], device: torch.device, *, start: str) -> None:
    """Choose the kernels of layers whose caches are bound.

    Args:
        builders: Metadata builders of the layers.
        device: Of the layers.
        start: Names this start of an engine to all its ranks.
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
            calls[call.key] = call  # the layer that lies last in the arena
    verdicts = _verdicts(calls, device, start=start) if calls else {}
    for builder, calls_of_one in zip(open_builders, calls_of, strict=True):
        builder.kernels.decide(is_passed=all(verdicts[call.key].is_passed for call in calls_of_one))


def _verdicts(calls: Mapping[str, Call], device: torch.device, *, start: str) -> dict[str, Verdict]:
    """What came of trials, held now or before, by keys of calls."""
    until = time.monotonic() + START_S
    kept = _Kept(_folder(device), start)
    verdicts = kept.read(calls)
    missing = {key: call for key, call in calls.items() if key not in verdicts}
    if missing:
        # Ranks come here at one time: one holds the trials, others wait for it.
        with kept.locked(missing, until) as is_turn:
            verdicts |= kept.read(missing)
            missing = {key: call for key, call in missing.items() if key not in verdicts}
            if is_turn:
                held = _hold(missing, device, until)
                kept.write(held)
            else:
                held = _untried(missing, f"another process did not end its own in {START_S:g} s")
            verdicts |= held
    for key, verdict in verdicts.items():
        if not verdict.is_passed:
            logger.warning(
                "The kernels of %s for this GPU have not passed their trial (%s); those of all "
                "GPUs are used, which may be slower.%s",
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
        return _untried(calls, f"others took the {START_S:g} s that a start has for trials")
    logger.info(
        "Trying the kernels of %s for this GPU, once on this machine and for %.0f s at most",
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
    """Get the folder of what came of trials on this GPU; None where none can be made."""
    try:
        folder = trials_folder(torch.cuda.get_device_name(device), triton.__version__)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        logger.warning("What comes of trials of kernels is not kept: %s", error)
        return None
    return folder


class _Kept:
    """What came of trials, in files by the keys of calls; no files where there is no folder.

    A verdict that is not final is there for the start of an engine that it was found in.
    """

    def __init__(self, folder: Path | None, start: str) -> None:
        self._folder = folder
        self._start = start

    def hint(self, key: str) -> str:
        """Say how another trial comes about, where this one's verdict is kept."""
        if self._folder is None:
            return ""
        return f" Another trial is held once {self._folder / key}.json is removed."

    def read(self, keys: Iterable[str]) -> dict[str, Verdict]:
        """Get the verdicts that are there and count, by keys."""
        if self._folder is None:
            return {}
        found = {key: _read(self._folder / f"{key}.json", self._start) for key in keys}
        return {key: verdict for key, verdict in found.items() if verdict is not None}

    def write(self, verdicts: Mapping[str, Verdict]) -> None:
        """Keep verdicts, by keys."""
        if self._folder is None:
            return
        try:
            for key, verdict in verdicts.items():
                said = {"verdict": asdict(verdict), "start": self._start}
                partial = self._folder / f"{key}.{os.getpid()}.partial"
                partial.write_text(json.dumps(said) + "\n", encoding="utf-8")
                partial.rename(self._folder / f"{key}.json")
        except OSError as error:
            logger.warning("What comes of trials of kernels is not kept: %s", error)

    @contextmanager
    def locked(self, keys: Iterable[str], until: float) -> Generator[bool]:
        """Wait for other processes with the same trials to end them, and let further ones wait.

        The system frees a lock when its holder dies.

        Args:
            keys: Of the calls.
            until: How long to wait, on the clock of `time.monotonic`.

        Yields:
            Whether it is this process's turn.
        """
        name = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:16]
        try:
            file = None if self._folder is None else (self._folder / f"{name}.lock").open("w")
        except OSError as error:
            logger.warning("Trials of kernels do not wait for those of other ranks: %s", error)
            file = None
        if file is None:
            yield True
            return
        with file:
            yield _take(file, until)


def _take(file: TextIO, until: float) -> bool:
    """Lock a file, unless another process holds it for too long."""
    is_waiting = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            # Who holds the lock stops in time, and has to write what came of it.
            if now > until + ENDED_S:
                return False
            if not is_waiting:
                logger.info(
                    "Another process tries kernels for this GPU (%s); waiting for it, %.0f s at "
                    "most",
                    file.name,
                    until + ENDED_S - now,
                )
                is_waiting = True
            time.sleep(POLL_S)
        except OSError as error:  # a file system without locks
            logger.warning("Trials of kernels do not wait for those of other ranks: %s", error)
            return True
        else:
            return True


def _read(path: Path, start: str) -> Verdict | None:
    """A verdict that is kept; None if there is none that can be read, or that counts here."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(**said["verdict"])
        return verdict if verdict.is_final or said["start"] == start else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
