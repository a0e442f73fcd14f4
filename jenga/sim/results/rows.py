"""Rows of a replay: what was run, where the bytes were, how requests fared, and what it came to.

A file of rows holds one JSON object a line, or is a Parquet file with the same fields as columns.
Its `kind` names the row, `run` joins the rows of one replay, and a file may hold several runs.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from jenga.sim.files.lines import lines_of
from jenga.sim.files.parquet import read_records, write_records


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A replay as it was asked for.

    Attributes:
        run: Joins the rows of a replay.
        model: Name of the model.
        tp: Ranks over which layers are divided; bytes are of one rank.
        kv_format: Data type of keys and values.
        gpu: Name of the GPU, empty where only bytes were given.
        arena_bytes: Bytes for caches, of one rank.
        manager: What manages them.
        eviction: Its eviction order.
        trace: Where the requests came from.
        num_requests: How many were replayed.
        options: Every other argument that changes the outcome.
        jenga_version: Of this package.
    """

    kind: ClassVar[str] = "run"

    run: str
    model: str
    tp: int = 1
    kv_format: str = "auto"
    gpu: str = ""
    arena_bytes: int
    manager: str
    eviction: str = ""
    trace: str
    num_requests: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    jenga_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBytes:
    """Bytes of one page table of all requests, as in `StepRow`."""

    used_bytes: int = 0
    useless_bytes: int = 0
    cached_bytes: int = 0
    empty_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Where every byte of the arena was in one step.

    Attributes:
        run: Joins the rows of a replay.
        step: Number of the step, from 1.
        time_s: Modelled time at which it begins.
        num_running: Requests running.
        num_waiting: Requests that have arrived and wait.
        num_decoding: Requests that compute one token in this step.
        prefill_tokens: Tokens of prompts computed in this step.
        used_bytes: Slots that the next tokens of running requests read or write.
        useless_bytes: The rest of running requests' small pages.
        cached_bytes: Small pages kept for other requests, that no running request uses.
        empty_bytes: Small pages that hold nothing, in large pages that hold something.
        unallocated_bytes: Large pages that hold nothing.
        tables: The same per page table.
    """

    kind: ClassVar[str] = "step"

    run: str
    step: int
    time_s: float
    num_running: int
    num_waiting: int
    num_decoding: int
    prefill_tokens: int
    used_bytes: int
    useless_bytes: int
    cached_bytes: int
    empty_bytes: int
    unallocated_bytes: int
    tables: dict[str, TableBytes] = field(default_factory=dict[str, TableBytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """How one request fared; seconds are modelled.

    Attributes:
        run: Joins the rows of a replay.
        request: Name of the request.
        prompt_tokens: Tokens of its prompt.
        output_tokens: Tokens after it.
        hit_tokens: Tokens of its prompt found cached when it was first admitted.
        arrival_s: When it arrived.
        first_token_s: When its first token was there; -1 for none.
        finished_s: When its last token was there; -1 if it never was.
        num_preemptions: How often it lost its pages.
        refused: Why it could never run, empty for those that did.
    """

    kind: ClassVar[str] = "request"

    run: str
    request: str
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    arrival_s: float
    first_token_s: float
    finished_s: float
    num_preemptions: int
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution of modelled seconds."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """What a replay came to; seconds are modelled, tokens and bytes are counted.

    Attributes:
        run: Joins the rows of a replay.
        num_steps: Steps.
        seconds: From the first arrival to the last token.
        num_requests: Requests that finished.
        num_refused: Requests that the arena could never hold.
        prompt_tokens: Of all requests.
        output_tokens: Of all requests.
        hit_tokens: Tokens of prompts found cached when their request was first admitted.
        hit_rate: Hit tokens of all prompt tokens.
        waste: 1 - used / (used + useless + empty) bytes, mean over the steps looked at in which a
            request decodes; cached bytes are not held. None where no such step was looked at.
        busy_waste: The same, mean over those of them with half the requests decoding or more that
            ever were: without the end of a run, when little is held. None in old rows, too.
        waste_of_bytes: Bytes held and not used of all bytes held, summed over the same steps as
            `waste`: a step counts by what it holds.
        mean_decode_batch: Requests that decode, mean over steps in which one does.
        num_preemptions: Requests that lost their pages, each time counted.
        evicted_pages: Cached small pages given to others.
        stored_bytes: Copied to host memory, of one rank.
        loaded_bytes: Copied from there.
        ahead_bytes: Of both, what was copied beside the kernels of a step.
        requests_per_s: Requests finished.
        tokens_per_s: Tokens after prompts.
        ttft_s: From arrival to the first token.
        tpot_s: From one token to the next, mean of each request with several.
        e2e_s: From arrival to the last token.
    """

    kind: ClassVar[str] = "summary"

    run: str
    num_steps: int
    seconds: float
    num_requests: int
    num_refused: int = 0
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    hit_rate: float
    waste: float | None
    busy_waste: float | None = None
    waste_of_bytes: float | None = None
    mean_decode_batch: float
    num_preemptions: int
    evicted_pages: int
    stored_bytes: int = 0
    ahead_bytes: int = 0
    loaded_bytes: int = 0
    requests_per_s: float
    tokens_per_s: float
    ttft_s: Spread = field(default_factory=Spread)
    tpot_s: Spread = field(default_factory=Spread)
    e2e_s: Spread = field(default_factory=Spread)


_LEAST = {"first_token_s": -1, "finished_s": -1}
"""Least values of fields that may be negative: a request that was refused has neither time."""

_MOST = (1 << 63) - 1
"""The largest number of a row: the largest integer that Parquet holds."""

_SHOWN = 80
"""Characters of a wrong value that an error shows."""

Row = RunRow | StepRow | RequestRow | SummaryRow

ROW_KINDS: dict[str, type[Row]] = {
    kind.kind: kind for kind in (RunRow, StepRow, RequestRow, SummaryRow)
}
"""Kinds of rows by their names."""


def row_line(row: Row) -> str:
    """A row as one line of JSON, its end of line included."""
    return json.dumps({"kind": row.kind, **asdict(row)}) + "\n"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to the end of a file, which is made if there is none."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(row_line, rows))


def write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Write a file of Parquet, in place of one that may be there.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    write_records(path, ({"kind": row.kind, **asdict(row)} for row in rows), _columns())


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file, one at a time: of lines of JSON, or of Parquet where its name says so.

    Raises:
        ValueError: A line is not a row; the line and the field are named.
        ModuleNotFoundError: pyarrow is not installed, which reads Parquet.
    """
    if is_parquet(path):
        for number, values in enumerate(read_records(path, _columns()), start=1):
            yield _row(values, f"{path}, row {number}")
        return
    yield from rows_of_lines(path, lines_of(path))


def rows_of_lines(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    """Rows of lines of JSON.

    Args:
        path: The file they are from, for errors.
        lines: Its lines, from the first on; empty ones are passed over.

    Raises:
        ValueError: A line is not a row; the line and the field are named.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _columns() -> dict[str, object]:
    """Columns of Parquet: of equal name, equal type."""
    columns: dict[str, object] = {"kind": str}
    for kind in ROW_KINDS.values():
        hints = get_type_hints(kind)
        columns |= {each.name: hints[each.name] for each in fields(kind)}
    return columns


def is_parquet(path: Path) -> bool:
    """Whether a file of this name holds Parquet."""
    return path.suffix.lower() == ".parquet"


def _parsed(line: str, where: str) -> dict[str, object]:
    try:
        values = _object(json.loads(line))
    except (ValueError, RecursionError):
        values = None
    if values is None:
        msg = f"{where}: a row must be one JSON object, got {line.strip()[:60]!r}"
        raise ValueError(msg)
    return values


def _row(values: dict[str, object], where: str) -> Row:
    name = str(values.pop("kind", None))
    if name not in ROW_KINDS:
        msg = f"{where}: kind must be one of {', '.join(ROW_KINDS)}, got {_shown(name)}"
        raise ValueError(msg)
    return _record(ROW_KINDS[name], values, where)


def _object(value: object) -> dict[str, object] | None:
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


_Record = TypeVar("_Record", bound=Row | Spread | TableBytes)


def _record(kind: type[_Record], values: dict[str, object], where: str) -> _Record:
    """A dataclass of plain values, each checked."""
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind)]
    if unknown := values.keys() - set(names):
        msg = f"{where}: a row {kind.__name__} has no field {_shown(min(unknown))}"
        raise ValueError(msg)
    known = {name: _value(hints[name], value, where, name) for name, value in values.items()}
    try:
        return kind(**known)
    except TypeError as error:
        missing = ", ".join(name for name in names if name not in known)
        msg = f"{where}: a row {kind.__name__} must have the fields {missing}"
        raise ValueError(msg) from error


def _value(hint: Any, value: object, where: str, name: str) -> Any:  # noqa: ANN401  JSON
    members = _object(value)
    if members is not None and hint is Spread:
        return _record(Spread, members, where)
    if members is not None and hint is TableBytes:
        return _record(TableBytes, members, where)
    if members is not None and get_origin(hint) is dict and get_args(hint)[1] is TableBytes:
        _check_text(list(members), where, name)
        return {key: _value(TableBytes, each, where, name) for key, each in members.items()}
    if isinstance(hint, UnionType):
        if value is None:
            return None
        (hint,) = set(get_args(hint)) - {NoneType}
    accepted = (int, float) if hint is float else get_origin(hint) or hint
    if isinstance(value, bool) or not isinstance(value, accepted):
        msg = f"{where}: {name} must be of type {hint}, got {_shown(value)}"
        raise ValueError(msg)  # noqa: TRY004  the file is wrong, not the call
    if isinstance(value, int | float):
        least = _LEAST.get(name, 0)
        if not least <= value <= _MOST:
            msg = f"{where}: {name} must be from {least} to {_MOST}, got {_shown(value)}"
            raise ValueError(msg)
    else:
        _check_text(value, where, name)
    return value


def _check_text(value: object, where: str, name: str) -> None:
    """Refuse what cannot be written again: half characters and numbers that are none."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        msg = f"{where}: {name} must hold text and finite numbers, got {_shown(value)}"
        raise ValueError(msg) from error


def _shown(value: object) -> str:
    """A wrong value as far as an error shows it."""
    return repr(value)[:_SHOWN]
