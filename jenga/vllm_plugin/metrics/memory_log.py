"""Log of the arena's content, one JSON line per scheduler step, for users and for the demo.

A file that cannot be written is refused before the engine starts. After that, the log never stops
the engine: if a line cannot be written, as on a full disk, this is logged once, and no further line
is written.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

from vllm.logger import init_logger

from jenga.vllm_plugin.settings.environment import MEMORY_LOG_VARIABLE, Settings, read_settings

if TYPE_CHECKING:
    from jenga.geometry import Geometry
    from jenga.manager import Manager
    from jenga.prefix.eviction_log import Eviction
    from jenga.prefix.miss_log import Miss

logger = init_logger(f"vllm.{__name__}")


def check_memory_log(settings: Settings) -> None:
    """Check that the memory log can be written, and make its file. Without a log, do nothing.

    Raises:
        ValueError: `JENGA_MEMORY_LOG` names a folder, a pipe or a device, or a file that cannot be
            opened for writing. The message has the variable, the path and the reason.
    """
    path = settings.memory_log
    if path is not None and (reason := _reason_against(path)):
        msg = f"{MEMORY_LOG_VARIABLE}={str(path)!r} cannot be written: {reason}"
        raise ValueError(msg)


def _reason_against(path: Path) -> str | None:
    """Get the reason why a file cannot be appended to. None means that it can, and now exists."""
    try:
        # A pipe without a reader would block the writer.
        if path.exists() and not path.is_file():
            return "it is a folder" if path.is_dir() else "it is a pipe or a device, not a file"
        with path.open("a", encoding="utf-8"):
            return None
    except OSError as error:
        return error.strerror or str(error)


class _Lines(RotatingFileHandler):
    """A file of lines with a header. When it is full, it is renamed, and a new file begins."""

    def __init__(self, path: Path, header: str, *, max_bytes: int) -> None:
        """Append the header to the file.

        Args:
            path: Path of the file. When the file is full, `.1` is appended to its name.
            header: First line of each file, which describes the others.
            max_bytes: Largest size of a file in bytes. A header and one line are always written. 0
                means no limit.

        Raises:
            OSError: The file cannot be opened.
        """
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
        self._has_failed = False
        self._header = ""
        self.write(header)
        self._header = header

    def write(self, line: str) -> None:
        """Write a line, unless an earlier write has failed."""
        if not self._has_failed:
            self.handle(makeLogRecord({"msg": line}))

    def doRollover(self) -> None:  # noqa: N802 - the base class's name
        """Rename the file, and begin a new one with the header."""
        super().doRollover()
        if self._header and self.stream is not None:
            self.stream.write(self._header + self.terminator)

    def handleError(self, record: LogRecord) -> None:  # noqa: N802 - the base class's
        """Log why a line could not be written, and write no further line."""
        self._has_failed = True
        logger.warning(
            "%s=%r is no longer written: %s",
            MEMORY_LOG_VARIABLE,
            self.baseFilename,
            sys.exc_info()[1],
        )
        with contextlib.suppress(OSError):
            self.close()


class MemoryLog:
    """Writes a line about a manager's memory to a file in each step.

    The first line describes the geometry. Each later line is a step: its number, the number of
    tokens for which each request has slots, and the memory report in bytes. With host memory, it
    also has the content of host memory and the bytes copied there and back since start-up. If
    checkpoints were lost since the line before, it says which ones, for which requests and why
    (`jenga.prefix.eviction_log`). If requests were admitted since, it says what they found, and why
    not more (`jenga.prefix.miss_log`). The file is closed when the log is destroyed.
    """

    def __init__(self, path: Path, manager: "Manager", *, max_bytes: int = 0) -> None:
        """Open the file and write its first line.

        Args:
            path: Path of the file.
            manager: Manager that is reported.
            max_bytes: Size in bytes beyond which the file is renamed and a new one begins. 0 means
                no limit.

        Raises:
            OSError: The file cannot be opened.
        """
        header = json.dumps({"geometry": _describe(manager.geometry)})
        self._file = _Lines(path, header, max_bytes=max_bytes)
        finalize(self, self._file.close)
        self._manager = manager
        self._num_steps = 0
        self._misses: list[Miss] = []
        manager.record_evictions()

    def add_misses(self, misses: list["Miss"]) -> None:
        """Add look-ups that another reader took from the manager to the line of the next step."""
        self._misses += misses

    def step(self) -> None:
        """Write the line of a step that begins now."""
        tokens = self._manager.request_tokens()
        report = asdict(self._manager.memory())
        record: dict[str, Any] = {"step": self._num_steps, "tokens": tokens, "memory": report}
        host = self._manager.host_report()
        if host is not None:
            record["host"] = asdict(host)
        if evictions := self._manager.take_evictions():
            record["evictions"] = list(map(_describe_eviction, evictions))
        if misses := self._misses + self._manager.take_misses():
            record["misses"] = list(map(_describe_miss, misses))
            self._misses = []
        self._file.write(json.dumps(record))
        self._num_steps += 1


def open_memory_log(manager: "Manager", *, data_parallel_index: int = 0) -> MemoryLog | None:
    """Open the file that `JENGA_MEMORY_LOG` names, if it is set and can still be written.

    Args:
        manager: Manager that is reported.
        data_parallel_index: Index of the manager's engine among data-parallel ones. All except the
            first write to files with this number in their names.

    Returns:
        The log, or None if the variable is not set or the file cannot be written.
    """
    settings = read_settings(os.environ)
    path = settings.memory_log
    if path is None:
        return None
    if data_parallel_index:
        path = path.with_name(f"{path.stem}.{data_parallel_index}{path.suffix}")
    reason = _reason_against(path)
    if reason is None:
        try:
            return MemoryLog(path, manager, max_bytes=settings.memory_log_bytes)
        except OSError as error:  # it could be written when it was checked
            reason = str(error)
    logger.warning("%s=%r cannot be written: %s", MEMORY_LOG_VARIABLE, str(path), reason)
    return None


def _describe_eviction(eviction: "Eviction") -> dict[str, Any]:
    return {
        "cause": eviction.cause.value,
        "left_by": eviction.left_by,
        "for_request": eviction.for_request,
        "point": eviction.kind.name,
        "past": eviction.past.name,
        "num_tokens": eviction.num_tokens,
        "kept_tokens": eviction.kept_tokens,
        "freed_bytes": eviction.freed_bytes,
        "worth": eviction.worth,
        "was_awaited": eviction.was_awaited,
    }


def _describe_miss(miss: "Miss") -> dict[str, Any]:
    losses = [
        {
            "cause": each.loss.cause,
            "step": each.loss.taken,
            "left_by": each.loss.left_by,
            "for_request": each.loss.for_request,
            "evicted_tokens": each.evicted_tokens,
            "bare_tokens": each.bare_tokens,
        }
        for each in miss.losses
    ]
    return {**asdict(miss), "losses": losses}


def _describe(geometry: "Geometry") -> dict[str, Any]:
    return {
        "name": geometry.name,
        "large_page_bytes": geometry.large_page_bytes,
        "page_tables": [
            {
                "name": table.name,
                "layer_type": table.layer_type.name,
                "layer_names": [layer.name for layer in table.layers],
                "slot_bytes": [layer.slot_bytes for layer in table.layers],
                "window_tokens": getattr(table.layer_type, "window_tokens", None),
                "is_state": table.is_state,
                "tokens_per_page": table.tokens_per_page,
                "small_page_bytes": table.small_page_bytes,
                "padding_bytes": table.padding_bytes,
                "small_pages_per_large_page": table.small_pages_per_large_page,
            }
            for table in geometry.page_tables
        ],
    }
