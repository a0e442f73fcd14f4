"""Bytes of the weight files in a model's directory that an engine would load.

Source: the default loader of vLLM 0.33. It loads one format and ignores the others, so weights that
are stored in two formats count once.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from jenga.models.config import Config, load_config

INDEX = "model.safetensors.index.json"

_FORMATS = (
    ("consolidated*.safetensors", "consolidated.safetensors.index.json"),
    ("*.safetensors", INDEX),
    ("*.bin", None),
    ("*.pt", None),
)
"""Pattern of file names, and the index that selects files, in the order in which they are tried.

The first pattern with files, or with an index, is loaded.
"""

_NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?size (\d+)\n")
_POINTER_BYTES = 1024
"""Maximum length of the pointer file that Git LFS leaves for a file that was not fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Size of the weights in a directory.

    Attributes:
        num_bytes: Bytes of all weights; None if unknown.
        source: Where the number comes from, or why it is unknown. Empty if there are neither
            weights nor an index.
    """

    num_bytes: int | None
    source: str


def find_weights(folder: Path) -> Weights:
    """Count the bytes of a directory's weight files; if some are missing, take an index's total.

    Raises:
        ValueError: The index is not understood.
    """
    for pattern, index_name in _FORMATS:
        files = {file.name: file for file in folder.glob(pattern) if file.is_file()}
        files = {name: file for name, file in files.items() if name not in _NOT_WEIGHTS}
        index = folder / index_name if index_name is not None else None
        if index is not None and index.exists():
            return _by_index(index, files)
        if files:
            num_bytes = sum(map(_file_bytes, files.values()))
            return Weights(num_bytes=num_bytes, source=f"the {_kind(pattern)} files")
    return Weights(num_bytes=None, source="")


def _kind(pattern: str) -> str:
    return pattern.removeprefix("*.")


def _by_index(path: Path, files: dict[str, Path]) -> Weights:
    """Count the bytes of the files that an index names; if some are missing, use its total."""
    index = load_config(path)
    named = _named_files(index)
    if named and named <= files.keys():
        num_bytes = sum(_file_bytes(files[name]) for name in named)
        return Weights(num_bytes=num_bytes, source=f"the files that {path.name} names")
    total_bytes = _total_bytes(index)
    if total_bytes is not None:
        return Weights(num_bytes=total_bytes, source=f"{path.name}, metadata.total_size")
    if not named and files:
        return Weights(
            num_bytes=sum(map(_file_bytes, files.values())), source="the safetensors files"
        )
    missing = len(named - files.keys())
    return Weights(
        num_bytes=None,
        source=f"{path.name} has no metadata.total_size, and {missing} of its files are missing",
    )


def _named_files(index: Config) -> set[str]:
    if "weight_map" not in index:
        return set()
    return {str(name) for name in index.section("weight_map").as_dict().values()}


def _total_bytes(index: Config) -> int | None:
    """Return the total bytes that an index states; None if it states none.

    Some indices write the whole number as a float.
    """
    metadata = index.section("metadata") if "metadata" in index else None
    if metadata is None or "total_size" not in metadata or metadata.equals("total_size", 0):
        return None
    total_bytes = metadata.as_dict()["total_size"]
    if isinstance(total_bytes, float) and total_bytes.is_integer() and total_bytes > 0:
        return int(total_bytes)
    return metadata.integer("total_size")


def _file_bytes(file: Path) -> int:
    """Bytes of a file, or of the file that a Git LFS pointer stands for."""
    num_bytes = file.stat().st_size
    if num_bytes <= _POINTER_BYTES and (pointer := _POINTER.match(file.read_bytes())):
        return int(pointer[1])
    return num_bytes
