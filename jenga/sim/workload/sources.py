"""The source of requests as a user writes it: a file, or the name of a made-up workload."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import cast, get_args, get_origin

from jenga.sim.files.lines import open_text
from jenga.sim.results.rows import is_parquet
from jenga.sim.workload import generators, sessions, shared_texts
from jenga.sim.workload.chats import read_sharegpt, read_wildchat
from jenga.sim.workload.fields import SHOWN_CHARS
from jenga.sim.workload.records import Record, records_of
from jenga.sim.workload.requests import Request
from jenga.sim.workload.servegen import read_servegen
from jenga.sim.workload.traces import (
    header_of,
    read_azure,
    read_burstgpt,
    read_lengths,
    read_mooncake,
)
from jenga.sim.workload.weka import read_weka

GENERATORS: dict[str, Callable[..., Iterator[Request]]] = {
    "articles": generators.articles,
    "long-documents": generators.long_documents,
    "static-lengths": generators.static_lengths,
    "dynamic-lengths": generators.dynamic_lengths,
    "mmlu-pro": generators.mmlu_pro,
    "mmmu-pro": generators.mmmu_pro,
    "agentic": generators.agentic,
    "rag": shared_texts.rag,
    "samples": shared_texts.samples,
    "zipf": shared_texts.zipf,
    "tools": shared_texts.tools,
    "documents": shared_texts.documents,
    "loop": shared_texts.loop,
    "shift": shared_texts.shift,
    "alternate": shared_texts.alternate,
    "mixed": sessions.mixed,
    "agents": sessions.agents,
    "servegen": read_servegen,
}
"""Workloads by name. Their arguments are those of the functions."""

_ARTICLES = "articles", "loop", "shift", "alternate"

_SHORT_NAMES = {
    "n": {
        "articles": "num_articles",
        "loop": "num_articles",
        "samples": "num_prompts",
        "agentic": "num_sessions",
        "agents": "num_sessions",
        "": "num_requests",
    },
    "requests": {"": "num_requests"},
    "sessions": {"": "num_sessions"},
    "turns": {"": "num_turns"},
    "questions": {"": "num_questions"},
    "rounds": {"": "num_rounds"},
    "k": {"": "num_read"},
    "tokens": {
        **dict.fromkeys(_ARTICLES, "article_tokens"),
        "documents": "document_tokens",
        "rag": "chunk_tokens",
        "": "prompt_tokens",
    },
    "head": {"": "head_tokens"},
    "question": {"": "question_tokens"},
    "output": {"": "output_tokens"},
    "think": {"": "think_s"},
    "rate": {"": "arrivals_per_s"},
}
"""Short names of arguments. Each has the full names by workload; "" is for all other workloads."""

FORMATS: dict[str, Callable[..., Iterator[Request]]] = {
    "mooncake": read_mooncake,
    "weka": read_weka,
    "sharegpt": read_sharegpt,
    "wildchat": read_wildchat,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "lengths": read_lengths,
}
"""Formats of files by name. The first argument is `path`, the others are those of the functions."""


def open_source(
    text: str, *, file_format: str | None = None, limit: int | None = None, speed: float = 1.0
) -> Iterator[Request]:
    """Return the requests of a trace or a workload.

    Args:
        text: A path; or the name of a workload or a format with arguments, such as
            `articles:n=24,questions=8` or `weka:path=traces,rate=0.1`. A range of lengths is
            written `tokens=1000-2000`.
        file_format: A name in `FORMATS`. By default the beginning of the file decides.
        limit: Most requests that are returned. None for all.
        speed: Factor by which arrivals are faster. Arrival times and think times are divided by it.

    Raises:
        ValueError: There is no such file or workload, it has no such argument, or a file has no
            known format.
    """
    if not speed > 0:
        msg = f"speed must be positive, got {speed}"
        raise ValueError(msg)
    if limit is not None and limit <= 0:
        msg = f"requests must be a positive number, got {limit}"
        raise ValueError(msg)
    requests = islice(_requests(text, file_format), limit)
    if speed == 1:
        return requests
    return (
        replace(each, arrival_s=each.arrival_s / speed, think_s=each.think_s / speed)
        for each in requests
    )


def _requests(text: str, file_format: str | None) -> Iterator[Request]:
    name, _, arguments = text.partition(":")
    if file_format is None and (name in GENERATORS or (name in FORMATS and arguments)):
        return _made(name, arguments)
    path = Path(text).expanduser()
    if not (path.is_file() or path.is_dir()):
        names = [*GENERATORS, *FORMATS]
        close = get_close_matches(name, names, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        msg = f"trace must be a file or one of {', '.join(GENERATORS)}, got {text!r}{hint}"
        raise ValueError(msg)
    return FORMATS[file_format or format_of(path)](path)


_FIRST_CHARS = 1 << 12
"""Most characters of the first line that are read to decide whether a file is JSON."""

_JSON_FIELDS = (
    ("mooncake", ("timestamp", "input_length", "output_length", "hash_ids")),
    ("weka", ("block_size", "requests")),
    ("sharegpt", ("conversations",)),
    ("wildchat", ("conversation",)),
)
"""Formats of JSON objects, and the fields of each. The last field decides about the format."""


def format_of(path: Path) -> str:
    """Return the format of a file, by its first line or object. A folder has the format `weka`.

    Raises:
        ValueError: The format is none of `FORMATS`.
    """
    if path.is_dir():
        return "weka"
    if is_parquet(path):
        return _format_of_record(path, next(records_of(path), None))
    with open_text(path) as file:
        line = file.readline(_FIRST_CHARS)
    if not line.strip():
        msg = f"{path}:1: must be the first line of a trace, got an empty line"
        raise ValueError(msg)
    if line.lstrip()[0] in "{[":
        return _format_of_record(path, next(records_of(path), None))
    names = header_of(path)
    if "ContextTokens" in names:
        return "azure"
    if "Request tokens" in names:
        return "burstgpt"
    if len(names) > 1:
        return "lengths"
    msg = f"{path}:1: format must be one of {', '.join(FORMATS)}, got {line.strip()[:60]!r}"
    raise ValueError(msg)


def _format_of_record(path: Path, first: tuple[str, Record] | None) -> str:
    where, record = first or (f"{path}:1", Record())
    for name, names in _JSON_FIELDS:
        # The last field alone decides. If another one is missing, the format's reader says so.
        if names[-1] in record:
            return name
    expected = "; or ".join(", ".join(names) for _, names in _JSON_FIELDS)
    msg = f"{where}: must be a JSON object with {expected}, got {', '.join(record)[:60]!r}"
    raise ValueError(msg)


def _made(name: str, arguments: str) -> Iterator[Request]:
    """Return the requests of a workload or a format, with arguments `key=value,...`."""
    function = (FORMATS | GENERATORS)[name]
    parameters = inspect.signature(function).parameters
    values: dict[str, object] = {}
    for argument in filter(None, arguments.split(",")):
        key, _, value = argument.partition("=")
        short = _SHORT_NAMES.get(key, {})
        parameter = key if key in parameters else short.get(name, short.get("", key))
        if parameter not in parameters:
            known = _arguments(name, parameters)
            msg = f"{name} must have arguments of {known}, got {_shown(argument)}"
            raise ValueError(msg)
        values[parameter] = _value(name, argument, value, parameters[parameter].annotation)
    for parameter in parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.name not in values:
            msg = f"{name} must be given {parameter.name}, as {name}:{parameter.name}=..."
            raise ValueError(msg)
    return function(**values)


def arguments_of(name: str) -> Iterator[str]:
    """Yield the arguments of a workload or a format as a user writes them, with their defaults.

    An argument has its short name if there is one. One without a default, or whose default cannot
    be written, has three dots in its place.

    Args:
        name: A name in `GENERATORS` or `FORMATS`.
    """
    parameters = inspect.signature((FORMATS | GENERATORS)[name]).parameters
    short = _short_names(name)
    for parameter in parameters.values():
        text = _written(parameter.default)
        is_read = text and _parsed(text, parameter.annotation) is not None
        yield f"{short.get(parameter.name, parameter.name)}={text if is_read else '...'}"


def summary_of(name: str) -> str:
    """Return the sentence that says what a workload or a format is."""
    return (inspect.getdoc((FORMATS | GENERATORS)[name]) or "").partition("\n")[0]


def _written(value: object) -> str:
    """Return an argument's value as a user writes it. The text is empty if there is no value."""
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, tuple):
        return "-".join(map(_written, cast("tuple[object, ...]", value)))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short_names(name: str) -> dict[str, str]:
    """Return the short names of a workload's arguments, by their full names: the first of each."""
    pairs = [(long.get(name, long.get("", "")), key) for key, long in _SHORT_NAMES.items()]
    return dict(reversed(pairs))


def _arguments(name: str, parameters: Iterable[str]) -> str:
    """List the names of a workload's arguments, each with its short name."""
    short = _short_names(name)
    return ", ".join(f"{each} ({short[each]})" if each in short else each for each in parameters)


_KINDS: dict[object, str] = {
    int: "an integer",
    float: "a number",
    str: "a word",
    bool: "true or false",
    Path: "a path",
}


def _value(name: str, argument: str, text: str, kind: object) -> object:
    """Return an argument's value in the type of its parameter."""
    value = _parsed(text, kind)
    if value is None:
        expected = "first-last" if get_origin(kind) is tuple else _KINDS.get(kind, str(kind))
        msg = f"{name}: {argument.partition('=')[0]} must be {expected}, got {_shown(text)}"
        raise ValueError(msg)
    return value


def _shown(text: str) -> str:
    """Return a wrong argument as an error shows it, cut to `SHOWN_CHARS` characters."""
    return repr(text)[:SHOWN_CHARS]


def _parsed(text: str, kind: object) -> object:
    """Return the value that a text stands for in a type, or None if the text has no such value."""
    if get_origin(kind) is tuple:
        first, _, last = text.partition("-")
        number = get_args(kind)[0]
        pair = _parsed(first, number), _parsed(last or first, number)
        is_range = None not in pair and cast("int", pair[0]) <= cast("int", pair[1])
        return pair if is_range else None
    if kind is Path:
        return Path(text).expanduser() if text else None
    if kind is bool:
        return {"true": True, "false": False}.get(text)
    try:
        value = cast("type[str]", kind)(text)
    except ValueError:
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value
