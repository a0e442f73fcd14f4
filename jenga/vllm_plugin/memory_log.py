"""One JSON line per scheduler step on what the arena holds, for people and for the demo."""

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from jenga.vllm_plugin.environment import read_settings

if TYPE_CHECKING:
    from jenga.geometry import Geometry
    from jenga.manager import Manager


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


class MemoryLog:
    """Appends to a file what a manager holds, one line per step.

    The first line describes the geometry; each later one is a step: its number, the tokens each
    request has slots for, and the memory report, in bytes; with host memory, also what that holds
    and what was copied there and back since start-up.
    """

    def __init__(self, file: TextIO, manager: "Manager") -> None:
        self._file = file
        self._manager = manager
        self._num_steps = 0
        self._write({"geometry": _describe(manager.geometry)})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def step(self) -> None:
        """Write what the arena holds as a step begins."""
        tokens = self._manager.request_tokens()
        report = asdict(self._manager.memory())
        record = {"step": self._num_steps, "tokens": tokens, "memory": report}
        host = self._manager.host_report()
        self._write(record if host is None else record | {"host": asdict(host)})
        self._num_steps += 1


def open_memory_log(manager: "Manager", *, data_parallel_index: int = 0) -> MemoryLog | None:
    """Open the file that `JENGA_MEMORY_LOG` names, if it is set.

    Args:
        manager: What holds something.
        data_parallel_index: Which of several engines it is of; all but the first have files of
            their own, with this number in their names.
    """
    path = read_settings(os.environ).memory_log
    if path is None:
        return None
    if data_parallel_index:
        path = path.with_name(f"{path.stem}.{data_parallel_index}{path.suffix}")
    return MemoryLog(path.open("a", encoding="utf-8"), manager)
