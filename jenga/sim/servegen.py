"""Requests drawn from ServeGen's distributions: clients with rates, burstiness and lengths."""

import ast
import csv
import heapq
import json
import random
import tarfile
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import cast

from jenga.policies import Image
from jenga.sim.workload import Piece, Request

_COLUMNS = 6
_WINDOW_S = 600


@dataclass(frozen=True, slots=True)
class _Window:
    """How a client's requests come for some minutes.

    Attributes:
        start_s: From when.
        rate: Requests a second.
        shape: Of the waits' distribution.
        scale: Of the waits' distribution, in seconds.
        distribution: "Gamma", "Weibull", or nothing for random arrivals of that rate.
    """

    start_s: float
    rate: float
    distribution: str
    shape: float
    scale: float

    def wait_s(self, draw: random.Random, rate_factor: float) -> float:
        """Seconds to the next request."""
        match self.distribution:
            case "Gamma":
                wait_s = draw.gammavariate(self.shape, self.scale)
            case "Weibull":
                wait_s = draw.weibullvariate(self.scale, self.shape)
            case _:
                wait_s = draw.expovariate(self.rate)
        return wait_s / rate_factor


class _Lengths:
    """Draws from a table of probabilities."""

    def __init__(self, table: dict[int, float]) -> None:
        self._values = list(table)
        self._sums = list(accumulate(table.values()))

    def __bool__(self) -> bool:
        return bool(self._sums) and self._sums[-1] > 0

    def draw(self, draw: random.Random) -> int:
        """A value."""
        index = bisect(self._sums, draw.random() * self._sums[-1])
        return self._values[min(index, len(self._values) - 1)]


@dataclass(slots=True)
class _Client:
    """One client's files."""

    name: str
    windows: list[_Window] = field(default_factory=list[_Window])
    lengths: dict[int, dict[str, _Lengths]] = field(default_factory=dict[int, dict[str, _Lengths]])


def read_servegen(
    *,
    path: str,
    workload: str,
    seconds: float = 600.0,
    start: float = 0.0,
    rate: float = 1.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Requests drawn client by client; no two prompts share anything.

    Images are tokens of the prompt, before its text.

    Args:
        path: ServeGen's folder, or a `.tar.gz` of it.
        workload: A folder of its data: "mm-image", "deepseek-r1", ...
        seconds: How long requests come.
        start: From which second of the day on.
        rate: So many times as many requests.
        seed: Of everything drawn.

    Raises:
        ValueError: There is no such workload, or a file of it is not what ServeGen's are; file,
            line and field are named.

    Source: ServeGen (arXiv 2505.09999), alibaba/ServeGen.
    """
    clients = _clients(Path(path).expanduser(), workload)
    streams = [
        _arrivals(client, random.Random(f"{seed} {client.name}"), start, seconds, rate)
        for client in clients
    ]
    return heapq.merge(*streams, key=lambda request: request.arrival_s)


def _arrivals(
    client: _Client, draw: random.Random, start: float, seconds: float, rate: float
) -> Iterator[Request]:
    number = 0
    for window in client.windows:
        end_s = min(window.start_s + _WINDOW_S, start + seconds)
        time_s = max(window.start_s, start)
        lengths = client.lengths.get(_period(client, time_s), {})
        if window.rate <= 0 or not lengths:
            continue
        time_s += draw.random() / (window.rate * rate)
        while time_s < end_s:
            yield _drawn(f"{client.name}.{number}", time_s - start, lengths, draw)
            number += 1
            time_s += window.wait_s(draw, rate)


def _period(client: _Client, time_s: float) -> int:
    """The hours whose lengths hold at a time."""
    return max((each for each in client.lengths if each <= time_s), default=-1)


def _drawn(
    name: str, arrival_s: float, lengths: dict[str, _Lengths], draw: random.Random
) -> Request:
    text = "text_tokens" if "text_tokens" in lengths else "input_tokens"
    text_tokens = max(1, lengths[text].draw(draw))
    prompt = [Piece(f"text {name}", text_tokens)]
    images: list[Image] = []
    if lengths.get("image_tokens") and lengths.get("image_count"):
        first_token = 0
        for index in range(lengths["image_count"].draw(draw)):
            image_tokens = lengths["image_tokens"].draw(draw)
            if image_tokens:
                content = f"image {index} of {name}"
                images.append(
                    Image(
                        start_token=first_token, num_tokens=image_tokens, content=content.encode()
                    )
                )
                prompt.insert(len(images) - 1, Piece(content, image_tokens))
                first_token += image_tokens
    return Request(
        name=name,
        arrival_s=arrival_s,
        prompt=tuple(prompt),
        output_tokens=max(1, lengths["output_tokens"].draw(draw)),
        images=tuple(images),
    )


def _clients(path: Path, workload: str) -> list[_Client]:
    clients: dict[str, _Client] = {}
    for file_name, text in _files(path, workload):
        client_name, _, kind = PurePosixPath(file_name).stem.rpartition("-")
        client = clients.setdefault(client_name, _Client(client_name))
        if kind == "trace":
            client.windows = _windows(file_name, text)
        elif kind == "dataset":
            client.lengths = _tables(file_name, text)
    if not clients:
        known = ", ".join(sorted(_workloads(path))) or "of which there are none"
        msg = f"workload must be a folder of the data in {path}, {known}, got {workload!r}"
        raise ValueError(msg)
    return sorted(clients.values(), key=lambda client: client.name)


def _files(path: Path, workload: str) -> Iterator[tuple[str, str]]:
    """Names and contents of a workload's files."""
    if path.is_dir():
        for file in sorted(path.rglob(f"{workload}/*")):
            if file.suffix in (".csv", ".json"):
                yield str(file), file.read_text(encoding="utf-8")
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                content = archive.extractfile(member)
                if name.parent.name == workload and content is not None:
                    yield f"{path}:{name}", content.read().decode()
    except (OSError, tarfile.TarError) as error:
        msg = f"path must be ServeGen's folder or a tar file of it, got {str(path)!r}: {error}"
        raise ValueError(msg) from error


def _workloads(path: Path) -> set[str]:
    """Names of folders that hold a client's files."""
    if path.is_dir():
        return {file.parent.name for file in path.rglob("*-trace.csv")}
    with tarfile.open(path) as archive:
        names = map(PurePosixPath, archive.getnames())
        return {name.parent.name for name in names if name.name.endswith("-trace.csv")}


def _windows(file_name: str, text: str) -> list[_Window]:
    windows: list[_Window] = []
    for number, cells in enumerate(csv.reader(text.splitlines()), start=1):
        window = _window(cells)
        if window is None:
            msg = (
                f"{file_name}:{number}: must be {_COLUMNS} columns (second, rate, variation, Gamma "
                f"or Weibull, shape, scale), got {','.join(cells)[:60]!r}"
            )
            raise ValueError(msg)
        windows.append(window)
    return windows


def _window(cells: list[str]) -> _Window | None:
    """A line of a trace; None if it is not one."""
    if len(cells) != _COLUMNS or cells[3] not in ("Gamma", "Weibull", ""):
        return None
    try:
        start_s, rate, shape, scale = (float(cells[index] or 0) for index in (0, 1, 4, 5))
    except ValueError:
        return None
    return _Window(start_s, rate, cells[3], shape, scale)


def _tables(file_name: str, text: str) -> dict[int, dict[str, _Lengths]]:
    """Per beginning of a part of the day, tables of lengths by name; of empty parts nothing."""
    periods: dict[int, dict[str, _Lengths]] = {}
    where = ""
    try:
        for second, fields in cast("dict[str, dict[str, str]]", json.loads(text)).items():
            found: dict[str, _Lengths] = {}
            for name, written in fields.items():
                where = f"{second}: {name}"
                if name.endswith(("_tokens", "_count")):
                    found[name] = _Lengths(cast("dict[int, float]", ast.literal_eval(written)))
            is_whole = found.get("output_tokens") and (
                found.get("text_tokens") or found.get("input_tokens")
            )
            if is_whole:
                periods[int(second)] = found
    except (ValueError, SyntaxError, AttributeError, TypeError) as error:
        msg = f"{file_name}: {where or 'the file'} must be a table of probabilities: {error}"
        raise ValueError(msg) from error
    return periods
