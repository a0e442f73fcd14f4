"""Control of an engine's process: orders, replies with a time limit, and errors with its log."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.harness.machine import ROOT

LOG_FOLLOWS = "; its log ends:"
"""Last words of the first line of an error message. The end of the log follows."""

LAST_WORDS_S = 5.0
"""Seconds that a process has to end by itself after a signal, and to print its threads' stacks."""

LAST_LINES = 25
"""Number of lines of the log that an error message holds."""

STACK_LINES = 80
"""The same number after a timeout, when the log ends with the stacks of all threads."""

POLL_S = 0.2
"""Seconds between two checks that the process is alive."""


class EngineError(RuntimeError):
    """An engine failed; the message holds the end of its log."""


class EngineTimeoutError(EngineError):
    """An engine exceeded a time limit. Its log ends with the stacks of all its threads."""


class EngineProcess:
    """A process that receives orders and replies to them.

    The process has a process group of its own, so that its children end with it. PYTHONFAULTHANDLER
    is set, so that a signal makes it print the stacks of all its threads.

    Args:
        command: The command. `--replies FD` is appended.
        environment: Its environment variables.
        log: File for its standard output and standard error.
        label: Name of the process in error messages.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, label: str
    ) -> None:
        self.label = label
        self._log = log
        self._received = b""
        self._replies, their_replies = os.pipe()
        their_orders, orders = os.pipe()
        self._orders = os.fdopen(orders, "wb")
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w") as file:
                self._process = subprocess.Popen(
                    [*command, "--replies", str(their_replies)],
                    cwd=ROOT,
                    env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
                    stdin=their_orders,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    pass_fds=[their_replies],
                    start_new_session=True,
                )
        finally:
            os.close(their_replies)
            os.close(their_orders)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)

    def order(self, **order: object) -> None:
        """Send an order.

        Raises:
            EngineError: The process has ended.
        """
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._failure(self._process.wait()) from error

    def reply(self, cap_s: float) -> dict[str, Any]:
        """Wait for the next reply.

        Args:
            cap_s: Seconds after which the process is killed.

        Raises:
            EngineTimeoutError: There was no reply in `cap_s` seconds.
            EngineError: The process ended without a reply.
        """
        deadline_s = time.monotonic() + cap_s
        while b"\n" not in self._received:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._failure(self._end(signal.SIGABRT), cap_s=cap_s)
            ready = self._selector.select(min(POLL_S, left_s))
            received = os.read(self._replies, 1 << 16) if ready else b""
            self._received += received
            # A child of the process that is still alive may hold the other end of the pipe.
            is_over = ready and not received
            if is_over or (not ready and self._process.poll() is not None):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LAST_WORDS_S)
                raise self._failure(self._end(signal.SIGTERM))
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def close(self, cap_s: float = LAST_WORDS_S) -> None:
        """End the process by closing its orders, and kill it if it is alive after `cap_s`."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(cap_s)
        self._end(signal.SIGTERM)
        self._selector.close()
        with contextlib.suppress(OSError):
            os.close(self._replies)

    def _end(self, number: signal.Signals) -> int:
        """Signal the process group, kill it if it is still alive, and return its exit status."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                self._process.wait(LAST_WORDS_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _failure(self, status: int, *, cap_s: float | None = None) -> EngineError:
        """Make an error from the exit status and the end of the log. `cap_s` means a timeout."""
        lines = self._log.read_text(errors="replace").splitlines()
        if cap_s is None:
            said = f"{self.label} ended with {status}"
            return EngineError("\n".join([said + LOG_FOLLOWS, *lines[-LAST_LINES:]]))
        said = f"{self.label} took longer than {cap_s:.0f} s and was ended with {status}"
        return EngineTimeoutError("\n".join([said + LOG_FOLLOWS, *lines[-STACK_LINES:]]))
