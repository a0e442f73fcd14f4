"""Records of a run's memory log, the file that `JENGA_MEMORY_LOG` names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A layer that stores keys and values, or a state.

    Attributes:
        name: Name of the layer in its model.
        slot_bytes: Size in bytes of one token, or of one state.
    """

    name: str
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTable:
    """One page table of the geometry that a run chose.

    Attributes:
        name: Name of the page table.
        layer_type: Name of the layer type that it stores all or a part of.
        layers: Layers that its small pages store.
        window_tokens: Number of tokens that a query of a sliding window reads. None means that
            the layer type has no sliding window.
        is_state: Whether a small page holds one state instead of tokens.
        tokens_per_page: Number of tokens of a small page.
        small_page_bytes: Size in bytes of a small page, padding included.
        padding_bytes: Bytes of a small page that never hold data.
        small_pages_per_large_page: Number of small pages in one large page.
    """

    name: str
    layer_type: str
    layers: tuple[StoredLayer, ...]
    window_tokens: int | None
    is_state: bool
    tokens_per_page: int
    small_page_bytes: int
    padding_bytes: int
    small_pages_per_large_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Memory held at the beginning of a scheduler step.

    Attributes:
        request_tokens: Number of tokens that each running request has slots for, by request id.
        needed_bytes: For each layer type, bytes of the slots that a next token reads or writes.
        held_bytes: For each layer type, bytes of the large pages that it holds.
    """

    request_tokens: dict[str, int]
    needed_bytes: dict[str, int]
    held_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run's geometry and its steps.

    Attributes:
        geometry_name: Name of the rule that made the geometry.
        large_page_bytes: Size in bytes of a large page.
        tables: Page tables of the geometry.
        steps: Steps, in the order they ran.
    """

    geometry_name: str
    large_page_bytes: int
    tables: tuple[StoredTable, ...]
    steps: tuple[Step, ...]

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Names of the layer types, each once, in the geometry's order."""
        return tuple(dict.fromkeys(table.layer_type for table in self.tables))


def read_memory_log(path: Path) -> Timeline:
    """Read the log of one engine.

    Raises:
        ValueError: The log is empty, does not begin with a geometry, or is not lines of JSON.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not records or "geometry" not in records[0]:
        msg = f"the memory log {path} must begin with a geometry, got {records[:1]}"
        raise ValueError(msg)
    geometry = records[0]["geometry"]
    tables = tuple(_table(record) for record in geometry["page_tables"])
    type_of = {table.name: table.layer_type for table in tables}
    return Timeline(
        geometry_name=geometry["name"],
        large_page_bytes=geometry["large_page_bytes"],
        tables=tables,
        steps=tuple(_step(record, type_of) for record in records[1:]),
    )


def _table(record: dict[str, Any]) -> StoredTable:
    layers = zip(record["layer_names"], record["slot_bytes"], strict=True)
    return StoredTable(
        name=record["name"],
        layer_type=record["layer_type"],
        layers=tuple(StoredLayer(name=name, slot_bytes=slot_bytes) for name, slot_bytes in layers),
        window_tokens=record["window_tokens"],
        is_state=record["is_state"],
        tokens_per_page=record["tokens_per_page"],
        small_page_bytes=record["small_page_bytes"],
        padding_bytes=record["padding_bytes"],
        small_pages_per_large_page=record["small_pages_per_large_page"],
    )


def _step(record: dict[str, Any], type_of: dict[str, str]) -> Step:
    needed_bytes = dict.fromkeys(type_of.values(), 0)
    held_bytes = dict.fromkeys(type_of.values(), 0)
    for table in record["memory"]["tables"]:
        layer_type = type_of[table["name"]]
        needed_bytes[layer_type] += table["used_bytes"]
        held_bytes[layer_type] += sum(
            table[f"{condition}_bytes"] for condition in ("used", "useless", "evictable", "empty")
        )
    return Step(request_tokens=record["tokens"], needed_bytes=needed_bytes, held_bytes=held_bytes)
