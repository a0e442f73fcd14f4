"""Barriers and registers of specialised warps: things that warps of a program wait for."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from perf.emulator.errors import EmulationError
from perf.emulator.memory.clocks import Clocks, News
from perf.emulator.memory.global_memory import WARP, Lanes
from perf.emulator.memory.ordered_memory import OrderedMemory

MAX_ARRIVALS = (1 << 20) - 1
"""Largest number of arrivals that an mbarrier counts."""

MBARRIER_BYTES = 8

MAX_MBARRIERS = 64
"""Largest number of mbarriers of a program. Each has a column in the vector clocks."""

REGISTER_FILE = 1 << 16
"""Number of 32-bit registers of a streaming multiprocessor."""

ALL = np.ones(WARP, dtype=bool)


@dataclass
class Mbarrier:
    """A barrier in shared memory.

    Attributes:
        address: Address in shared memory.
        index: Column in the vector clocks.
        num_arrivals: Number of arrivals that end a phase.
        made_by: Warp that initialised the barrier.
        made_by_clock: Clock of that warp at the time.
        phase: Number of phases that have ended.
        pending: Number of arrivals that the current phase still lacks.
        awaited_bytes: Bytes of copies that the current phase waits for in addition.
        copies: Copies under way that report to this barrier: the number of bytes, and the function
            that writes them.
        epoch: Number of phases that have ended, over all barriers that had this column in clocks.
        gathered: Clocks that warps passed on when they arrived in the current phase.
        published: Clocks that a warp learns when it waits for the last phase.
    """

    address: int
    index: int
    num_arrivals: int
    made_by: int
    made_by_clock: int
    pending: int
    gathered: News
    published: News
    epoch: int = 0
    phase: int = 0
    awaited_bytes: int = 0
    copies: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def has_ended(self, parity: int) -> bool:
        """Whether the phase with this parity has ended."""
        return self.phase % 2 != parity

    def __str__(self) -> str:
        """Describe the barrier, and what it still waits for."""
        under_way = sum(num_bytes for num_bytes, _ in self.copies)
        return (
            f"mbarrier at {self.address}, in phase {self.phase}, lacks {self.pending} of "
            f"{self.num_arrivals} arrivals and {self.awaited_bytes} bytes, {under_way} under way"
        )


@dataclass
class _Meeting:
    """State of a numbered barrier: the warps it needs, those that came, and what they passed on."""

    num_warps: int
    news: News
    num_arrived: int = 0
    waiting: list[int] = field(default_factory=list)


class Barriers:
    """Barriers and registers of the programs of a wave whose warps are specialised.

    Args:
        program_ids: Index of each program in the grid.
        num_warps: Warps of each program.
        max_registers: Registers of a thread at launch; None if the kernel does not say.
        shared_bytes: Shared memory of each program.

    Attributes:
        clocks: Vector clocks of the warps.
        memory: Shared memory of the programs.
        has_failed: Lanes whose last `try_wait` was answered that the phase has not ended.
        registers: Registers of a thread of each warp, [programs, warps].
        stalls: Warp, counted over all programs -> description of what it waits for.
    """

    def __init__(
        self,
        program_ids: npt.NDArray[np.int64],
        num_warps: int,
        max_registers: int | None,
        shared_bytes: int,
    ) -> None:
        self.num_warps = num_warps
        self.clocks = Clocks(program_ids, num_warps, MAX_MBARRIERS)
        self.memory = OrderedMemory(self.clocks, shared_bytes)
        num_programs = len(program_ids)
        self.has_failed = np.zeros(num_programs * num_warps * WARP, dtype=bool)
        self.registers = np.full((num_programs, num_warps), max_registers or 0)
        self._room = (max_registers or 0) * num_warps
        if self._room * WARP > REGISTER_FILE:
            msg = f"{self._room * WARP} registers of {REGISTER_FILE} at launch"
            raise EmulationError(msg)
        self.stalls: dict[int, object] = {}
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._has_arrived = np.zeros((num_programs, num_warps), dtype=bool)
        self._may_go = np.zeros((num_programs, num_warps), dtype=bool)
        self._mbarriers: dict[tuple[int, int], Mbarrier] = {}
        # Program and address of an mbarrier -> its index and epoch. The entry outlives the
        # mbarrier, for the next one at the same address.
        self._epochs: dict[tuple[int, int], tuple[int, int]] = {}

    # Numbered barriers.

    def arrive(
        self, program: int, warp: int, number: int, num_threads: int, *, waits: bool
    ) -> None:
        """Let a warp arrive at a numbered barrier, unless it already waits there.

        Args:
            program: Program of the warp.
            warp: Warp in its program.
            number: Number of the barrier.
            num_threads: Threads that the barrier waits for.
            waits: Whether the warp waits there until all have arrived.

        Raises:
            EmulationError: The numbers are not valid, or other warps at this barrier expect
                another number of threads.
        """
        if waits and self._has_arrived[program, warp]:
            return
        key, num_warps = (program, number), num_threads // WARP
        if num_threads % WARP or not 0 < num_warps <= self.num_warps or not 0 <= number < 16:
            msg = f"barrier {number} of {num_threads} threads"
            raise EmulationError(msg)
        meeting = self._meetings.setdefault(key, _Meeting(num_warps, self.clocks.nothing))
        if meeting.num_warps != num_warps:
            msg = f"barrier {number} of {num_threads} threads, and of {meeting.num_warps * WARP}"
            raise EmulationError(msg)
        self.clocks.meet(program, warp)
        meeting.news |= self.clocks.release(program, warp, ALL)
        meeting.num_arrived += 1
        if waits:
            self._has_arrived[program, warp] = True
            meeting.waiting.append(warp)
        if meeting.num_arrived == num_warps:
            del self._meetings[key]
            for each in meeting.waiting:
                self.clocks.acquire(program, each, meeting.news)
                self._may_go[program, each] = True

    def leaves(self, program: int, warp: int, number: int) -> bool:
        """Return whether a warp may leave the barrier where it waits; if not, record the reason."""
        if not self._may_go[program, warp]:
            meeting = self._meetings[program, number]
            lacks = meeting.num_warps - meeting.num_arrived
            self.stalls[program * self.num_warps + warp] = f"barrier {number} lacks {lacks} warps"
            return False
        self._may_go[program, warp] = self._has_arrived[program, warp] = False
        return True

    # Barriers in shared memory (mbarriers).

    def make(self, program: int, warp: int, address: int, num_arrivals: int) -> Mbarrier:
        """Initialise a barrier in shared memory.

        Raises:
            EmulationError: There is one at this address already, the address or the number of
                arrivals is not valid, or the program has too many barriers.
        """
        if address % MBARRIER_BYTES or not 0 < num_arrivals <= MAX_ARRIVALS:
            msg = f"an mbarrier at {address} of {num_arrivals} arrivals"
            raise EmulationError(msg)
        key = program, address
        if key in self._mbarriers:
            msg = f"an mbarrier at {address}, where one is already"
            raise EmulationError(msg)
        index, epoch = self._epochs.get(key, (sum(each[0] == program for each in self._epochs), 0))
        if index >= MAX_MBARRIERS:
            msg = f"more than {MAX_MBARRIERS} mbarriers"
            raise EmulationError(msg)
        self._epochs[key] = index, epoch
        nothing = self.clocks.nothing
        made = Mbarrier(
            address=address,
            index=self.num_warps + index,
            num_arrivals=num_arrivals,
            made_by=warp,
            made_by_clock=int(self.clocks.known[program, warp, warp]),
            pending=num_arrivals,
            gathered=nothing,
            published=nothing,
            epoch=epoch,
        )
        self._mbarriers[key] = made
        return made

    def unmake(self, program: int, warp: int, address: int) -> None:
        """Invalidate a barrier, so that its place can be used again."""
        gone = self.find(program, warp, address)
        if gone.copies:
            msg = f"invalid while copies are under way: {gone}"
            raise EmulationError(msg)
        del self._mbarriers[program, address]
        self._epochs[program, address] = gone.index - self.num_warps, gone.epoch

    def find(self, program: int, warp: int, address: int) -> Mbarrier:
        """Return the barrier at an address.

        Raises:
            EmulationError: There is none, or another warp made it and this warp has not
                synchronised with that one since.
        """
        found = self._mbarriers.get((program, address))
        if found is None:
            msg = f"no mbarrier is at {address}"
            raise EmulationError(msg)
        if found.made_by_clock > self.clocks.known[program, warp, found.made_by]:
            if found.made_by == warp:
                return found
            msg = f"race: an mbarrier at {address} that another warp makes, with no barrier between"
            raise EmulationError(msg)
        return found

    def arrive_at(
        self, mbarrier: Mbarrier, program: int, warp: int, lanes: Lanes, count: int
    ) -> None:
        """Let threads of a warp arrive at a barrier.

        Raises:
            EmulationError: More threads arrive than the barrier waits for.
        """
        if count > mbarrier.pending:
            msg = f"{count} arrivals more: {mbarrier}"
            raise EmulationError(msg)
        mbarrier.gathered |= self.clocks.release(program, warp, lanes)
        mbarrier.pending -= count
        if not mbarrier.copies:
            self.settle(mbarrier)

    def settle(self, mbarrier: Mbarrier) -> None:
        """End a barrier's phase, and its copies, if it waits for nothing but copies under way.

        Raises:
            EmulationError: The copies bring more bytes than the barrier expects.
        """
        if mbarrier.pending:
            return
        under_way = sum(num_bytes for num_bytes, _ in mbarrier.copies)
        if under_way > mbarrier.awaited_bytes:
            msg = f"copies bring more than is expected: {mbarrier}"
            raise EmulationError(msg)
        if under_way < mbarrier.awaited_bytes:
            return
        for _, land in mbarrier.copies:
            land()
        mbarrier.copies, mbarrier.awaited_bytes = [], 0
        mbarrier.phase += 1
        mbarrier.epoch += 1
        mbarrier.pending = mbarrier.num_arrivals
        mbarrier.published = News(mbarrier.gathered.known.copy(), mbarrier.gathered.fenced.copy())
        mbarrier.published.known[mbarrier.index] = mbarrier.epoch
        mbarrier.gathered = self.clocks.nothing

    def check_over(self, programs: npt.NDArray[np.int64]) -> None:
        """Check that programs that have ended have no copies under way.

        Raises:
            EmulationError: A copy is under way.
        """
        for (program, _), mbarrier in self._mbarriers.items():
            if mbarrier.copies and program in programs:
                msg = f"a program ends while copies are under way: {mbarrier}"
                raise EmulationError(msg)

    # Registers.

    def takes(self, program: int, warps: list[int], num_registers: int, *, more: bool) -> bool:
        """Change the registers per thread of some warps if the program has enough of them.

        Args:
            program: Program of the warps.
            warps: Warps that ask together.
            num_registers: Registers per thread that they ask for.
            more: Whether they ask for more registers, and do not give some back.

        Returns:
            Whether the warps got them. Always true if the kernel has no number at launch. If not,
            the warps have to wait, and the reason is recorded.

        Raises:
            EmulationError: The number is not valid, or the warps have more already, or fewer if
                they were to give some back.
        """
        if not self._room:
            return True
        held = self.registers[program]
        if num_registers % 8 or not 24 <= num_registers <= 256:
            msg = f"{num_registers} registers"
            raise EmulationError(msg)
        if any(
            held[warp] > num_registers if more else held[warp] < num_registers for warp in warps
        ):
            msg = f"{num_registers} registers, of {held[warps].tolist()}"
            raise EmulationError(msg)
        change = sum(num_registers - int(held[warp]) for warp in warps)
        total = int(held.sum())
        if total + change > self._room:
            why = f"{num_registers} registers, {(total + change) * WARP} of {self._room * WARP}"
            for warp in warps:
                self.stalls[program * self.num_warps + warp] = why
            return False
        held[warps] = num_registers
        return True
