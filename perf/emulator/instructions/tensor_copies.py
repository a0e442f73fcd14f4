"""Copies of boxes of a tensor to shared memory, which report to an mbarrier when they land."""

import re

import numpy as np

from perf.emulator.errors import EmulationError
from perf.emulator.instructions.movement import address_of
from perf.emulator.instructions.synchronization import barriers_of
from perf.emulator.memory.global_memory import WARP, Addresses, Bytes, Lanes
from perf.emulator.memory.tensor_maps import CHUNK_BYTES, TensorMap
from perf.emulator.ptx import Box, Instruction
from perf.emulator.waves import Step, Wave, active_of, reader


def tensor_copies(instruction: Instruction) -> Step | None:
    """Return the step of an instruction; None if it is of another family."""
    name = instruction.opcode
    if not name.startswith("cp.async.bulk"):
        return None
    found = re.fullmatch(
        r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(?:cta|cluster)\.global(?:\.tile)?"
        r"\.mbarrier::complete_tx::bytes",
        name,
    )
    if not found or len(instruction.operands) != 3:
        raise EmulationError(instruction.text)
    target, box, mbarrier = instruction.operands
    if not isinstance(box, Box) or len(box.coordinates) != int(found[1]):
        raise EmulationError(instruction.text)
    targets, mbarriers = address_of(target), address_of(mbarrier)
    descriptors = reader(box.descriptor, "u64")
    coordinates = [reader(each, "s32") for each in box.coordinates]

    def step(wave: Wave, lanes: Lanes | None) -> None:
        starts, barriers = targets(wave), mbarriers(wave)
        maps = wave.of(descriptors(wave))
        places = [wave.of(each(wave)) for each in coordinates]
        for lane in active_of(lanes, wave.num_lanes).tolist():
            tensor_map = wave.maps.get(int(maps[lane]))
            if tensor_map is None:
                msg = f"no tensor map is at {int(maps[lane]):#x}"
                raise EmulationError(msg)
            first = [int(each[lane]) for each in places]
            if len(first) != len(tensor_map.shape):
                msg = f"{len(first)} coordinates of {len(tensor_map.shape)} dimensions"
                raise EmulationError(msg)
            _start(wave, lane, tensor_map, first, int(starts[lane]), int(barriers[lane]))

    return step


def _start(
    wave: Wave, lane: int, tensor_map: TensorMap, first: list[int], start: int, barrier: int
) -> None:
    """Start the copy of a box that one lane asks for."""
    barriers = barriers_of(wave)
    program, thread = divmod(lane, wave.num_threads)
    mbarrier = barriers.find(program, thread // WARP, barrier)
    party = wave.parties(np.array([lane]))

    def read(addresses: Addresses, num_bytes: int) -> Bytes:
        return wave.memory.read(addresses, num_bytes, np.repeat(party, len(addresses)))

    def note(addresses: Addresses, num_bytes: int) -> Bytes:
        if wave.counters:
            wave.counters.loads.note(addresses, num_bytes, np.full(len(addresses), lane // WARP))
        return read(addresses, num_bytes)

    data = tensor_map.fetch(first, note)
    news = barriers.clocks.release(program, thread // WARP, np.arange(WARP) == thread % WARP)
    mbarrier.gathered |= news
    write = barriers_of(wave).memory.start_copy(
        tensor_map.places(start),
        program,
        np.stack([news.known, news.fenced]),
        mbarrier.index,
        mbarrier.epoch + 1,
    )

    def land() -> None:
        if (tensor_map.fetch(first, read) != data).any():
            msg = "race: a copy under way reads what is stored meanwhile"
            raise EmulationError(msg)
        write(data)

    mbarrier.copies.append((len(data) * CHUNK_BYTES, land))
