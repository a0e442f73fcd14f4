"""Instructions by which threads wait for each other, and for data."""

from collections.abc import Callable, Iterator

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.instructions.movement import address_of
from perf.emulator.memory.barriers import MBARRIER_BYTES, Barriers
from perf.emulator.memory.global_memory import GROUP, WARP, Lanes
from perf.emulator.numbers import Array
from perf.emulator.ptx import Immediate, Instruction, Symbol
from perf.emulator.waves import Reader, Step, Wave, active_of, reader, writer


def synchronization(instruction: Instruction) -> Step | None:
    """Return the step of an instruction; None if it is of another family."""
    name, *flags = instruction.opcode.replace("::cta", "").split(".")
    if name == "mbarrier":
        build = MBARRIERS.get(".".join(flag for flag in flags if flag in MBARRIER_FLAGS))
        if build is None:
            raise EmulationError(instruction.opcode)
        return build(instruction)
    build = BUILDERS.get(name)
    return build(instruction, flags) if build else None


def barriers_of(wave: Wave) -> Barriers:
    """Return the barriers of a wave; its warps must be specialised.

    Raises:
        EmulationError: They are not.
    """
    if wave.barriers is None:
        msg = "an instruction for warps that go ways of their own"
        raise EmulationError(msg)
    return wave.barriers


def _warps(wave: Wave, lanes: Lanes | None) -> Iterator[tuple[int, int, int, Lanes]]:
    """Yield for each warp that takes part: first lane, program, warp in it, threads bool[32]."""
    num_warps = wave.num_threads // WARP
    if lanes is None:
        lanes = np.ones(wave.num_lanes, dtype=bool)
    for warp, threads in enumerate(lanes.reshape(-1, WARP)):
        if threads.any():
            yield warp * WARP, *divmod(warp, num_warps), threads


def _held(wave: Wave, firsts: list[int]) -> Lanes | None:
    """Return all lanes of the warps with these first lanes, which must try again; None if none."""
    if not firsts:
        return None
    held = np.zeros(wave.num_lanes, dtype=bool)
    held.reshape(-1, WARP)[np.array(firsts) // WARP] = True
    return held


def _barrier(instruction: Instruction, flags: list[str]) -> Step:
    if "warp" in flags:
        return _warp_barrier
    if "red" in flags or "cluster" in flags:
        raise EmulationError(instruction.opcode)
    waits = "arrive" not in flags
    number, *count = (reader(operand, "u32") for operand in instruction.operands)

    def step(wave: Wave, lanes: Lanes | None) -> Lanes | None:
        if wave.barriers is None:
            programs = wave.whole_programs(lanes, "a barrier")
            wave.shared.barrier(programs)
            wave.num_barriers += 1 if programs is None else programs
            return None
        numbers = wave.of(number(wave))
        counts = wave.of(count[0](wave)) if count else np.full(wave.num_lanes, wave.num_threads)
        warps = list(_warps(wave, lanes))
        for first, program, warp, _ in warps:
            wave.barriers.arrive(
                program, warp, int(numbers[first]), int(counts[first]), waits=waits
            )
        if not waits:
            return None
        stay = [
            first
            for first, program, warp, _ in warps
            if not wave.barriers.leaves(program, warp, int(numbers[first]))
        ]
        return _held(wave, stay)

    return step


def _warp_barrier(wave: Wave, lanes: Lanes | None) -> None:
    warps = wave.whole_warps(lanes, "a barrier of a warp")
    if wave.barriers is None:
        wave.shared.warp_barrier(warps)
        return
    for _, program, warp, _ in _warps(wave, lanes):
        wave.barriers.clocks.meet(program, warp)


def _await_launch(_instruction: Instruction, flags: list[str]) -> Step:
    def step(wave: Wave, lanes: Lanes | None) -> None:
        if wave.dependence is None or "launch_dependents" in flags:
            return
        active = active_of(lanes, wave.num_lanes)
        wave.has_waited[active] = True
        wave.dependence.note_wait(wave.program_ids[wave.programs[active]].tolist())

    return step


def _fence(_instruction: Instruction, flags: list[str]) -> Step:
    """Return the step of a fence, which has an effect only on reads by tensor cores.

    Everything else that a thread stores is visible to all threads at once in the emulator.
    """
    if flags[:2] != ["proxy", "async"]:
        return lambda _wave, _lanes: None

    def step(wave: Wave, lanes: Lanes | None) -> None:
        if wave.barriers is None:
            wave.shared.fence(wave.whole_programs(lanes, "a proxy fence"))
            return
        for _, program, warp, threads in _warps(wave, lanes):
            wave.barriers.clocks.fence(program, warp, threads)

    return step


def _elect(instruction: Instruction, _flags: list[str]) -> Step:
    chosen, is_chosen, members = instruction.operands
    if members != Immediate(-1):
        msg = f"{instruction.text}: some threads of a warp"
        raise EmulationError(msg)
    write, write_is = writer(chosen, "b32"), writer(is_chosen, "pred")

    def step(wave: Wave, lanes: Lanes | None) -> None:
        wave.whole_warps(lanes, "elect")
        write(wave, np.zeros(1, dtype=np.uint32), lanes)
        write_is(wave, wave.lane_of_warp == 0, lanes)

    return step


def _set_registers(instruction: Instruction, flags: list[str]) -> Step:
    is_more = flags[0] == "inc"
    count = instruction.operands[0]
    if not isinstance(count, Immediate):
        raise EmulationError(instruction.text)

    def step(wave: Wave, lanes: Lanes | None) -> Lanes | None:
        wave.whole_warps(lanes, "setmaxnreg")
        if wave.barriers is None:
            return None
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for first, program, warp, _ in _warps(wave, lanes):
            groups.setdefault((program, warp * WARP // GROUP), []).append((first, warp))
        stay = []
        for (program, _), members in groups.items():
            warps = [warp for _, warp in members]
            if not wave.barriers.takes(program, warps, count.value, more=is_more):
                stay += [first for first, _ in members]
        return _held(wave, stay)

    return step


def _each(
    wave: Wave, lanes: Lanes | None, addresses: Array
) -> Iterator[tuple[int, int, Lanes, int]]:
    """Yield for each warp, and each address it has: program, warp, threads bool[32], address."""
    for first, program, warp, threads in _warps(wave, lanes):
        places = addresses[first : first + WARP]
        for address in np.unique(places[threads]).tolist():
            yield program, warp, threads & (places == address), address


def _init(instruction: Instruction) -> Step:
    address, count = address_of(instruction.operands[0]), reader(instruction.operands[1], "u32")

    def step(wave: Wave, lanes: Lanes | None) -> None:
        barriers, counts = barriers_of(wave), wave.of(count(wave))
        addresses = address(wave)
        for first, program, warp, threads in _warps(wave, lanes):
            for thread in (first + np.flatnonzero(threads)).tolist():
                place = int(addresses[thread])
                barriers.make(program, warp, place, int(counts[thread]))
                barriers.memory.hold(place, MBARRIER_BYTES, program, warp)

    return step


def _invalidate(instruction: Instruction) -> Step:
    address = address_of(instruction.operands[0])

    def step(wave: Wave, lanes: Lanes | None) -> None:
        barriers = barriers_of(wave)
        for program, warp, _, place in _each(wave, lanes, address(wave)):
            barriers.unmake(program, warp, place)
            barriers.memory.give_back(place, MBARRIER_BYTES, program, warp)

    return step


def _arrive(instruction: Instruction) -> Step:
    operands = list(instruction.operands)
    if operands.pop(0) != Symbol("_"):
        msg = f"{instruction.text}: the state of a barrier"
        raise EmulationError(msg)
    address, *rest = operands
    place_of, count = address_of(address), _amount(rest)
    expects = "expect_tx" in instruction.opcode

    def step(wave: Wave, lanes: Lanes | None) -> None:
        barriers, counts = barriers_of(wave), wave.of(count(wave))
        for program, warp, threads, place in _each(wave, lanes, place_of(wave)):
            mbarrier = barriers.find(program, warp, place)
            first = (program * barriers.num_warps + warp) * WARP
            total = int(counts[first : first + WARP][threads].astype(np.int64).sum())
            if expects:
                mbarrier.awaited_bytes += total
                total = int(threads.sum())
            barriers.arrive_at(mbarrier, program, warp, threads, total)

    return step


def _expect(instruction: Instruction) -> Step:
    address, count = address_of(instruction.operands[0]), _amount(instruction.operands[1:])

    def step(wave: Wave, lanes: Lanes | None) -> None:
        barriers, counts = barriers_of(wave), wave.of(count(wave))
        for program, warp, threads, place in _each(wave, lanes, address(wave)):
            first = (program * barriers.num_warps + warp) * WARP
            mbarrier = barriers.find(program, warp, place)
            mbarrier.awaited_bytes += int(counts[first : first + WARP][threads].sum())

    return step


def _amount(operands: object) -> Reader:
    one = np.ones(1, dtype=np.uint32)
    return reader(operands[0], "u32") if operands else lambda _: one  # type: ignore[index]


def _try_wait(instruction: Instruction) -> Step:
    """Return the step of a wait for a phase of an mbarrier.

    If the phase has not ended, the first try is answered "no", and the second waits. If only some
    threads of a warp ask, the other threads of the warp learn the same clocks at once.
    """
    result, address, parity, *_ = instruction.operands
    write, place_of = writer(result, "pred"), address_of(address)
    parity_of = reader(parity, "u32")

    def step(wave: Wave, lanes: Lanes | None) -> Lanes | None:
        barriers, parities = barriers_of(wave), wave.of(parity_of(wave))
        has_ended = np.zeros(wave.num_lanes, dtype=bool)
        held = np.zeros(wave.num_lanes, dtype=bool)
        for program, warp, threads, place in _each(wave, lanes, place_of(wave)):
            mbarrier = barriers.find(program, warp, place)
            first = (program * barriers.num_warps + warp) * WARP
            mine = slice(first, first + WARP)
            asked = np.unique(parities[mine][threads])
            if len(asked) > 1 or asked[0] > 1:
                msg = f"phases {asked.tolist()}: {mbarrier}"
                raise EmulationError(msg)
            asks_again = bool(barriers.has_failed[mine][threads].all())
            if asks_again and not mbarrier.has_ended(asked[0]):
                barriers.settle(mbarrier)
            if mbarrier.has_ended(asked[0]):
                barriers.clocks.acquire(program, warp, mbarrier.published)
                has_ended[mine] |= threads
                barriers.has_failed[mine] &= ~threads
            elif asks_again:
                held[mine] |= threads
                barriers.stalls[first // WARP] = str(mbarrier)
            else:
                barriers.has_failed[mine] |= threads
        answered = lanes & ~held if lanes is not None else ~held
        write(wave, has_ended, answered)
        return held

    return step


MBARRIER_FLAGS = frozenset(
    {"init", "inval", "arrive", "expect_tx", "try_wait", "test_wait", "parity", "noComplete"}
    | {"arrive_drop", "complete_tx", "pending_count", "cluster"}
)
"""Parts of the name of an mbarrier instruction that say what it does."""

MBARRIERS: dict[str, Callable[[Instruction], Step]] = {
    "init": _init,
    "inval": _invalidate,
    "arrive": _arrive,
    "arrive.expect_tx": _arrive,
    "expect_tx": _expect,
    "try_wait.parity": _try_wait,
    "test_wait.parity": _try_wait,
}
"""Parts of the name of an mbarrier instruction -> function that returns its step."""

BUILDERS: dict[str, Callable[[Instruction, list[str]], Step]] = {
    "bar": _barrier,
    "barrier": _barrier,
    "fence": _fence,
    "membar": _fence,
    "griddepcontrol": _await_launch,
    "elect": _elect,
    "setmaxnreg": _set_registers,
}
"""Name of an instruction -> function that returns its step."""
