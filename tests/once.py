"""Make something once in a run of the tests, however many workers run them.

Tests of one module may run in several workers of pytest-xdist, each of which has fixtures of its
own. What takes long to make is kept in a folder of the run, where the other workers find it.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Get the folder that all workers of a run have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def made_once(
    name: str, make: Callable[[Path], object], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Get a folder that one worker fills. The others wait for it.

    If that fails, the next one that asks tries again.

    Args:
        name: Name of what is made, the same in all workers.
        make: Function that fills a new folder.
        tmp_path_factory: Pytest's fixture.
    """
    place = folder_of_run(tmp_path_factory) / "made_once"
    place.mkdir(exist_ok=True)
    made = place / name
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder = tmp_path_factory.mktemp(name)
            make(folder)
            folder.rename(made)
    return made
