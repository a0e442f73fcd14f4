"""What a run's memory log says, as records. The log is the one `JENGA_MEMORY_LOG` names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A layer that stores keys and values, or a state.

    Attributes:
        name: The layer's name in its model.
        slot_bytes: Bytes of one token, or of one state.
    """

    name: str
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTable:
    """One page table of the geometry a run chose.

    Attributes:
        name: The page table's name.
        layer_type: Name of the layer type it stores, or stores a part of.
        layers: The layers stored in its small pages.
        window_tokens: Tokens a query reads, for sliding windows.
        is_state: Whether a small page holds one state instead of tokens.
        tokens_per_page: Tokens of a small page.
        small_page_bytes: Bytes of a small page, padding included.
        padding_bytes: Bytes of a small page that never hold data.
        small_pages_per_large_page: Small pages in one large page.
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
    """What was held as a scheduler step began.

    Attributes:
        request_tokens: Tokens that each running request has slots for.
        needed_bytes: Per layer type, slots that a next token reads or writes.
        held_bytes: Per layer type, the large pages it holds.
    """

    request_tokens: dict[str, int]
    needed_bytes: dict[str, int]
    held_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run's geometry and its steps.

    Attributes:
        geometry_name: The rule that made the geometry.
        large_page_bytes: The unit the arena is cut into.
        tables: The page tables.
        steps: In the order they ran.
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
        ValueError: The log is empty, or not of this form.
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
