"""Schedule of a wave: the order in which its threads run instructions.

All threads run an instruction together. If their paths part, the threads furthest behind in the
code go first, so that threads meet again where their paths do. A thread that must wait tries again
only when no other thread can go on. The others are then as far ahead as they can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.memory.global_memory import GROUP, WARP, Lanes
from perf.emulator.ptx import Instruction
from perf.emulator.waves import Reader, Step, Wave

MAX_STEPS = 5_000_000
"""Number of instructions after which a wave is taken to run forever."""

MAX_TEXT = 100
"""Characters to which a message that names several instructions cuts each."""

WARP_INSTRUCTIONS = frozenset(
    {"bar", "barrier", "elect", "ldmatrix", "mma", "redux", "setmaxnreg", "shfl", "stmatrix"}
)
"""Instructions that all threads of a warp must run together."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """An instruction that is ready to run.

    Attributes:
        step: Function that carries it out; None for a branch or a return.
        targets: Indices of the instructions that a branch may go to; -1 is the end.
        choice: Reader of the index into `targets` of each thread; None if there is one target.
        predicate: Index of the register that selects the threads that take part; None for all.
        is_negated: Whether threads take part if that register is false.
        registers: Registers that it uses at once. Empty for `wgmma`, whose use of registers is
            ordered by fences and waits.
        together: Number of threads that must run it together; 1 if each may run it alone.
        text: The instruction as written.
    """

    step: Step | None
    targets: tuple[int, ...]
    choice: Reader | None
    predicate: int | None
    is_negated: bool
    registers: frozenset[int]
    together: int
    text: str


def together(instruction: Instruction) -> int:
    """Return the number of threads that must run an instruction together."""
    name = instruction.opcode.split(".")[0]
    if name == "wgmma":
        return GROUP
    return WARP if name in WARP_INSTRUCTIONS else 1


class _Schedule:
    """Place of each lane of a wave in the code, for lanes that may go on and lanes that wait."""

    def __init__(self, wave: Wave, code: Sequence[Decoded], leaders: frozenset[int]) -> None:
        self._wave, self._code, self._leaders = wave, code, leaders
        self._ready: dict[int, Lanes] = {0: np.ones(wave.num_lanes, dtype=bool)}
        self._waiting: dict[int, Lanes] = {}
        self._has_moved = True
        self._num_steps = 0

    def run(self) -> None:
        while self._ready or self._waiting:
            if not self._ready:
                if not self._has_moved:
                    raise EmulationError(self._deadlock())
                self._ready, self._waiting, self._has_moved = self._waiting, {}, False
            self._drop_ended()
            index = min(self._ready)
            self._go_on(index, self._ready.pop(index))
            if self._num_steps > MAX_STEPS:
                msg = f"{self._wave.kernel.name} does not end"
                raise EmulationError(msg)
        if self._wave.barriers:
            self._wave.barriers.check_over(np.arange(self._wave.num_programs))

    def _go_on(self, index: int, lanes: Lanes) -> None:
        """Run lanes from an instruction on until they part, meet others or wait."""
        wave = self._wave
        every = None if lanes.all() else lanes
        while True:
            self._num_steps += 1
            decoded = self._code[index]
            active = every
            if decoded.predicate is not None:
                active = wave.registers[decoded.predicate]
                active = ~active if decoded.is_negated else active
                active = active if every is None else active & lanes
                if active.all():
                    active = None
            if decoded.step is None:
                self._branch(decoded, index, lanes, active)
                return
            if active is None or active.any():
                held = self._execute(decoded, decoded.step, active)
                if held is not None and held.any():
                    _send(self._waiting, index, held)
                    lanes = lanes & ~held
                    every = lanes
                    if not lanes.any():
                        return
                self._has_moved = True
            index += 1
            if self._ready and index in self._leaders:
                _send(self._ready, index, lanes)
                return

    def _branch(self, decoded: Decoded, index: int, lanes: Lanes, active: Lanes | None) -> None:
        self._has_moved = True
        taken = lanes if active is None else active
        if decoded.choice is None:
            _send(self._ready, decoded.targets[0], taken)
        else:
            choices = self._wave.of(decoded.choice(self._wave))
            for choice in np.unique(choices[taken]).tolist():
                if choice >= len(decoded.targets):
                    msg = f"{decoded.text}: the label with index {choice}"
                    raise EmulationError(msg)
                _send(self._ready, decoded.targets[choice], taken & (choices == choice))
        _send(self._ready, index + 1, lanes & ~taken)

    def _execute(self, decoded: Decoded, step: Step, active: Lanes | None) -> Lanes | None:
        """Run an instruction, and return the lanes that must try again; None for no lanes."""
        wave = self._wave
        alone = None
        if wave.barriers and active is not None and decoded.together > 1:
            alone = _alone(active, decoded.together)
            if alone is not None:
                active = active & ~alone
                if not active.any():
                    return alone
        if wave.counters:
            wave.counters.instructions += wave.num_warps(active)
        try:
            if wave.products.is_busy:
                _check_free(wave, decoded.registers, active)
            held = step(wave, active)
        except EmulationError as error:
            msg = f"{wave.kernel.name}: {decoded.text}: {error}"
            raise EmulationError(msg) from error
        if alone is None:
            return held
        return alone if held is None else alone | held

    def _deadlock(self) -> str:
        """Describe what each warp waits for, when no warp can go on."""
        wave, lines = self._wave, []
        stalls = wave.barriers.stalls if wave.barriers else {}
        for index, lanes in sorted(self._waiting.items()):
            decoded = self._code[index]
            first = int(np.flatnonzero(lanes)[0]) // WARP
            program, warp = divmod(first, wave.num_threads // WARP)
            why = stalls.get(first, "")
            if decoded.together > 1 and _alone(lanes, decoded.together) is not None:
                why = f"not all {decoded.together} threads are there"
            lines.append(
                f"warp {warp} of program {wave.program_ids[program]} and "
                f"{wave.num_warps(lanes) - 1} others at {decoded.text[:MAX_TEXT]}: {why}"
            )
        return f"{wave.kernel.name}: deadlock: " + "; ".join(lines)

    def _drop_ended(self) -> None:
        """Drop programs that have ended, if they are at least half and nothing is under way."""
        wave = self._wave
        if wave.barriers or wave.copies.is_busy or wave.products.is_busy:
            return
        alive = np.logical_or.reduce(list(self._ready.values()))
        alive = alive.reshape(wave.num_programs, -1).any(axis=1)
        if 2 * int(alive.sum()) > wave.num_programs:
            return
        lanes = alive[wave.programs]
        wave.keep(alive)
        self._ready = {index: held[lanes] for index, held in self._ready.items()}


def run(wave: Wave, code: Sequence[Decoded], leaders: frozenset[int]) -> None:
    """Run programs to their end.

    Raises:
        EmulationError: The kernel does something wrong. The message names the instruction.
    """
    _Schedule(wave, code, leaders).run()


def _alone(lanes: Lanes, num_threads: int) -> Lanes | None:
    """Return the lanes of incomplete units of `num_threads` lanes; None if all are complete."""
    units = lanes.reshape(-1, num_threads)
    is_part = units.any(axis=1) & ~units.all(axis=1)
    if not is_part.any():
        return None
    return np.repeat(is_part, num_threads) & lanes


def _check_free(wave: Wave, registers: frozenset[int], lanes: Lanes | None) -> None:
    """Refuse an instruction that uses registers of products under way."""
    active = np.ones(wave.num_lanes, dtype=bool) if lanes is None else lanes
    if wave.products.uses(registers, active.reshape(wave.num_groups, -1).any(axis=1)):
        msg = "a register of a product that nobody has waited for"
        raise EmulationError(msg)


def _send(where: dict[int, Lanes], index: int, lanes: Lanes) -> None:
    if index >= 0 and lanes.any():
        where[index] = where[index] | lanes if index in where else lanes
