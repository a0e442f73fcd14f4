"""Run Python programs in processes that begin with the libraries of vLLM imported.

Every engine of the tests has a process of its own. To import vLLM takes some 13 seconds of a
processor, of which 11 go into PyTorch, transformers and other libraries. These are imported once
for each environment, in a process that forks a child for each program (`tests/warm_process.py`).
vLLM, the plugin and its settings are as new in each program as in a process started for it.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SERVER = Path(__file__).with_name("warm_process.py")

READ_LATE = ("VLLM_", "JENGA_", "PYTEST_")
"""Beginnings of variables that nothing reads before vLLM or the plugin is imported."""

READ_EARLY = (("VLLM_USE_V2_MODEL_RUNNER", "1"),)
"""Exceptions: `interpreted_triton/sitecustomize.py` looks for them as the interpreter begins."""

MAX_SERVERS = 4
"""Most processes with libraries that are kept, of half a gigabyte each."""


@dataclass(frozen=True)
class Ended:
    """A program that has come to its end: its exit code, and the texts that it wrote."""

    returncode: int
    stdout: str
    stderr: str


class _Server:
    """A process with the libraries imported in one environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, SERVER, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def run(self, arguments, variables, folder, outputs) -> int:
        """Run one program and get its exit code. What it started and left is killed."""
        request = {"arguments": arguments, "variables": variables, "folder": folder}
        descriptors = [each.fileno() for each in outputs]
        with suppress(ConnectionError):  # the process has ended, which the answer tells
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        process_id = self._answer()
        try:
            return self._answer()
        finally:
            # Workers of an engine that was killed may wait for it for ever.
            with suppress(ProcessLookupError):
                os.killpg(process_id, signal.SIGKILL)

    def _answer(self) -> int:
        answer = b""
        with suppress(ConnectionError):
            answer = self._socket.recv(64)
        if not answer:
            message = f"{SERVER.name} ended with {self._process.wait()}; its output says why"
            raise RuntimeError(message)
        return int(answer)

    def close(self) -> None:
        """End the process; it may be waiting for a program that was killed."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


_SERVERS: dict[tuple, _Server] = {}


@atexit.register
def _close() -> None:
    while _SERVERS:
        _SERVERS.popitem()[1].close()


def run(arguments, environment, *, folder=None, merges=False) -> Ended:
    """Run what the interpreter of the tests would run with some arguments, to its end.

    Args:
        arguments: A file and its arguments, or such that begin with `-c` or `-m`.
        environment: All variables of the program.
        folder: The folder it runs in; that of the tests by default.
        merges: Whether what it writes to standard error goes to standard output.

    Raises:
        RuntimeError: The process with the libraries ended; its own output says why.
    """
    late = {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_LATE) and (name, value) not in READ_EARLY
    }
    early = {name: value for name, value in environment.items() if name not in late}
    key = tuple(sorted(early.items()))
    server = _SERVERS.pop(key, None) or _Server(early)
    _SERVERS[key] = server  # the last is the one that was used last
    if len(_SERVERS) > MAX_SERVERS:
        _SERVERS.pop(next(iter(_SERVERS))).close()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        outputs = (stdout, stdout if merges else stderr)
        try:
            returncode = server.run(
                list(map(str, arguments)), late, os.fspath(folder or Path.cwd()), outputs
            )
        except BaseException:
            # The answer to a program that is cut short would be taken for that to the next one.
            _SERVERS.pop(key).close()
            raise
        texts = []
        for each in (stdout, stderr):
            each.seek(0)
            texts.append(each.read().decode(errors="replace"))
    return Ended(returncode, *texts)
