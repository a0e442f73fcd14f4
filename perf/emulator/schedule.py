"""How the programs of a wave go through code.

All threads run an instruction together. Where they part, those that are furthest behind go first,
so they meet again where their paths do. Who must wait tries again once nobody else can go on:
others are as far ahead as they can be by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.memory import GROUP, WARP, Lanes
from perf.emulator.ptx import Instruction
from perf.emulator.waves import Reader, Step, Wave

MAX_STEPS = 5_000_000
"""Instructions after which programs count as ones that do not end."""

MAX_TEXT = 100
"""Characters of an instruction where several are named."""

WARP_INSTRUCTIONS = frozenset(
    {"bar", "barrier", "elect", "ldmatrix", "mma", "redux", "setmaxnreg", "shfl", "stmatrix"}
)
"""That all threads of a warp run together."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """An instruction, made ready to run.

    Attributes:
        step: What it does; None for a branch or a return.
        targets: Where a branch goes; -1 is the end.
        choice: Which of these, for each thread; None where there is one.
        predicate: Index of the register that says which threads take part.
        is_negated: Whether those take part where it is false.
        registers: What it reads or writes at once; none for what fences and waits order.
        together: Threads that must run it together; 1 where each may alone.
        text: As written.
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
    """How many threads must run an instruction together."""
    name = instruction.opcode.split(".")[0]
    if name == "wgmma":
        return GROUP
    return WARP if name in WARP_INSTRUCTIONS else 1


class _Schedule:
    """Where the lanes of a wave are: those that may go on, and those that wait."""

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
        """Run lanes from an instruction up to where they part, meet others or wait."""
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
        """Run an instruction; who must try again."""
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
        """Who waits for what, where nobody can go on."""
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
        """Drop programs that have ended, if they are half of all and nothing is under way."""
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
        EmulationError: What the kernel does is an error; names the instruction.
    """
    _Schedule(wave, code, leaders).run()


def _alone(lanes: Lanes, num_threads: int) -> Lanes | None:
    """Lanes whose neighbours are not all there; None where there are none."""
    units = lanes.reshape(-1, num_threads)
    is_part = units.any(axis=1) & ~units.all(axis=1)
    if not is_part.any():
        return None
    return np.repeat(is_part, num_threads) & lanes


def _check_free(wave: Wave, registers: frozenset[int], lanes: Lanes | None) -> None:
    """Refuse registers of products that are under way."""
    active = np.ones(wave.num_lanes, dtype=bool) if lanes is None else lanes
    if wave.products.uses(registers, active.reshape(wave.num_groups, -1).any(axis=1)):
        msg = "a register of a product that nobody has waited for"
        raise EmulationError(msg)


def _send(where: dict[int, Lanes], index: int, lanes: Lanes) -> None:
    if index >= 0 and lanes.any():
        where[index] = where[index] | lanes if index in where else lanes
