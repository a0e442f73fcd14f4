"""What leaves a machine and comes to the next one: rows, outputs, logs, caches."""

import shutil
from pathlib import Path

from perf.engine import caches
from perf.engine.jobs import Paths

PART_BYTES = 15 << 20
"""Longest file, since places that give files back have limits."""

STATE, LOGS, CACHES = "state.tar.xz", "logs.tar.xz", "caches.tar.xz"
"""Archives: rows and outputs, which let a later call go on; logs; caches."""


def copy_rows(paths: Paths, out: Path) -> None:
    """Copy the rows, so that they are there if the machine goes away."""
    out.mkdir(parents=True, exist_ok=True)
    if paths.rows.exists():
        shutil.copyfile(paths.rows, out / paths.rows.name)


def leave(paths: Paths, out: Path) -> list[Path]:
    """Write all that is to leave the machine.

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
    """Unpack what left another machine; files that are here already stay.

    Args:
        paths: Where to.
        source: Folder of the archives; those that are not there are left out.

    Returns:
        Archive -> how many files came.
    """
    arrived: dict[str, int] = {}
    for archive, folder in ((STATE, paths.folder), (CACHES, paths.caches)):
        if caches.is_there(source / archive):
            arrived[archive] = caches.unpack(source / archive, folder)
    return arrived
