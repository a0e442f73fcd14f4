"""A launch that may begin before the one ahead of it has ended: a programmatic dependent launch.

Programs may do as they like with what is theirs alone, and load what the launch ahead of theirs
does not store. All else has to come behind `griddepcontrol.wait`, which every program has to run:
else the launch could end before the one ahead of it, and what follows both would take both for
done.

Source: CUDA C++ programming guide, programmatic dependent launch.
"""

from collections.abc import Iterable

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.memory import Addresses, GlobalMemory

WAIT = "griddepcontrol.wait"


class Dependence:
    """What the programs of such a launch may do, and which have waited.

    Args:
        ahead: The memory of the launch ahead, with what that stored; None where there was none.
    """

    def __init__(self, ahead: GlobalMemory | None) -> None:
        self._stored = np.unique(ahead.stored_bytes()) if ahead else np.empty(0, dtype=np.int64)
        self._have_waited: set[int] = set()

    def note_wait(self, programs: Iterable[int]) -> None:
        """Note programs whose threads wait."""
        self._have_waited.update(programs)

    def check_load(self, addresses: Addresses, num_bytes: int) -> None:
        """Check a load by threads that have not waited.

        Raises:
            EmulationError: The launch ahead stores what it loads.
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
            EmulationError: Some have not.
        """
        if len(self._have_waited) < num_programs:
            msg = f"{num_programs - len(self._have_waited)} programs end without {WAIT}"
            raise EmulationError(msg)
