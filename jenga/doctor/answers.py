"""Ask torch and vLLM in separate processes, because an import may fail, be slow or print a lot."""

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jenga.doctor.processes import Running, module_command, module_environ

MODULE = "jenga.vllm_plugin.without_engine.self_check"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAnswer:
    """Answer of torch and Triton.

    Attributes:
        num_gpus: Number of GPUs that torch can use.
        warning: Torch's warning if it can use none; often empty.
    """

    num_gpus: int
    warning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmAnswer:
    """Answer of vLLM.

    Attributes:
        num_names: Number of names of vLLM that the plugin replaces.
        mismatches: A sentence for each name that differs from the one the plugin was written for.
        unknown: A sentence for each name that could not be compared without a GPU.
    """

    num_names: int
    mismatches: tuple[str, ...]
    unknown: tuple[str, ...]


class Questions:
    """Questions that are being answered in other processes. A failed one is answered by a text.

    >>> with Questions(asks_torch=True, asks_vllm=True) as questions:  # doctest: +SKIP
    ...     answer = questions.torch()
    """

    def __init__(self, *, asks_torch: bool, asks_vllm: bool) -> None:
        """Start the processes, and do not wait for answers.

        Args:
            asks_torch: Whether to ask torch and Triton, which must be installed.
            asks_vllm: Whether to ask vLLM, which must be installed.
        """
        self._stack = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="jenga-doctor-", ignore_cleanup_errors=True)
        self._folder = Path(self._stack.enter_context(folder))
        self._running: dict[str, Running | str] = {}
        for subject, is_asked in (("torch", asks_torch), ("vllm", asks_vllm)):
            if is_asked:
                self._running[subject] = self._ask(subject)

    def torch(self) -> TorchAnswer | str | None:
        """Wait for torch's answer, or the reason why there is none; None if it was not asked."""
        answer = self._answer("torch")
        return TorchAnswer(**answer) if isinstance(answer, dict) else answer

    def vllm(self) -> VllmAnswer | str | None:
        """Wait for vLLM's answer, or the reason why there is none; None if it was not asked."""
        answer = self._answer("vllm")
        if not isinstance(answer, dict):
            return answer
        return VllmAnswer(
            num_names=answer["num_names"],
            mismatches=tuple(answer["mismatches"]),
            unknown=tuple(answer["unknown"]),
        )

    def __enter__(self) -> "Questions":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _ask(self, subject: str) -> Running | str:
        command = module_command(MODULE, subject, str(self._file(subject)))
        try:
            running = Running(command, environ=module_environ(os.environ))
        except OSError as error:
            return f"no process could be started: {error}"
        return self._stack.enter_context(running)

    def _answer(self, subject: str) -> dict[str, Any] | str | None:
        running = self._running.get(subject)
        if running is None or isinstance(running, str):
            return running
        ended = running.wait()
        file = self._file(subject)
        if not file.exists():
            return ended.reason
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return str(answer["error"]) if "error" in answer else answer

    def _file(self, subject: str) -> Path:
        return self._folder / f"{subject}.json"
