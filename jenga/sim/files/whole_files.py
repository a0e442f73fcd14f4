"""Files that are written whole or not at all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PUBLIC_MODE = 0o666
"""Permissions of a file that only the user's umask restricts."""

PRIVATE_MODE = 0o600
"""Permissions of a file that only its user may read or write."""


@contextmanager
def written_whole(path: Path, *, mode: int = PUBLIC_MODE) -> Generator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an error.

    The bytes are written to a new file beside it. If something already has the name of that file,
    for example a link by another user, it is removed and never followed.

    Args:
        path: The file to replace or to make.
        mode: Permissions of the new file. The umask restricts them further.

    Raises:
        OSError: The folder cannot be written to.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)

    def make(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        with open(part, "xb", opener=make) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
