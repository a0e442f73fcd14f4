"""Run programs and modules in separate processes, within a time limit.

Their output goes to files. With a pipe, a surviving grandchild could keep the reader waiting.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import jenga

LIMIT_S = 300.0
"""Time limit of one process. An import of vLLM takes 5 to 15 s on an idle machine."""

_KILLED_S = 5.0
"""Time to wait for a killed process. One that hangs in a driver may stay longer and is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a process that has ended or passed its time limit.

    Attributes:
        exit_code: Exit code as Python reports it, negative for a signal; None after a timeout.
        output: Text of standard output.
        errors: Text of standard error.
    """

    exit_code: int | None
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """Reason of a failure: the exit status, and the last line of standard error."""
        if self.exit_code is None:
            return f"no answer within {LIMIT_S:g} s"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return ": ".join([f"ended with status {self.exit_code}", *lines[-1:]])


class Running:
    """A process that runs in parallel to this one.

    >>> with Running(["nvidia-smi"]) as running:  # doctest: +SKIP
    ...     ended = running.wait()
    """

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str] | None = None) -> None:
        """Start the process.

        Args:
            command: The program and its arguments.
            environ: Environment of the process; None takes the environment of this one.

        Raises:
            OSError: The process could not be started.
        """
        self._folder = tempfile.TemporaryDirectory(
            prefix="jenga-doctor-", ignore_cleanup_errors=True
        )
        output, errors = self._files()
        try:
            with output.open("wb") as out, errors.open("wb") as err:
                self._process = subprocess.Popen(
                    command,
                    env=None if environ is None else dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        except BaseException:
            self._folder.cleanup()
            raise

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait until the process ends; kill it after the time limit."""
        try:
            exit_code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
            self._kill()
        output, errors = (file.read_text(errors="replace") for file in self._files())
        return Ended(exit_code=exit_code, output=output, errors=errors)

    def __enter__(self) -> "Running":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill()
        self._folder.cleanup()

    def _files(self) -> tuple[Path, Path]:
        folder = Path(self._folder.name)
        return folder / "output", folder / "errors"

    def _kill(self) -> None:
        """Kill the process group: the process, and the processes that it started in the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)


def module_command(module: str, *arguments: str) -> list[str]:
    """Get the command that runs a module of this package and ignores the user's folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Get the environment in which a module of this copy of the package is found."""
    packages = [str(Path(path).parent) for path in jenga.__path__]
    path = os.pathsep.join([*packages, *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, "PYTHONPATH": path}
