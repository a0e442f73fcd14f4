"""Parquet files (extra `parquet`): any table, and records with a column for every field.

A column is null in records without that field. A mapping to values of any type is stored as JSON.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from jenga.sim.files.whole_files import written_whole

_GROUP_ROWS = 1 << 14
"""Number of rows in a row group. They are in memory together."""


def write_records(
    path: Path, records: Iterable[Mapping[str, Any]], columns: Mapping[str, object]
) -> None:
    """Write a file of records, and replace an existing one.

    Args:
        path: The file.
        records: Records with values for some columns. Values of a dataclass type are mappings.
        columns: Column -> type of its values: `str`, `bool`, `int`, `float`, `float | None`, a
            dataclass of those, a list of such a dataclass, or a dictionary from strings to such a
            dataclass, to `int` or to anything.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    schema = arrow.schema([(name, _type(arrow, hint)) for name, hint in columns.items()])
    each = iter(records)
    with (
        written_whole(path) as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        while group := [_encoded(record, columns) for record in islice(each, _GROUP_ROWS)]:
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))


def read_records(path: Path, columns: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the records of a file, without the columns that are null.

    Args:
        path: The file.
        columns: Columns with which the file was written. It may have others, too.

    Raises:
        ValueError: The file is not Parquet, or a value does not have its column's type.
        ModuleNotFoundError: pyarrow is not installed.
    """
    for values in read_table(path):
        try:
            yield _decoded(values, columns)
        except (TypeError, ValueError, RecursionError) as error:
            msg = f"{path}: must be a Parquet file of rows: {error}"
            raise ValueError(msg) from error


def read_table(path: Path, *, batch_rows: int = _GROUP_ROWS) -> Iterator[dict[str, Any]]:
    """Yield the rows of any Parquet file, as Python values by column name.

    Args:
        path: The file.
        batch_rows: Number of rows that are in memory together.

    Raises:
        ValueError: The file is not Parquet, or is damaged.
        OSError: The file cannot be opened.
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


def _is_json(hint: object) -> bool:
    return get_origin(hint) is dict and get_args(hint)[1] is Any


def _encoded(record: Mapping[str, Any], columns: Mapping[str, object]) -> dict[str, Any]:
    """Return a record's values as Parquet stores them."""
    values = dict(record)
    for name, value in record.items():
        if _is_json(columns[name]):
            values[name] = json.dumps(value)
        elif get_origin(columns[name]) is dict:
            values[name] = list(value.items())
    return values


def _decoded(values: Mapping[str, Any], columns: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a record that are not null.

    Raises:
        TypeError: A value does not have the type that is written.
        ValueError: A value is not JSON.
    """
    found: dict[str, object] = {}
    for name, value in values.items():
        if value is None:
            continue
        hint = columns.get(name)
        if _is_json(hint):
            found[name] = json.loads(value)
        else:
            found[name] = dict(value) if get_origin(hint) is dict else value
    return found


def _type(arrow: Any, hint: Any) -> Any:  # noqa: ANN401  pyarrow ships no types
    """Return the Arrow type of a column."""
    if hint is str or _is_json(hint):
        return arrow.string()
    if hint is bool:
        return arrow.bool_()
    if hint is int:
        return arrow.int64()
    if hint in (float, float | None):
        return arrow.float64()
    if get_origin(hint) in (dict, list):
        member = _type(arrow, get_args(hint)[-1])
        return (
            arrow.list_(member) if get_origin(hint) is list else arrow.map_(arrow.string(), member)
        )
    hints = get_type_hints(hint)
    return arrow.struct([(each.name, _type(arrow, hints[each.name])) for each in fields(hint)])
