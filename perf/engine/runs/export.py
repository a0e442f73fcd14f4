"""Carry files from one machine to the next: rows, outputs, logs and caches."""

import shutil
from pathlib import Path

from perf.engine.runs import caches
from perf.engine.runs.jobs import Paths

PART_BYTES = 15 << 20
"""Size of the longest file, in bytes: channels that return files have limits."""

STATE, LOGS, CACHES = "state.tar.xz", "logs.tar.xz", "caches.tar.xz"
"""Names of the archives. The first holds rows and outputs, with which a later call can continue."""


def copy_rows(paths: Paths, out: Path) -> None:
    """Copy the rows to `out`, so that they survive if the machine is taken away."""
    out.mkdir(parents=True, exist_ok=True)
    if paths.rows.exists():
        shutil.copyfile(paths.rows, out / paths.rows.name)


def leave(paths: Paths, out: Path) -> list[Path]:
    """Write everything that should leave the machine.

    Returns:
        The files written.
    """
    copy_rows(paths, out)
    written = [out / paths.rows.name] if paths.rows.exists() else []
    state = (paths.rows.name, paths.outputs.name)
    for archive, names in ((STATE, state), (LOGS, (paths.logs.name,))):
        written += caches.pack(paths.folder, out / archive, part_bytes=PART_BYTES, only=names)
    return written + caches.pack(paths.caches, out / CACHES, part_bytes=PART_BYTES)


def arrive(paths: Paths, source: Path) -> dict[str, int]:
    """Unpack the files of another machine. Files that exist here already stay as they are.

    Args:
        paths: Folders to unpack to.
        source: Folder of the archives. Missing archives are skipped.

    Returns:
        Archive -> number of files unpacked.
    """
    arrived: dict[str, int] = {}
    for archive, folder in ((STATE, paths.folder), (CACHES, paths.caches)):
        if caches.is_there(source / archive):
            arrived[archive] = caches.unpack(source / archive, folder)
    return arrived
