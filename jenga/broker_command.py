"""`jenga broker`: start, show and remove an arena that several engines share."""

import argparse
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

from jenga.broker.books import Books
from jenga.broker.folder import ArenaFolder
from jenga.broker.memory import CPU, UNTRIED, MemoryLostError
from jenga.broker.server import Server
from jenga.sim.drawing.text import aligned
from jenga.sim.hardware.gpus import parse_bytes

DESCRIPTION = """\
Let several engines on one machine share one arena, large page by large page. `start` makes the
arena in a folder and lends its large pages until it is interrupted. If it is started again, it
continues with the arena that is there, and engines that run meanwhile lose nothing. Engines join
with JENGA_SHARED_ARENA=FOLDER. Its memory is on the CPU, or with --device cuda on a GPU. That is
experimental: it has never run on a GPU."""

EPILOG = """\
examples:
  jenga broker start /dev/shm/arena --large-page-bytes 2MiB --bytes 8GiB
  jenga broker status /dev/shm/arena
  jenga broker remove /dev/shm/arena"""


_LEAST_PAGES = 2
"""Fewest large pages of an arena: the null page, and one to lend."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `jenga broker`."""
    actions = parser.add_subparsers(title="actions", metavar="<action>", required=True)
    start = actions.add_parser("start", help="make an arena, or continue with one, and lend it")
    start.add_argument(
        "--large-page-bytes",
        type=_size,
        metavar="BYTES",
        help="size of a large page; `jenga plan --large-page-bytes` shows what it costs a model",
    )
    start.add_argument("--bytes", type=_size, metavar="BYTES", help="size of the whole arena")
    start.add_argument(
        "--device",
        type=_device,
        metavar="DEVICE",
        help="where a new arena is: cpu (the default), or cuda:N on a GPU (experimental)",
    )
    start.set_defaults(run=_start, extras="jenga-kv")
    status = actions.add_parser("status", help="show which engine has how much")
    status.add_argument("--json", action="store_true", help="print the status as JSON")
    status.set_defaults(run=_status, extras="jenga-kv")
    remove = actions.add_parser("remove", help="delete an arena that no engine uses any more")
    remove.set_defaults(run=_remove, extras="jenga-kv")
    for action in (start, status, remove):
        action.add_argument(
            "folder", type=Path, metavar="FOLDER", help="folder of the arena, within /dev/shm"
        )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _device(text: str) -> str:
    if text != CPU and not re.fullmatch(r"cuda(:[0-9]{1,3})?", text):
        msg = f"must be cpu, cuda or cuda:N, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return "cuda:0" if text == "cuda" else text


def _start(options: argparse.Namespace) -> int:
    folder = ArenaFolder(options.folder)
    large_page_bytes, arena_bytes = options.large_page_bytes, options.bytes
    if folder.books.exists():
        with folder.open_books().closing() as books:
            _check_same(books, large_page_bytes, arena_bytes)
        memory = folder.memory
        if options.device not in {None, memory.device}:
            msg = f"--device does not fit the arena that is there, on {memory.device}"
            raise ValueError(msg)
        memory.check()
    elif large_page_bytes is None or arena_bytes is None:
        msg = f"{folder.path} has no arena yet: give --large-page-bytes and --bytes"
        raise ValueError(msg)
    else:
        num_pages = arena_bytes // large_page_bytes
        if num_pages < _LEAST_PAGES:
            msg = (
                f"--bytes must hold the null page and another large page of {large_page_bytes} "
                f"bytes, got {arena_bytes}"
            )
            raise ValueError(msg)
        device = options.device or CPU
        folder.create(large_page_bytes=large_page_bytes, num_pages=num_pages, device=device)
    device = folder.memory.device
    if device != CPU:
        print(f"jenga broker: warning: {UNTRIED}", file=sys.stderr, flush=True)
    server = Server(folder)
    # Service managers end a program by this signal. Programs of a script may ignore Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arena = f"{_arena_text(server.broker.books)} on {device}"
    print(f"jenga broker: lends {arena} in {folder.path}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        print("jenga broker: ends; engines keep what they have, and `start` continues", flush=True)
    finally:
        server.close()
    return 0


def _check_same(books: Books, large_page_bytes: int | None, arena_bytes: int | None) -> None:
    """Refuse arguments that differ from an arena that is there already."""
    for name, asked, found in (
        ("--large-page-bytes", large_page_bytes, books.large_page_bytes),
        (
            "--bytes",
            None if arena_bytes is None else arena_bytes // books.large_page_bytes,
            books.num_pages,
        ),
    ):
        if asked is not None and asked != found:
            msg = f"{name} does not fit the arena that is there, {_arena_text(books)}"
            raise ValueError(msg)


def _arena_text(books: Books) -> str:
    return f"{books.num_pages - 1} large pages of {books.large_page_bytes} bytes"


def _status(options: argparse.Namespace) -> int:
    folder = ArenaFolder(options.folder)
    with folder.open_books().closing() as books:
        memory, lost = folder.memory, None
        try:
            memory.check()
        except MemoryLostError as error:
            lost = str(error)
        engines: list[dict[str, object]] = []
        for row, agreement in books.agreements():
            supply = books.supply(row)
            age_s = time.monotonic() - supply.oldest_s
            engines.append(
                {
                    "name": agreement.name,
                    "pid": agreement.processes[0].pid,
                    "held": len(books.pages_of(row + 1)),
                    "guarantee": agreement.guarantee_pages,
                    "limit": agreement.limit_pages,
                    "empty": supply.num_empty,
                    "evictable": supply.num_evictable,
                    "oldest_s": None if age_s == -math.inf else age_s,
                }
            )
        if options.json:
            found = {
                "large_page_bytes": books.large_page_bytes,
                "large_pages": books.num_pages - 1,
                "free": books.num_free,
                "device": memory.device,
                "lost": lost,
                "engines": engines,
            }
            print(json.dumps(found, indent=2))
            return 0
        print(f"{_arena_text(books)} on {memory.device}, {books.num_free} free")
        if lost is not None:
            print(lost)
        if engines:
            rows = [
                list(engines[0]),
                *([_cell(each) for each in engine.values()] for engine in engines),
            ]
            print("\n".join(aligned(rows)))
    return 0


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _remove(options: argparse.Namespace) -> int:
    folder = ArenaFolder(options.folder)
    with folder.open_books().closing() as books:
        for _, agreement in books.agreements():
            alive = [each.pid for each in agreement.processes if each.is_alive]
            if alive and alive != [os.getpid()]:
                msg = f"engine {agreement.name!r} uses this arena, in processes {alive}"
                raise ValueError(msg)
    folder.remove()
    return 0
