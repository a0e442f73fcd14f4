"""Programmatic dependent launches: a launch that may begin before the launch ahead has ended.

Before `griddepcontrol.wait`, a program may use its registers and shared memory, and load what the
launch ahead does not store. Everything else has to come after the wait. Every program has to run
the wait. Otherwise the launch could end before the launch ahead, and a third launch would assume
that both have ended.

Source: CUDA C++ programming guide, programmatic dependent launch.
"""

from collections.abc import Iterable

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.memory.global_memory import Addresses, GlobalMemory

WAIT = "griddepcontrol.wait"


class Dependence:
    """Checks of the programs of a dependent launch, and record of those that have waited.

    Args:
        ahead: Memory of the launch ahead, with the record of its stores; None if there was none.
    """

    def __init__(self, ahead: GlobalMemory | None) -> None:
        self._stored = np.unique(ahead.stored_bytes()) if ahead else np.empty(0, dtype=np.int64)
        self._have_waited: set[int] = set()

    def note_wait(self, programs: Iterable[int]) -> None:
        """Record programs whose threads have waited."""
        self._have_waited.update(programs)

    def check_load(self, addresses: Addresses, num_bytes: int) -> None:
        """Check a load by threads that have not waited.

        Raises:
            EmulationError: The launch ahead stores some of the bytes.
        """
        bytes_read = (addresses[:, None] + np.arange(num_bytes)).ravel()
        places = np.searchsorted(self._stored, bytes_read)
        places = np.minimum(places, max(0, len(self._stored) - 1))
        if len(self._stored) and (self._stored[places] == bytes_read).any():
            msg = f"a load before {WAIT} of what the launch ahead stores"
            raise EmulationError(msg)

    def check_store(self) -> None:
        """Refuse a store by threads that have not waited.

        Raises:
            EmulationError: Always.
        """
        msg = f"a store before {WAIT}"
        raise EmulationError(msg)

    def check_end(self, num_programs: int) -> None:
        """Check that all programs have waited.

        Raises:
            EmulationError: Some programs have not.
        """
        if len(self._have_waited) < num_programs:
            msg = f"{num_programs - len(self._have_waited)} programs end without {WAIT}"
            raise EmulationError(msg)
