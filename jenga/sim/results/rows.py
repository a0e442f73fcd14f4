"""Rows of a replay: its settings, the bytes of the arena in steps, its requests, and its summary.

A file of rows holds one JSON object a line, or is a Parquet file with the same fields as columns.
`kind` names the kind of row. Rows of one replay have the same `run`, and a file may hold several
runs.
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
    """The settings of a replay.

    Attributes:
        run: Name of the run, which all rows of a replay have.
        model: Name of the model.
        tp: Number of ranks over which layers are divided. Bytes are those of one rank.
        kv_format: Data type of keys and values.
        gpu: Name of the GPU. Empty if only bytes were given.
        arena_bytes: Bytes of the arena of one rank.
        manager: Name of the memory manager.
        eviction: Name of its eviction policy.
        trace: Source of the requests.
        num_requests: Number of requests that were replayed.
        options: All other settings that change the outcome.
        jenga_version: Version of this package, and a digest of its code.
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
    """Bytes of one page table, summed over all requests. Fields are those of `StepRow`."""

    used_bytes: int = 0
    useless_bytes: int = 0
    cached_bytes: int = 0
    empty_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Use of every byte of the arena in one step.

    Attributes:
        run: Name of the run, which all rows of a replay have.
        step: Number of the step, from 1.
        time_s: Modelled time at which it begins, in seconds.
        num_running: Number of running requests.
        num_waiting: Number of requests that have arrived and wait.
        num_decoding: Number of requests that compute one token in this step.
        prefill_tokens: Number of prompt tokens that this step computes.
        used_bytes: Bytes of slots that the next tokens of running requests read or write.
        useless_bytes: All other bytes in the small pages of running requests.
        cached_bytes: Bytes of small pages that are cached and that no running request uses.
        empty_bytes: Bytes of empty small pages in large pages that are not empty.
        unallocated_bytes: Bytes of empty large pages.
        tables: The same bytes for each page table.
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
    """Times and tokens of one request. Times are modelled.

    Attributes:
        run: Name of the run, which all rows of a replay have.
        request: Name of the request.
        prompt_tokens: Number of tokens of its prompt.
        output_tokens: Number of tokens that it generated.
        hit_tokens: Prompt tokens that were found cached at its first admission.
        arrival_s: Arrival time in seconds.
        first_token_s: Time of its first generated token in seconds. -1 if there is none.
        finished_s: Time of its last generated token in seconds. -1 if it did not finish.
        num_preemptions: Number of times it was preempted.
        refused: Reason why it could never run. Empty for requests that ran.
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
class EvictionRow:
    """The loss of one checkpoint, or of its end. See `jenga.prefix.eviction_log`.

    Attributes:
        run: Name of the run, which all rows of a replay have.
        step: Number of the step, from 1.
        time_s: Modelled time at which the step begins, in seconds.
        cause: Reason: `checkpoint`, `end`, `guess` or `moved`.
        left_by: Name of the request that left the checkpoint. Empty for images.
        for_request: Name of the request that needed the memory. Empty if none did.
        point: Place of the checkpoint in its text, such as `PROMPT_END`.
        past: Knowledge about its readers, such as `NEW_TEXT`.
        num_tokens: Number of tokens of its prefix.
        kept_tokens: Number of these tokens that a request can still start from.
        freed_bytes: Bytes of the pages that became empty.
        worth: Worth by the eviction policy. None if nothing was compared.
        was_awaited: Whether a request in the wait queue would have read it.
    """

    kind: ClassVar[str] = "eviction"

    run: str
    step: int
    time_s: float
    cause: str
    left_by: str
    for_request: str
    point: str
    past: str
    num_tokens: int
    kept_tokens: int
    freed_bytes: int
    worth: float | None
    was_awaited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Tokens of one look-up that were not found because of one loss.

    Attributes:
        cause: Reason: `checkpoint`, `end`, `guess`, `moved` or `loose`.
        step: Number of the step of the loss. Its eviction row has the same number.
        left_by: Name of the request that left the checkpoint. Empty for `loose`.
        for_request: Name of the request that needed the memory. Empty if none did.
        evicted_tokens: Number of tokens whose content was lost.
        bare_tokens: Number of tokens whose content is cached, and whose checkpoint was lost.
    """

    cause: str
    step: int
    left_by: str
    for_request: str
    evicted_tokens: int
    bare_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MissRow:
    """Tokens that a request found at an admission, and why not more. See `jenga.prefix.miss_log`.

    Attributes:
        run: Name of the run, which all rows of a replay have.
        step: Number of the step, from 1.
        time_s: Modelled time at which the step begins, in seconds.
        request: Name of the request.
        asked_tokens: Number of tokens that it could have started from.
        found_tokens: Number of tokens that it starts from.
        table: Name of the page table that allowed no longer prefix. Empty if none did.
        layer_type: Name of its layer type, or empty.
        never_tokens: Number of tokens that were never cached, as far as losses are remembered.
        evicted_tokens: Number of tokens that were cached and were lost.
        bare_tokens: Number of tokens that are cached, but that no request can start from.
        losses: The losses that took most of these tokens.
    """

    kind: ClassVar[str] = "miss"

    run: str
    step: int
    time_s: float
    request: str
    asked_tokens: int
    found_tokens: int
    table: str
    layer_type: str
    never_tokens: int
    evicted_tokens: int
    bare_tokens: int
    losses: list[LossTokens] = field(default_factory=list[LossTokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution of modelled seconds."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """Summary of a replay. Seconds are modelled; tokens and bytes are counted.

    Attributes:
        run: Name of the run, which all rows of a replay have.
        num_steps: Number of steps.
        seconds: Seconds from the first arrival to the last token.
        num_requests: Number of requests that finished.
        num_refused: Number of requests that could never run.
        refusals: Reason -> number of requests that could never run for it. Empty also in old rows.
        prompt_tokens: Prompt tokens of all requests.
        output_tokens: Output tokens of all requests.
        hit_tokens: Prompt tokens that were found cached at the requests' first admission.
        hit_rate: Hit tokens as a share of all prompt tokens.
        waste: 1 - used / (used + useless + empty) bytes. It is the mean over sampled steps in which
            a request decodes. Cached bytes are not held. None if no such step was sampled.
        busy_waste: Waste as above, but only of steps in which at least half as many requests decode
            as ever did. It leaves out the end of a run, when little is held. None also in old rows.
        waste_of_bytes: Held bytes that are not used, as a share of all held bytes. Both are summed
            over the same steps as `waste`, so that a step counts by its held bytes.
        mean_decode_batch: Mean number of decoding requests, over steps in which a request decodes.
        num_preemptions: Number of preemptions.
        evicted_pages: Number of cached small pages that were evicted.
        stored_bytes: Bytes copied to host memory, of one rank.
        loaded_bytes: Bytes copied from host memory, of one rank.
        ahead_bytes: Bytes of both directions that were copied while the kernels of a step ran.
        requests_per_s: Finished requests a second.
        tokens_per_s: Output tokens a second.
        ttft_s: Seconds from arrival to the first token.
        tpot_s: Seconds from one token to the next: the mean of each request with several tokens.
        e2e_s: Seconds from arrival to the last token.
        missed_tokens: Reason -> tokens that look-ups did not find. Empty if look-ups were not
            recorded.
    """

    kind: ClassVar[str] = "summary"

    run: str
    num_steps: int
    seconds: float
    num_requests: int
    num_refused: int = 0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
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
    missed_tokens: dict[str, int] = field(default_factory=dict[str, int])


_MOST = (1 << 63) - 1
"""Largest number in a row: the largest integer that Parquet holds."""

_LEAST = {"first_token_s": -1, "finished_s": -1, "worth": -_MOST}
"""Least values of fields that may be negative. A refused request has neither time."""

_SHOWN = 80
"""Most characters of a wrong value that an error shows."""

Row = RunRow | StepRow | RequestRow | EvictionRow | MissRow | SummaryRow

ROW_KINDS: dict[str, type[Row]] = {
    kind.kind: kind for kind in (RunRow, StepRow, RequestRow, EvictionRow, MissRow, SummaryRow)
}
"""Kinds of rows by name."""


def row_line(row: Row) -> str:
    """Return a row as one line of JSON, with its line end."""
    return json.dumps({"kind": row.kind, **asdict(row)}) + "\n"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to the end of a file. The file is made if there is none."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(row_line, rows))


def write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Write a Parquet file, and replace an existing one.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    write_records(path, ({"kind": row.kind, **asdict(row)} for row in rows), _columns())


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file one at a time. The file is Parquet if its name says so, or JSON.

    Raises:
        ValueError: A line is not a row. The message names the line and the field.
        ModuleNotFoundError: The file is Parquet, and pyarrow is not installed.
    """
    if is_parquet(path):
        for number, values in enumerate(read_records(path, _columns()), start=1):
            yield _row(values, f"{path}, row {number}")
        return
    yield from rows_of_lines(path, lines_of(path))


def rows_of_lines(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows in lines of JSON.

    Args:
        path: File of the lines, for error messages.
        lines: All lines from the first on. Empty ones are skipped.

    Raises:
        ValueError: A line is not a row. The message names the line and the field.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _columns() -> dict[str, object]:
    """Return the columns of Parquet. Fields of the same name have the same type."""
    columns: dict[str, object] = {"kind": str}
    for kind in ROW_KINDS.values():
        hints = get_type_hints(kind)
        columns |= {each.name: hints[each.name] for each in fields(kind)}
    return columns


def is_parquet(path: Path) -> bool:
    """Whether a file with this name is a Parquet file."""
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


_Record = TypeVar("_Record", bound=Row | Spread | TableBytes | LossTokens)


def _record(kind: type[_Record], values: dict[str, object], where: str) -> _Record:
    """Make a dataclass from plain values, and check each value."""
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
    if members is not None and get_origin(hint) is dict and get_args(hint)[1] in (TableBytes, int):
        of_members = get_args(hint)[1]
        _check_text(list(members), where, name)
        return {key: _value(of_members, each, where, name) for key, each in members.items()}
    if get_origin(hint) is list and isinstance(value, list):
        losses = [_object(each) for each in cast("list[object]", value)]
        if None in losses:
            msg = f"{where}: {name} must hold objects, got {_shown(cast('object', value))}"
            raise ValueError(msg)
        return [_record(LossTokens, each, where) for each in losses if each is not None]
    if isinstance(hint, UnionType):
        if value is None:
            return None
        (hint,) = set(get_args(hint)) - {NoneType}
    accepted = (int, float) if hint is float else get_origin(hint) or hint
    if isinstance(value, bool) != (hint is bool) or not isinstance(value, accepted):
        msg = f"{where}: {name} must be of type {hint}, got {_shown(value)}"
        raise ValueError(msg)
    if isinstance(value, int | float):
        least = _LEAST.get(name, 0)
        if not least <= value <= _MOST:
            msg = f"{where}: {name} must be from {least} to {_MOST}, got {_shown(value)}"
            raise ValueError(msg)
    else:
        _check_text(value, where, name)
    return value


def _check_text(value: object, where: str, name: str) -> None:
    """Refuse values that cannot be written again: lone surrogates, NaN and infinite numbers."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        msg = f"{where}: {name} must hold text and finite numbers, got {_shown(value)}"
        raise ValueError(msg) from error


def _shown(value: object) -> str:
    """Return a wrong value as an error shows it."""
    return repr(value)[:_SHOWN]
