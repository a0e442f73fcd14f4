"""Text files of an untrusted folder or tar archive.

Sizes are limited, because a small archive may unpack to more than any disk holds.
"""

import bz2
import gzip
import lzma
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

MOST_FILE_BYTES = 1 << 26
"""Most bytes of a file. ServeGen's largest file has 2 MiB."""

MOST_ARCHIVE_BYTES = 1 << 30
"""Most bytes of an unpacked archive. All that ServeGen publishes has a tenth of it."""

MOST_MEMBERS = 1 << 16
"""Most files and folders of an archive. The list of them stays in memory."""

_OPENERS: dict[bytes, Callable[[Path], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
"""First bytes of compressed files, and the function that opens each kind."""

_DAMAGE = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RecursionError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    tarfile.TarError,
    zlib.error,
)
"""Exceptions that reading a damaged archive raises."""


def text_files(path: Path, is_wanted: Callable[[PurePosixPath], bool]) -> Iterator[tuple[str, str]]:
    """Read some files of a folder or of a tar archive, compressed or not.

    Args:
        path: The folder or the archive.
        is_wanted: Called with the name of each file, relative to the folder or the archive.

    Yields:
        The name of a file for error messages, and its text.

    Raises:
        ValueError: A wanted file is a link or no regular file, is not UTF-8, or is too large. Or
            the archive is damaged or too large.
        OSError: A file cannot be read.
    """
    files = _folder_files if path.is_dir() else _archive_files
    for where, data in files(path, is_wanted):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            msg = f"{where}: must be text in UTF-8: {error}"
            raise ValueError(msg) from error
        yield where, text


def _folder_files(
    path: Path, is_wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[str, bytes]]:
    for file in sorted(path.rglob("*")):
        if file.is_dir() or not is_wanted(PurePosixPath(file.relative_to(path).as_posix())):
            continue
        if not file.is_file():
            msg = f"{file}: must be a regular file"
            raise ValueError(msg)
        with file.open("rb") as opened:
            data = opened.read(MOST_FILE_BYTES + 1)
        if len(data) > MOST_FILE_BYTES:
            msg = f"{file}: must have at most {MOST_FILE_BYTES} bytes"
            raise ValueError(msg)
        yield str(file), data


def _archive_files(
    path: Path, is_wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[str, bytes]]:
    try:
        with _opened(path) as file, _tar(_Bounded(file)) as archive:
            for number, member in enumerate(archive):
                if number >= MOST_MEMBERS:
                    _refuse(f"it must have at most {MOST_MEMBERS} files")
                name = PurePosixPath(member.name)
                if member.isdir() or not is_wanted(name):
                    continue
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    _refuse(f"{name} must be a regular file, and no link")
                elif member.size > MOST_FILE_BYTES:
                    _refuse(f"{name} must have at most {MOST_FILE_BYTES} bytes, got {member.size}")
                else:
                    yield f"{path}:{name}", content.read()
    except _DAMAGE as error:
        msg = f"{path}: must be a folder, or a tar archive that can be read: {error}"
        raise ValueError(msg) from error


def _tar(file: "_Bounded") -> tarfile.TarFile:
    # The type that `open` asks for includes methods for writing.
    return tarfile.open(fileobj=cast("BinaryIO", file), mode="r:")


def _refuse(words: str) -> None:
    raise ValueError(words)


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        begin = file.read(max(map(len, _OPENERS)))
    for magic, opener in _OPENERS.items():
        if begin.startswith(magic):
            return cast("BinaryIO", opener(path))
    return path.open("rb")


class _Bounded:
    """An unpacked archive that cannot be read beyond its limits."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, position: int) -> int:
        self._check(position)
        return self._file.seek(position)

    def read(self, num_bytes: int) -> bytes:
        self._check(self._file.tell() + num_bytes)
        if num_bytes > MOST_FILE_BYTES:
            _refuse(f"a header must have at most {MOST_FILE_BYTES} bytes")
        return self._file.read(num_bytes)

    def _check(self, position: int) -> None:
        if position > MOST_ARCHIVE_BYTES:
            _refuse(f"it must have at most {MOST_ARCHIVE_BYTES} bytes, unpacked")
