"""Requests drawn from ServeGen's distributions: clients with rates, burstiness and lengths."""

import csv
import heapq
import json
import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import cast

from jenga.policies import Image
from jenga.sim.files.archive import text_files
from jenga.sim.workload.requests import MOST_TOKENS, Piece, Request

_COLUMNS = 6
_WINDOW_S = 600
_TABLES = {"text_tokens", "input_tokens", "output_tokens", "image_tokens", "image_count"}
_SHOWN = 80

MOST_REQUESTS_PER_S = 1000.0
"""Most requests a second of one client. ServeGen's busiest client sends 19."""

LEAST_SHAPE, MOST_SHAPE = 1 / 128, 1e6
"""Smallest and largest shape of a distribution of waits. Other waits may not fit in a float."""

LEAST_SCALE_S, MOST_SCALE_S = 1e-9, 1e9
"""Smallest and largest scale of a distribution of waits, in seconds. ServeGen has 9e-4 to 500."""

MOST_WEIGHT = 1e300
"""Largest weight in a table of probabilities. The sum of a table must fit in a float."""

MOST_IMAGES = 1024
"""Most images of a request. ServeGen's largest requests have 49."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Arrival process of a client for 10 minutes.

    Attributes:
        where: File and line, for error messages.
        start_s: Time at which it begins, in seconds of the day.
        rate: Requests a second.
        distribution: Distribution of the waits: "Gamma", "Weibull", or an empty string for random
            arrivals at that rate.
        shape: Shape of the waits' distribution.
        scale: Scale of the waits' distribution, in seconds.
    """

    where: str
    start_s: float
    rate: float
    distribution: str
    shape: float
    scale: float

    def wait_s(self, draw: random.Random, rate_factor: float) -> float:
        """Draw the seconds to the next request."""
        match self.distribution:
            case "Gamma":
                wait_s = draw.gammavariate(self.shape, self.scale)
            case "Weibull":
                wait_s = draw.weibullvariate(self.scale, self.shape)
            case _:
                wait_s = draw.expovariate(self.rate)
        return wait_s / rate_factor


class _Lengths:
    """A table of probabilities from which values are drawn."""

    def __init__(self, table: dict[int, float]) -> None:
        self._values = list(table)
        self._sums = list(accumulate(table.values()))

    def __bool__(self) -> bool:
        return bool(self._sums) and self._sums[-1] > 0

    def draw(self, draw: random.Random) -> int:
        """Draw a value."""
        index = bisect(self._sums, draw.random() * self._sums[-1])
        return self._values[min(index, len(self._values) - 1)]


@dataclass(slots=True)
class _Client:
    """The data of one client's files."""

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
    """Draw requests client by client. No two prompts share a prefix.

    Images are tokens of the prompt, before its text.

    Args:
        path: ServeGen's folder, or a `.tar.gz` of it.
        workload: A folder of its data: "mm-image", "deepseek-r1", ...
        seconds: Duration of the arrivals in seconds.
        start: Second of the day from which requests are drawn.
        rate: Factor of the number of requests a second.
        seed: Seed of all random draws.

    Raises:
        ValueError: An argument is out of range, there is no such workload, or a file is not in
            ServeGen's format. The message names file, line and field.

    Source: ServeGen (arXiv 2505.09999), alibaba/ServeGen.
    """
    for name, value in (("seconds", seconds), ("rate", rate)):
        if not 0 < value < math.inf:
            msg = f"{name} must be finite and positive, got {value:g}"
            raise ValueError(msg)
    if not 0 <= start < math.inf:
        msg = f"start must be finite and at least 0, got {start:g}"
        raise ValueError(msg)
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
    most = MOST_REQUESTS_PER_S * _WINDOW_S * max(rate, 1.0)
    for window in client.windows:
        end_s = min(window.start_s + _WINDOW_S, start + seconds)
        time_s = max(window.start_s, start)
        lengths = client.lengths.get(_period(client, time_s), {})
        if window.rate <= 0 or not lengths:
            continue
        first = number
        time_s += draw.random() / (window.rate * rate)
        while time_s < end_s:
            name = f"{client.name}.{number}"
            try:
                request = _drawn(name, time_s - start, lengths, draw)
            except ValueError as error:
                msg = f"{window.where}: {error}"
                raise ValueError(msg) from error
            yield request
            number += 1
            if number - first > most:
                msg = (
                    f"{window.where}: must make at most {most:,.0f} requests in {_WINDOW_S} s, "
                    f"got shape {window.shape:g} and scale {window.scale:g}"
                )
                raise ValueError(msg)
            time_s += window.wait_s(draw, rate)


def _period(client: _Client, time_s: float) -> int:
    """Return the start of the part of the day whose lengths apply at a time, or -1 if none do."""
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
    workloads: set[str] = set()

    def is_wanted(name: PurePosixPath) -> bool:
        if name.name.endswith("-trace.csv"):
            workloads.add(name.parent.name)
        return name.parent.name == workload and name.suffix in (".csv", ".json")

    for where, text in text_files(path, is_wanted):
        client_name, _, kind = PurePosixPath(where).stem.rpartition("-")
        client = clients.setdefault(client_name, _Client(client_name))
        if kind == "trace":
            client.windows = _windows(where, text)
        elif kind == "dataset":
            client.lengths = _tables(where, text)
    if not clients:
        known = ", ".join(sorted(workloads)) or "of which there are none"
        msg = f"workload must be a folder of the data in {path}, {known}, got {workload!r}"
        raise ValueError(msg)
    return sorted(clients.values(), key=lambda client: client.name)


def _windows(where: str, text: str) -> list[_Window]:
    windows: list[_Window] = []
    reader = csv.reader(text.splitlines())
    try:
        for cells in reader:
            window = _window(f"{where}:{reader.line_num}", cells)
            if windows and window.start_s < windows[-1].start_s:
                msg = (
                    f"{where}:{reader.line_num}: seconds must not go back, got "
                    f"{window.start_s:g} after {windows[-1].start_s:g}"
                )
                raise ValueError(msg)
            windows.append(window)
    except csv.Error as error:
        msg = f"{where}:{reader.line_num}: must be a line of CSV: {error}"
        raise ValueError(msg) from error
    return windows


def _window(where: str, cells: list[str]) -> _Window:
    """Read a line of a trace."""
    try:
        if len(cells) != _COLUMNS or cells[3] not in ("Gamma", "Weibull", ""):
            raise ValueError  # noqa: TRY301  one message for all of it
        start_s, rate, shape, scale = (float(cells[index] or 0) for index in (0, 1, 4, 5))
    except ValueError as error:
        msg = (
            f"{where}: must be {_COLUMNS} columns (second, rate, variation, Gamma or Weibull, "
            f"shape, scale), got {','.join(cells)[:60]!r}"
        )
        raise ValueError(msg) from error
    window = _Window(where, start_s, rate, cells[3], shape, scale)
    bounds = [("second", start_s, 0.0, math.inf), ("rate", rate, 0.0, MOST_REQUESTS_PER_S)]
    if window.distribution:
        bounds.append(("shape", shape, LEAST_SHAPE, MOST_SHAPE))
        bounds.append(("scale", scale, LEAST_SCALE_S, MOST_SCALE_S))
    for name, value, least, most in bounds:
        if not (least <= value <= most and math.isfinite(value)):
            msg = f"{where}: {name} must be finite and from {least:g} to {most:g}, got {value:g}"
            raise ValueError(msg)
    return window


def _tables(where: str, text: str) -> dict[int, dict[str, _Lengths]]:
    """Read tables of lengths by name, for each second at which a part of the day begins.

    Parts without lengths are left out.
    """
    try:
        parts = cast("object", json.loads(text))
    except (ValueError, RecursionError) as error:
        msg = f"{where}: must be one JSON object: {error}"
        raise ValueError(msg) from error
    periods: dict[int, dict[str, _Lengths]] = {}
    for second, fields in _members(where, parts).items():
        place = f"{where}: {second[:_SHOWN]}"
        found = {
            name: _table(f"{place}: {name}", written, name)
            for name, written in _members(place, fields).items()
            if name in _TABLES
        }
        is_whole = found.get("output_tokens") and (
            found.get("text_tokens") or found.get("input_tokens")
        )
        if is_whole:
            if not (second.isascii() and second.isdigit()):
                msg = f"{place} must be a second of the day"
                raise ValueError(msg)
            periods[int(second)] = found
    return periods


def _members(where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        msg = f"{where}: must be a JSON object, got {repr(value)[:_SHOWN]}"
        raise ValueError(msg)  # noqa: TRY004  the file is wrong, not the call
    return cast("dict[str, object]", value)


def _table(where: str, written: object, name: str) -> _Lengths:
    """Read a table as ServeGen writes it: `{value: probability, ...}`, with whole values."""
    most = MOST_IMAGES if name.endswith("_count") else MOST_TOKENS
    table: dict[int, float] = {}
    try:
        if not (isinstance(written, str) and written.startswith("{") and written.endswith("}")):
            raise ValueError  # noqa: TRY301  one message for all of it
        for pair in filter(str.strip, written[1:-1].split(",")):
            value, _, probability = pair.partition(":")
            table[int(value)] = float(probability)
        if not (
            all(0 <= value <= most for value in table)
            and all(0 <= each <= MOST_WEIGHT for each in table.values())
        ):
            raise ValueError  # noqa: TRY301
    except ValueError as error:
        msg = (
            f"{where} must be a table of probabilities of values up to {most}, "
            f"such as {{10: 0.5, 20: 0.5}}, got {repr(written)[:_SHOWN]}"
        )
        raise ValueError(msg) from error
    return _Lengths(table)
