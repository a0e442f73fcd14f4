"""Pack compiled kernels and tuned choices of one machine for another machine of the same kind.

All caches lie in one folder: those of Triton, vLLM and torch, and the results of our kernels'
trials. Archives leave out the intermediate sources of kernels, which nothing reads again.
"""

import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

TEXTS = frozenset({".ttir", ".ttgir", ".llir", ".ptx", ".source", ".lock"})
"""Endings of the files that archives leave out."""

TRITON, VLLM, TORCH, JENGA = "triton", "vllm", "inductor", "jenga"
"""Names of the folders of the caches."""

GROUP = "__grp__"
"""Prefix of the names of Triton's group files. Each lists the files of one kernel by their full
paths.
"""

HOME = "<caches>"
"""Placeholder for the path of the caches' folder in a packed group file."""

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
PART = ".{:03d}"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that make a process keep its caches in a folder."""
    folder = folder.resolve()
    return {
        "TRITON_CACHE_DIR": str(folder / TRITON),
        "VLLM_CACHE_ROOT": str(folder / VLLM),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / TORCH),
        "JENGA_CACHE": str(folder / JENGA),
    }


def pack(
    folder: Path, archive: Path, *, part_bytes: int, only: Sequence[str] | None = None
) -> list[Path]:
    """Pack a folder.

    Args:
        folder: Folder of the caches, or of other files.
        archive: File to write, `.tar.xz`. If it is longer than `part_bytes`, files with the further
            endings `.000`, `.001`, ... are written instead.
        part_bytes: Size of the longest file, in bytes.
        only: Names in the folder that are packed. None means all.

    Returns:
        The files written.
    """
    packed = io.BytesIO()
    with lzma.open(packed, "w", filters=FILTERS) as file, tarfile.open(None, "w", file) as tar:
        for path in _kept(folder, only):
            content = path.read_bytes()
            if path.name.startswith(GROUP):
                content = _without_texts(content, folder)
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size, entry.mode = len(content), path.stat().st_mode & 0o777
            tar.addfile(entry, io.BytesIO(content))
    return write_parts(packed.getvalue(), archive, part_bytes=part_bytes)


def write_parts(content: bytes, archive: Path, *, part_bytes: int) -> list[Path]:
    """Write an archive, in parts if it is longer than `part_bytes`.

    Returns:
        The files written. Files of an earlier archive of this name are deleted.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    for path in archive.parent.glob(f"{archive.name}*"):
        path.unlink()
    pieces = [content[at : at + part_bytes] for at in range(0, len(content), part_bytes)]
    if len(pieces) == 1:
        archive.write_bytes(content)
        return [archive]
    paths = [archive.with_name(archive.name + PART.format(at)) for at in range(len(pieces))]
    for path, piece in zip(paths, pieces, strict=True):
        path.write_bytes(piece)
    return paths


def read_parts(archive: Path) -> bytes:
    """Read an archive that may have been written in parts.

    Raises:
        FileNotFoundError: Neither the archive nor parts of it exist.
    """
    if archive.exists():
        return archive.read_bytes()
    parts = sorted(archive.parent.glob(f"{archive.name}.[0-9][0-9][0-9]"))
    if not parts:
        msg = f"there is neither {archive} nor parts of it"
        raise FileNotFoundError(msg)
    return b"".join(part.read_bytes() for part in parts)


def is_there(archive: Path) -> bool:
    """Whether an archive exists, whole or in parts."""
    return archive.exists() or archive.with_name(archive.name + PART.format(0)).exists()


def unpack(archive: Path, folder: Path) -> int:
    """Unpack an archive. Files that exist already stay as they are.

    Returns:
        Number of files written.

    Raises:
        FileNotFoundError: The archive does not exist.
    """
    num_files = 0
    with tarfile.open(fileobj=io.BytesIO(read_parts(archive)), mode="r:xz") as tar:
        for entry in tar:
            file = tar.extractfile(entry)
            target = (folder / entry.name).resolve()
            if file is None or not target.is_relative_to(folder.resolve()) or target.exists():
                continue
            content = file.read()
            if target.name.startswith(GROUP):
                content = content.replace(HOME.encode(), str(folder.resolve()).encode())
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(entry.mode)
            num_files += 1
    return num_files


def _kept(folder: Path, only: Sequence[str] | None) -> Iterator[Path]:
    """Yield the files to pack, in sorted order."""
    for root, folders, names in os.walk(folder):
        is_inside = Path(root) != folder
        if only is not None and not is_inside:
            folders[:] = [each for each in folders if each in only]
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        paths = (
            Path(root) / name for name in sorted(names) if is_inside or name in (only or [name])
        )
        yield from (path for path in paths if path.is_file() and path.suffix not in TEXTS)


def _without_texts(content: bytes, folder: Path) -> bytes:
    """Remove the kernel's sources from a group file, and replace the folder's path by `HOME`."""
    group = json.loads(content)
    home = str(folder.resolve())
    group["child_paths"] = {
        name: path.replace(home, HOME)
        for name, path in group["child_paths"].items()
        if not _is_text(name)
    }
    return json.dumps(group).encode()


def _is_text(name: str) -> bool:
    return Path(name).suffix in TEXTS
