"""Instructions that move data to and from memory, and between the threads of a warp."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from perf.emulator.errors import EmulationError
from perf.emulator.memory.global_memory import GARBAGE, Bytes
from perf.emulator.numbers import UNSIGNED, Array, bits_of, meaning
from perf.emulator.ptx import Address, Instruction, Operand, Symbol, Vector
from perf.emulator.waves import (
    WARP,
    Lanes,
    Reader,
    Step,
    Wave,
    active_of,
    reader,
    writer,
)


def movement(instruction: Instruction) -> Step | None:
    """Return the step of an instruction; None if it is of another family."""
    name, *flags = instruction.opcode.replace("::cta", "").split(".")
    build = BUILDERS.get(name)
    return build(instruction, flags) if build else None


def address_of(operand: Operand) -> Reader:
    """Return a reader of the addresses that an operand names, one for each lane.

    Addresses of 32 bits wrap around, because a compiler may subtract an offset from a register and
    add it in the address.
    """
    if not isinstance(operand, Address):
        msg = f"{operand} is no address"
        raise EmulationError(msg)
    is_wide = getattr(operand.base, "bits", 64) == 64
    read, offset = reader(operand.base, "u64" if is_wide else "u32"), operand.offset_bytes
    if is_wide:
        return lambda wave: wave.of(read(wave)).astype(np.int64) + offset
    return lambda wave: (wave.of(read(wave)).astype(np.int64) + offset) & 0xFFFFFFFF


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _load_parameter(instruction: Instruction, kind: str) -> Step:
    result, source = instruction.operands
    if not isinstance(source, Address) or not isinstance(source.base, Symbol):
        msg = f"{instruction.text}: not a parameter"
        raise EmulationError(msg)
    write, name, offset = writer(result, kind), source.base.name, source.offset_bytes
    if offset:
        msg = f"{instruction.text}: part of a parameter"
        raise EmulationError(msg)

    def step(wave: Wave, lanes: Lanes | None) -> None:
        write(wave, meaning(wave.arguments[name], kind), lanes)

    return step


def _read(wave: Wave, places: Array, num_bytes: int, active: Array, *, is_shared: bool) -> Bytes:
    programs = wave.programs[active]
    if counters := wave.counters:
        if is_shared:
            counters.shared.note(places, num_bytes, active)
        else:
            counters.loads.note(places, num_bytes, active // WARP)
    if is_shared:
        return wave.shared.read(places, num_bytes, programs, active % wave.num_threads)
    if wave.dependence:
        is_early = ~wave.has_waited[active]
        wave.dependence.check_load(places[is_early], num_bytes)
    return wave.memory.read(places, num_bytes, wave.parties(active))


def _write(wave: Wave, places: Array, data: Bytes, active: Array, *, is_shared: bool) -> None:
    if counters := wave.counters:
        if is_shared:
            counters.shared.note(places, data.shape[1], active)
        else:
            counters.stores.note(places, data.shape[1], active // WARP)
    if is_shared:
        programs = wave.programs[active]
        wave.shared.write(places, data, programs, active % wave.num_threads)
    else:
        if wave.dependence and not wave.has_waited[active].all():
            wave.dependence.check_store()
        wave.memory.write(places, data, wave.parties(active))


def _is_shared(instruction: Instruction, flags: list[str]) -> bool:
    if not {"global", "shared"} & set(flags):
        msg = f"{instruction.opcode}: generic addresses"
        raise EmulationError(msg)
    return "shared" in flags


def _load(instruction: Instruction, flags: list[str]) -> Step:
    kind = flags[-1]
    if "param" in flags:
        return _load_parameter(instruction, kind)
    is_shared = _is_shared(instruction, flags)
    item = bits_of(kind) // 8
    results = _parts(instruction.operands[0])
    writes = [writer(part, kind) for part in results]
    address = address_of(instruction.operands[1])

    def step(wave: Wave, lanes: Lanes | None) -> None:
        active = active_of(lanes, wave.num_lanes)
        places = address(wave)[active]
        data = _read(wave, places, item * len(results), active, is_shared=is_shared)
        words = np.ascontiguousarray(data).view(UNSIGNED[8 * item])
        for index, write in enumerate(writes):
            values = np.zeros(wave.num_lanes, dtype=words.dtype)
            values[active] = words[:, index]
            write(wave, meaning(values, kind), lanes)

    return step


def _store(instruction: Instruction, flags: list[str]) -> Step:
    is_shared = _is_shared(instruction, flags)
    kind = "b" + str(bits_of(flags[-1]))
    dtype = UNSIGNED[bits_of(kind)]
    reads = [reader(part, kind) for part in _parts(instruction.operands[1])]
    address = address_of(instruction.operands[0])

    def step(wave: Wave, lanes: Lanes | None) -> None:
        active = active_of(lanes, wave.num_lanes)
        words = np.stack([wave.of(read(wave))[active] for read in reads], axis=1)
        data = np.ascontiguousarray(words.astype(dtype, copy=False)).view(np.uint8)
        places = address(wave)[active]
        _write(wave, places, data, active, is_shared=is_shared)

    return step


def _copy(instruction: Instruction, flags: list[str]) -> Step:
    """Return the step of `cp.async`, which copies from global to shared memory."""
    if flags[1] == "commit_group":
        return lambda wave, lanes: wave.copies.commit(wave.whole_programs(lanes, "a commit"))
    if flags[1] in {"wait_group", "wait_all"}:
        count = instruction.operands[0].value if instruction.operands else 0  # type: ignore[union-attr]

        def wait(wave: Wave, lanes: Lanes | None) -> None:
            programs = wave.whole_programs(lanes, "a wait for copies")
            if not instruction.operands:
                wave.copies.commit(programs)
            wave.copies.wait(programs, count)

        return wait
    if flags[1] not in {"ca", "cg"}:
        msg = f"{instruction.opcode}"
        raise EmulationError(msg)
    target, source, size, *taken = instruction.operands
    target_of, source_of = address_of(target), address_of(source)
    num_bytes = size.value  # type: ignore[union-attr]
    taken_of = reader(taken[0], "u32") if taken else None

    def step(wave: Wave, lanes: Lanes | None) -> None:
        active = active_of(lanes, wave.num_lanes)
        places = target_of(wave)[active]
        data = np.zeros((len(active), num_bytes), dtype=np.uint8)
        counts = np.full(len(active), num_bytes)
        if taken_of:
            counts = wave.of(taken_of(wave))[active].astype(np.int64)
        if not np.isin(counts, (0, num_bytes)).all():
            msg = "copies of a part of their bytes"
            raise EmulationError(msg)
        full = counts > 0
        owners = wave.programs[active]
        sources = source_of(wave)[active]
        data[full] = _read(wave, sources[full], num_bytes, active[full], is_shared=False)
        threads = active % wave.num_threads
        if wave.counters:
            wave.counters.shared.note(places, num_bytes, active)

        def put(some: Array, rows: Bytes) -> None:
            needs_fence = wave.kernel.are_copies_fenced
            wave.shared.write(
                places[some], rows, owners[some], threads[some], needs_fence=needs_fence
            )

        # The target holds garbage until a wait.
        put(np.ones(len(active), dtype=bool), np.full_like(data, GARBAGE))

        def land(programs: Lanes) -> None:
            ended = programs[owners]
            late = ended & full
            again = wave.memory.read(sources[late], num_bytes, wave.parties(active[late]))
            if (again != data[late]).any():
                msg = "race: a copy under way reads what is stored meanwhile"
                raise EmulationError(msg)
            put(ended, data[ended])

        busy = np.zeros(wave.num_programs, dtype=bool)
        busy[owners] = True
        wave.copies.start(busy, land)

    return step


MATRIX_ROWS = 8
"""Number of rows, of 16 bytes each, of a matrix that `ldmatrix` reads."""


def _rows_named(wave: Wave, num_matrices: int, lanes: Lanes | None) -> Array:
    """Return the indices of the lanes whose addresses name a row of a matrix."""
    named = wave.lane_of_warp < MATRIX_ROWS * num_matrices
    return np.flatnonzero(named if lanes is None else named & lanes)


def _load_matrix(instruction: Instruction, flags: list[str]) -> Step:
    results = _parts(instruction.operands[0])
    writes = [writer(part, "b32") for part in results]
    address = address_of(instruction.operands[1])
    is_transposed = "trans" in flags
    _only_of_words(instruction, flags)

    def step(wave: Wave, lanes: Lanes | None) -> None:
        wave.whole_warps(lanes, "ldmatrix")
        named = _rows_named(wave, len(results), lanes)
        rows = _read(wave, address(wave)[named], 16, named, is_shared=True)
        matrices = rows.view(np.uint16).reshape(-1, len(results), MATRIX_ROWS, 8)
        if is_transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        # A thread gets two neighbouring elements of a row.
        pairs = np.ascontiguousarray(matrices).view(np.uint32)
        for index, write in enumerate(writes):
            held = np.zeros(wave.num_lanes, dtype=np.uint32)
            held[active_of(lanes, wave.num_lanes)] = pairs[:, index].reshape(-1)
            write(wave, held, lanes)

    return step


def _store_matrix(instruction: Instruction, flags: list[str]) -> Step:
    sources = _parts(instruction.operands[1])
    reads = [reader(part, "b32") for part in sources]
    address = address_of(instruction.operands[0])
    is_transposed = "trans" in flags
    _only_of_words(instruction, flags)

    def step(wave: Wave, lanes: Lanes | None) -> None:
        wave.whole_warps(lanes, "stmatrix")
        active = active_of(lanes, wave.num_lanes)
        pairs = [wave.of(read(wave))[active].reshape(-1, WARP) for read in reads]
        matrices = np.stack(pairs, axis=1).view(np.uint16).reshape(-1, len(reads), 8, 8)
        if is_transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        data = np.ascontiguousarray(matrices).reshape(-1, 8).view(np.uint8)
        named = _rows_named(wave, len(reads), lanes)
        _write(wave, address(wave)[named], data, named, is_shared=True)

    return step


def _only_of_words(instruction: Instruction, flags: list[str]) -> None:
    if "m8n8" not in flags or flags[-1] != "b16":
        raise EmulationError(instruction.opcode)


def _shuffle(instruction: Instruction, flags: list[str]) -> Step:
    result, *operands = instruction.operands
    mode = flags[1]
    write = writer(result, "b32")
    write_found = writer(operands.pop(0), "pred") if len(operands) == 5 else None
    value, change, clamp = (reader(operand, "u32") for operand in operands[:3])

    def step(wave: Wave, lanes: Lanes | None) -> None:
        wave.whole_warps(lanes, "shfl")
        lane = wave.lane_of_warp
        by = wave.of(change(wave)).astype(np.int64)
        limits = wave.of(clamp(wave)).astype(np.int64)
        segment, last = (limits >> 8) & 31, limits & 31
        least, most = lane & segment, (lane & segment) | (last & ~segment)
        match mode:
            case "up":
                source = lane - by
                found = source >= most
            case "down":
                source = lane + by
                found = source <= most
            case "bfly":
                source = lane ^ by
                found = source <= most
            case _:
                source = least | (by & ~segment)
                found = source <= most
        source = np.where(found, source, lane)
        warps = wave.of(value(wave)).reshape(-1, WARP)
        moved = np.take_along_axis(warps, source.reshape(-1, WARP), axis=1)
        write(wave, moved.reshape(-1), lanes)
        if write_found:
            write_found(wave, found, lanes)

    return step


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _reduce(instruction: Instruction, flags: list[str]) -> Step:
    kind = flags[-1]
    write = writer(instruction.operands[0], kind)
    read = reader(instruction.operands[1], kind)
    function = REDUCTIONS[flags[1]]

    def step(wave: Wave, lanes: Lanes | None) -> None:
        wave.whole_warps(lanes, "redux")
        values: npt.NDArray = wave.of(read(wave)).reshape(-1, WARP)
        reduced = function.reduce(values, axis=1, dtype=values.dtype)
        write(wave, np.repeat(reduced, WARP), lanes)

    return step


def _policy(_instruction: Instruction, _flags: list[str]) -> Step:
    """Return a step that does nothing, because there are no caches to which a policy applies."""
    return lambda _wave, _lanes: None


BUILDERS: dict[str, Callable[[Instruction, list[str]], Step]] = {
    "ld": _load,
    "st": _store,
    "cp": _copy,
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "shfl": _shuffle,
    "redux": _reduce,
    "createpolicy": _policy,
}
"""Name of an instruction -> function that returns its step."""
