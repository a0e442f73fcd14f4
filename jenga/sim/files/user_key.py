"""A secret key of this user, which proves that files are the user's own."""

import os
import secrets
import stat
from pathlib import Path

from jenga.sim.files.whole_files import PRIVATE_MODE, written_whole

KEY_BYTES = 32
"""Number of bytes of the key: as many as SHA-256 has. More would add nothing."""

_FOLDER_MODE = 0o700
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def key_path() -> Path:
    """Return the path of the key, in the state folder of the XDG Base Directory Specification.

    Raises:
        OSError: This user has no home folder.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The specification asks to ignore a path that is not absolute.
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".local" / "state"
        except (RuntimeError, KeyError) as error:
            msg = "this user has no home folder, and XDG_STATE_HOME names none"
            raise OSError(msg) from error
    return folder / "jenga" / "snapshot.key"


def user_key() -> bytes:
    """Get the key of this user, which is made at the first call.

    Returns:
        `KEY_BYTES` random bytes.

    Raises:
        OSError: The key can be neither read nor made.
        ValueError: Other users could read or write the key's file, or its size is wrong.
    """
    path = key_path()
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    if not path.exists():
        with written_whole(path, mode=PRIVATE_MODE) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        key = file.read(KEY_BYTES + 1)
    # Windows keeps permissions elsewhere, and keeps other users out of a user's folder.
    is_private = os.name == "nt" or (
        status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & _OTHERS
    )
    if not is_private or len(key) != KEY_BYTES:
        msg = (
            f"{path} must be a file of {KEY_BYTES} bytes that only this user may read or write; "
            f"once removed, it is made again"
        )
        raise ValueError(msg)
    return key
