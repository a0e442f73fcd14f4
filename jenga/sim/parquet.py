"""Rows of replays as Parquet (extra `parquet`): one table, a column for every field of every kind.

A column is null in rows of kinds that lack the field. `options` is JSON, as its members have any
type; `tables` is a map from page tables to their bytes.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

from jenga.sim.files import written_whole
from jenga.sim.rows import ROW_KINDS, Row, Spread, TableBytes

_GROUP_ROWS = 1 << 14
"""Rows of a row group, which are in memory together."""


def write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Write a file of rows, in place of one that may be there.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    schema = _schema(arrow)
    each = iter(rows)
    with (
        written_whole(path) as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        while group := list(map(_record, islice(each, _GROUP_ROWS))):
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))


def read_records(path: Path) -> Iterator[dict[str, object]]:
    """Rows of a file as their fields, those that are null left out.

    Raises:
        ValueError: It is no Parquet file of rows.
        ModuleNotFoundError: pyarrow is not installed.
    """
    for values in read_table(path):
        try:
            yield _fields(values)
        except (TypeError, ValueError, RecursionError) as error:
            msg = f"{path}: must be a Parquet file of rows: {error}"
            raise ValueError(msg) from error


def read_table(path: Path, *, batch_rows: int = _GROUP_ROWS) -> Iterator[dict[str, Any]]:
    """Rows of any Parquet file, as values of Python by the names of their columns.

    Args:
        path: The file.
        batch_rows: Rows that are in memory together.

    Raises:
        ValueError: It is no Parquet file, or damaged.
        OSError: It cannot be opened.
        ModuleNotFoundError: pyarrow is not installed.
    """
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    with path.open("rb") as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=batch_rows):
                yield from batch.to_pylist()
        except (arrow.ArrowException, ArithmeticError, OSError, TypeError, ValueError) as error:
            msg = f"{path}: must be a Parquet file: {' '.join(str(error).split())}"
            raise ValueError(msg) from error


def _fields(values: dict[str, Any]) -> dict[str, object]:
    """A row's fields, those that are null left out.

    Raises:
        TypeError: A field is not of the type that is written.
        ValueError: `options` is not JSON.
    """
    found = {name: value for name, value in values.items() if value is not None}
    if "options" in found:
        found["options"] = json.loads(found["options"])
    if "tables" in found:
        found["tables"] = dict(found["tables"])
    return found


def _record(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {"kind": row.kind, **asdict(row)}
    if "options" in values:
        values["options"] = json.dumps(values["options"])
    if "tables" in values:
        values["tables"] = list(values["tables"].items())
    return values


def _schema(arrow: Any) -> Any:  # noqa: ANN401  pyarrow ships no types
    """The columns: of equal name, equal type."""

    def struct(kind: type[Spread | TableBytes]) -> Any:  # noqa: ANN401
        hints = get_type_hints(kind)
        return arrow.struct([(each.name, plain[hints[each.name]]) for each in fields(kind)])

    plain: dict[object, Any] = {
        str: arrow.string(),
        int: arrow.int64(),
        float: arrow.float64(),
        float | None: arrow.float64(),
    }
    plain |= {
        dict[str, Any]: arrow.string(),
        Spread: struct(Spread),
        dict[str, TableBytes]: arrow.map_(arrow.string(), struct(TableBytes)),
    }
    columns = {"kind": plain[str]}
    for kind in ROW_KINDS.values():
        hints = get_type_hints(kind)
        columns |= {each.name: plain[hints[each.name]] for each in fields(kind)}
    return arrow.schema(list(columns.items()))
