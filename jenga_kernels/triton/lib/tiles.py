"""Tile sizes, warps and stages by shape and machine.

Shapes decide, never model names. The sizes for GPUs are those that compile without spills
(tests/kernels/attention/test_compiled_attention.py). Those for the interpreter are large,
because its cost is per operation and hardly per element.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton

HOPPER = 90
"""Compute capability, times ten, of the first GPU with warpgroup matrix instructions."""

BLACKWELL = 100
"""Compute capability, times ten, of the first GPU with matrix results outside of registers."""

DESKTOP_BLACKWELL = 120
"""Compute capability, times ten, of the first GPU after Hopper with less than half of its shared
memory."""

ADA = 89
"""Compute capability, times ten, of the first GPU that converts to and from float8_e4m3fn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties of a GPU, or of Triton's interpreter, that decide tile sizes.

    Attributes:
        capability: Compute capability times ten; 0 for Triton's interpreter.
        num_processors: Streaming multiprocessors; 1 for the interpreter.
    """

    capability: int
    num_processors: int

    @property
    def is_interpreter(self) -> bool:
        """Whether it is a CPU: kernels run in Triton's interpreter, or not at all."""
        return self.capability == 0

    @property
    def has_large_tiles(self) -> bool:
        """Whether a program may have 227 KiB of shared memory, as on Hopper; elsewhere 99 KiB."""
        return HOPPER <= self.capability < DESKTOP_BLACKWELL

    @property
    def has_fp8(self) -> bool:
        """Whether kernels can read and write float8_e4m3fn."""
        return self.is_interpreter or self.capability >= ADA

    @property
    def has_dependent_launches(self) -> bool:
        """Whether a kernel can begin while the one before it runs, and await it by itself."""
        return self.capability >= HOPPER

    @property
    def has_tensor_memory(self) -> bool:
        """Whether results of matrix instructions are in tensor memory instead of registers."""
        return BLACKWELL <= self.capability < DESKTOP_BLACKWELL


TENSOR_MEMORY_KEYS = 64
"""Most keys of a prefill tile whose scores and weights, read from tensor memory, fit registers."""

INTERPRETER = Machine(capability=0, num_processors=1)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether kernels run on `device`'s tensors: always, except on a CPU.

    On a CPU they run in Triton's interpreter, if `TRITON_INTERPRET=1` was set before the first
    import of `jenga_kernels`. They also run there with a driver that emulates a GPU.

    Args:
        device: Device of the tensors.
    """
    if device.type != "cpu" or triton.knobs.runtime.interpret:
        return True
    try:
        driver = triton.runtime.driver.active
    except RuntimeError:  # Triton finds no GPU
        return False
    return driver.get_active_torch_device().type == "cpu"


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Describe the machine that runs kernels on `device`'s tensors.

    Args:
        device: Device of the tensors. One of several GPUs needs its index, as tensors have it.

    Raises:
        ValueError: If the tensors are not on a CPU, and Triton finds no GPU or one that is not
            NVIDIA's.
    """
    if triton.knobs.runtime.interpret or not has_kernels(device):
        return INTERPRETER
    try:
        driver = triton.runtime.driver.active
    except RuntimeError as error:
        msg = (
            f"tensors must be on an NVIDIA GPU or on the CPU, got some on {device}, and Triton "
            f"finds no GPU"
        )
        raise ValueError(msg) from error
    target = driver.get_current_target()
    if target.backend != "cuda":
        msg = (
            f"tensors must be on an NVIDIA GPU, got some on {device}, for which Triton compiles "
            f"with its backend {target.backend!r}, {target.arch}"
        )
        raise ValueError(msg)
    index, capability = device.index or 0, target.arch
    if device.type == "cuda":
        # Triton's target is the current GPU, which need not be that of the tensors.
        index = torch.cuda.current_device() if device.index is None else device.index
        major, minor = torch.cuda.get_device_capability(index)
        capability = 10 * major + minor
    properties = driver.utils.get_device_properties(index)
    return Machine(capability=capability, num_processors=properties["multiprocessor_count"])


def overlapping(machine: Machine) -> dict[str, bool]:
    """Options of a launch that may begin before the previous kernel ends, if the GPU can do so.

    The kernel has to await the previous one; see `device.await_kernel_before`.
    """
    return {"launch_pdl": True} if machine.has_dependent_launches else {}


def power_of_two(value: int) -> int:
    """Least power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTiles:
    """Tiles of a kernel that copies rows.

    Attributes:
        block_rows: Number of rows that a program copies.
        num_warps: Warps of a program.
    """

    block_rows: int
    num_warps: int


def copy_tiles(machine: Machine, row_elements: int) -> CopyTiles:
    """Choose tiles for `kv_store`.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        row_elements: Elements of one row, one head of one token.
    """
    if machine.is_interpreter:
        return CopyTiles(block_rows=1024, num_warps=1)
    # 4 warps with 16 elements of K and of V per thread: two 16-byte loads of each in flight.
    return CopyTiles(block_rows=max(1, 2048 // power_of_two(row_elements)), num_warps=4)


LOAD_BYTES = 16
"""Bytes of the widest load or store of a thread."""

LINE_BYTES = 128
"""Bytes of a cache line. Eight threads read one."""


def line_elements(machine: Machine, row_elements: int, element_bytes: int) -> int:
    """Number of elements of a row in one cache line, or of all of a shorter row.

    Args:
        machine: GPU, or interpreter, that runs the kernel. For the interpreter, a row is one part.
        row_elements: Elements of the row.
        element_bytes: Bytes of an element where it is loaded.
    """
    whole_row = power_of_two(row_elements)
    return whole_row if machine.is_interpreter else min(whole_row, LINE_BYTES // element_bytes)


def page_tiles(machine: Machine) -> CopyTiles:
    """Choose tiles for `page_copy` and `page_clear`, whose rows are words of 4 bytes."""
    if machine.is_interpreter:
        return CopyTiles(block_rows=65536, num_warps=1)
    return CopyTiles(block_rows=4096, num_warps=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTiles:
    """Tiles of a kernel that loops over keys.

    Attributes:
        block_m: Rows of a program. A row is one head of one query token.
        block_n: Keys of one step of the loop.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline over keys.
        value_parts: Number of programs that share the rows, 1 or 2. Each computes a part of the
            elements of their results.
        reads_pairs: Whether prefill reads elements of one byte in pairs, as decoding does.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    value_parts: int = 1
    reads_pairs: bool = False

    def part_dim(self, value_dim: int) -> int:
        """Elements of a result that one program computes. A part is a multiple of 16 elements."""
        if self.value_parts == 1:
            return value_dim
        return min(value_dim, triton.cdiv(value_dim, 16 * self.value_parts) * 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecializedTiles:
    """Tiles of the warp-specialised prefill kernel.

    Attributes:
        block_n: Keys of one step of the loop.
        num_stages: Number of steps whose keys and values fit in shared memory.
        takes_turns: Whether the groups of warps that multiply issue their products in turns.
        loads_rows: Whether the loading warp also loads queries ahead, which needs shared memory for
            two tiles of queries.
        num_programs: Number of programs that the row tiles are spread over.
        joins_pages: Whether small pages that follow one another in the arena are loaded as one box.
            No GPU has timed it.
    """

    block_n: int
    num_stages: int
    takes_turns: bool
    loads_rows: bool
    num_programs: int
    joins_pages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamTiles:
    """Tiles of the warp-specialised decode kernel of latent attention.

    Attributes:
        num_members: Number of programs in a team, which shares the work of one of `num_programs`.
            Each has WARPGROUP_ROWS rows of its requests.
        takes_turns: Whether the groups of warps that multiply issue their scores in turns.
        joins_pages: As in `SpecializedTiles`.
    """

    num_members: int
    takes_turns: bool
    joins_pages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """Tiles of `paged_attention`.

    Attributes:
        decode: Tiles for requests with few query tokens.
        prefill: Tiles for all other requests.
        num_programs: Number of programs that the decode kernel's work is spread over.
        block_splits: Number of partial results that the merge reads at once.
        specialized_prefill: If given, the warp-specialised kernel for Hopper does the work of
            `prefill`, with as many rows: SPECIALIZED_ROWS.
        specialized_decode: If given, the warp-specialised kernel of latent attention for Hopper
            does the work of `decode`, with as many keys a step.
    """

    decode: LoopTiles
    prefill: LoopTiles
    num_programs: int
    block_splits: int
    specialized_prefill: SpecializedTiles | None = None
    specialized_decode: TeamTiles | None = None


MIN_ROWS = 16
"""Fewest rows of a matrix instruction."""

WARPGROUP_ROWS = 64
"""Rows of a warpgroup matrix instruction."""

SPECIALIZED_ROWS = 128
"""Rows of a warp-specialised program: those of its two groups of warps that multiply."""

SWIZZLE_ROWS = 8
"""Rows of a swizzle pattern of shared memory. Boxes of rows that TMA writes are aligned to it."""

WIDE_HEAD = 512
"""Padded elements of a head whose results, or queries, take most of a program's registers."""

DECODE_PROGRAMS_PER_PROCESSOR = 2
"""Decode programs per multiprocessor. Two hide each other's waits at both ends of a key range."""


NARROW_HEAD = 64
"""Padded elements of the narrowest heads."""

BRIEF_WINDOW = 256
"""Most keys of a window that is called brief. A few tiles hold them, so most of a program's time is
the wait at the start of its range."""

BRIEF_PROGRAMS_PER_PROCESSOR = 8
"""Decode programs per multiprocessor, of one warp each, for brief windows: they hide each other's
waits.

An H100 takes 26.5 us instead of 30.3 (gpt-oss, 128 requests, windows of 128). For longer ranges of
keys such programs take up to 11 % more.
"""


def attention_tiles(
    machine: Machine,
    *,
    head_dim: int,
    element_bytes: int,
    stored_bytes: int,
    decode_rows: int,
    has_slot_scales: bool = False,
    is_int4: bool = False,
    window_tokens: int | None = None,
) -> AttentionTiles:
    """Choose tiles for `paged_attention`.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        head_dim: Elements of one head of one token.
        element_bytes: Bytes of an element of the queries.
        stored_bytes: Bytes of an element in the pages.
        decode_rows: Most rows of a request that the decode kernel serves, at most
            `max_decode_rows`.
        has_slot_scales: Whether slots have scales of their own. A program then holds those of the
            keys of a step.
        is_int4: Whether elements in the pages have four bits.
        window_tokens: Most keys that a query reads. None means all before it.
    """
    decode_rows = max(MIN_ROWS, power_of_two(decode_rows))
    if machine.is_interpreter:
        return AttentionTiles(
            decode=LoopTiles(block_m=decode_rows, block_n=1024, num_warps=1, num_stages=1),
            prefill=LoopTiles(block_m=1024, block_n=512, num_warps=1, num_stages=1),
            num_programs=1,
            block_splits=16,
        )
    block_d = min(WIDE_HEAD, max(64, power_of_two(head_dim)))
    is_large = machine.has_large_tiles
    num_programs = DECODE_PROGRAMS_PER_PROCESSOR * machine.num_processors
    if block_d < WIDE_HEAD:
        decode = _decode_tiles(block_d, element_bytes, stored_bytes, decode_rows, is_large)
    else:
        decode = _wide_decode_tiles(machine, element_bytes, decode_rows)
        if decode_rows > MIN_ROWS:  # one such program fills a multiprocessor
            num_programs = machine.num_processors // decode.value_parts
    is_brief = (
        window_tokens is not None
        and window_tokens <= BRIEF_WINDOW
        and (is_large, block_d, decode_rows) == (True, NARROW_HEAD, MIN_ROWS)
        and element_bytes == stored_bytes == 2  # noqa: PLR2004 - bytes of bfloat16 and float16
    )
    if is_brief:
        decode = replace(decode, block_n=MIN_ROWS, num_warps=1)
        num_programs = BRIEF_PROGRAMS_PER_PROCESSOR * machine.num_processors
    if has_slot_scales and MIN_ROWS < decode.block_m < WARPGROUP_ROWS:
        # Scores, and the least elements of four-bit heads, take the registers of more keys.
        decode = replace(decode, block_n=min(32, decode.block_n))
    prefill = PREFILL_TILES[is_large, element_bytes, stored_bytes, block_d]
    if not is_large and stored_bytes < element_bytes == 2 and not is_int4:  # noqa: PLR2004
        prefill = PAIR_TILES[block_d]
    elif has_slot_scales and block_d == NARROW_HEAD and element_bytes == 2:  # noqa: PLR2004
        prefill = replace(prefill, block_n=prefill.block_n // 2)
    if machine.has_tensor_memory:
        prefill = replace(prefill, block_n=min(prefill.block_n, TENSOR_MEMORY_KEYS))
    return AttentionTiles(
        decode=decode,
        prefill=prefill,
        num_programs=num_programs,
        block_splits=32 if block_d < WIDE_HEAD else 16,
    )


def specialized_tiles(
    machine: Machine,
    *,
    head_dim: int,
    page_tokens: int,
    element_bytes: int,
    window_tokens: int | None = None,
) -> SpecializedTiles | None:
    """Choose tiles for the warp-specialised prefill kernel; None if it cannot run.

    Args:
        machine: GPU, or interpreter, that would run the kernel.
        head_dim: Elements of one head of one token.
        page_tokens: Slots of a page.
        element_bytes: Bytes of an element of the queries.
        window_tokens: Most keys that a query reads. None means all before it.
    """
    can_run = (
        HOPPER <= machine.capability < BLACKWELL
        and element_bytes == 2  # noqa: PLR2004 - the swizzle patterns are for 16 bits
        and page_tokens % SWIZZLE_ROWS == 0
    )
    found = SPECIALIZED_TILES.get(max(64, power_of_two(head_dim))) if can_run else None
    if found is None:
        return None
    block_n, num_stages, takes_turns = found
    if window_tokens is not None and window_tokens <= NARROW_WINDOW and block_n > NARROW_KEYS:
        num_stages = max(num_stages, NARROW_STAGES)
        block_n = NARROW_KEYS
    return SpecializedTiles(
        block_n=block_n,
        num_stages=num_stages,
        takes_turns=takes_turns,
        loads_rows=power_of_two(head_dim) < 256,  # noqa: PLR2004 - wider ones fill shared memory
        num_programs=machine.num_processors,
    )


def max_decode_rows(machine: Machine, *, head_dim: int, element_bytes: int) -> int | None:
    """Most rows of a request for which the decode kernel has tiles. None means any number.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        head_dim: Elements of one head of one token.
        element_bytes: Bytes of an element of the queries.
    """
    if machine.is_interpreter:
        return None
    if power_of_two(head_dim) < WIDE_HEAD:
        # Shared memory of 99 KiB has no room for more rows this wide in float32.
        is_crowded = 2 * power_of_two(head_dim) >= WIDE_HEAD and element_bytes == 4  # noqa: PLR2004
        return 2 * MIN_ROWS if is_crowded and not machine.has_large_tiles else None
    kind = (machine.has_large_tiles, element_bytes)
    return max(rows for *of, rows in WIDE_DECODE_TILES if tuple(of) == kind)


def _decode_tiles(
    block_d: int, element_bytes: int, stored_bytes: int, decode_rows: int, is_large: bool
) -> LoopTiles:
    """Choose tiles with 16 KiB of keys and of values a step.

    The load of a page id and the load that depends on it take two stages. So five stages keep two
    steps in flight.
    """
    # Operands of float32 products are float32 in registers, whatever their type in memory.
    is_float32 = element_bytes == 4  # noqa: PLR2004
    block_n = min(128, 16384 // (block_d * (element_bytes if is_float32 else stored_bytes)))
    if block_d > 128:  # noqa: PLR2004 - rows this wide leave no registers for more keys
        block_n = min(32, block_n)
    if not is_large or decode_rows > MIN_ROWS:
        block_n = block_n // 2
    num_stages = 4 if is_float32 else 5  # float32 products need registers
    num_warps = 4
    if decode_rows * block_d > 8192:  # noqa: PLR2004 - results of draft tokens, 64 a thread
        num_warps = 8
        num_stages = num_stages if is_large else 3
        # Bytes that become operands of matrix instructions pass through more registers.
        block_n = block_n if is_large else min(16 * stored_bytes, block_n)
    if is_float32 and stored_bytes < element_bytes:
        # Conversions leave no registers to load a step ahead.
        num_warps, num_stages = 8, 1
    return LoopTiles(
        block_m=decode_rows, block_n=max(16, block_n), num_warps=num_warps, num_stages=num_stages
    )


def _wide_decode_tiles(machine: Machine, element_bytes: int, decode_rows: int) -> LoopTiles:
    """Choose tiles for heads of more than 256 elements."""
    is_warpgroup = machine.has_tensor_memory and decode_rows >= WARPGROUP_ROWS
    if is_warpgroup and element_bytes == 2:  # noqa: PLR2004
        # Transfers between tensor memory and registers leave none to load a step ahead.
        return _loop_tiles(decode_rows, 32, 8, 1, 2)
    return WIDE_DECODE_TILES[machine.has_large_tiles, element_bytes, decode_rows]


def _loop_tiles(
    block_m: int, block_n: int, num_warps: int, num_stages: int, value_parts: int = 1
) -> LoopTiles:
    return LoopTiles(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        value_parts=value_parts,
    )


WIDE_DECODE_TILES = {
    # Key: has large tiles, bytes of an element of queries, rows
    (True, 2, 16): _loop_tiles(16, 16, 4, 5),
    (True, 2, 32): _loop_tiles(32, 32, 8, 5),
    (True, 2, 64): _loop_tiles(64, 16, 8, 5),
    (True, 2, 128): _loop_tiles(128, 16, 8, 5, 2),
    (True, 4, 16): _loop_tiles(16, 16, 8, 1),
    (True, 4, 32): _loop_tiles(32, 16, 8, 1, 2),
    (True, 4, 64): _loop_tiles(64, 16, 8, 1, 2),
    (False, 2, 16): _loop_tiles(16, 16, 4, 5),
    (False, 2, 32): _loop_tiles(32, 16, 8, 5),
    (False, 2, 64): _loop_tiles(64, 16, 8, 3, 2),
    (False, 4, 16): _loop_tiles(16, 16, 8, 1),
}
"""Tiles of the decode kernel for heads of more than 256 elements, with up to 32 KiB of keys a step.

If the results of all rows do not fit into registers, two programs each compute half of the result
elements, and each computes all scores.
"""


PREFILL_TILES = {
    # Key: has large tiles, bytes of an element of queries and of pages, padded head_dim
    (True, 2, 2, 64): _loop_tiles(128, 128, 8, 5),
    (True, 2, 2, 128): _loop_tiles(128, 64, 8, 5),
    (True, 2, 2, 256): _loop_tiles(128, 32, 8, 5),
    (True, 2, 2, 512): _loop_tiles(128, 32, 8, 3, 2),
    (True, 2, 1, 64): _loop_tiles(128, 128, 8, 5),
    (True, 2, 1, 128): _loop_tiles(128, 64, 8, 5),
    (True, 2, 1, 256): _loop_tiles(128, 32, 8, 5),
    (True, 2, 1, 512): _loop_tiles(128, 32, 8, 5, 2),
    (True, 4, 4, 64): _loop_tiles(64, 32, 8, 1),
    (True, 4, 4, 128): _loop_tiles(32, 16, 8, 1),
    (True, 4, 4, 256): _loop_tiles(16, 16, 8, 1),
    (True, 4, 4, 512): _loop_tiles(16, 16, 8, 1),
    (True, 4, 1, 64): _loop_tiles(64, 32, 8, 1),
    (True, 4, 1, 128): _loop_tiles(32, 16, 8, 1),
    (True, 4, 1, 256): _loop_tiles(16, 16, 8, 1),
    (True, 4, 1, 512): _loop_tiles(16, 16, 8, 1),
    (False, 2, 2, 64): _loop_tiles(128, 64, 8, 5),
    (False, 2, 2, 128): _loop_tiles(64, 64, 8, 5),
    (False, 2, 2, 256): _loop_tiles(64, 32, 8, 2),
    (False, 2, 2, 512): _loop_tiles(32, 16, 8, 5),
    (False, 2, 1, 64): _loop_tiles(128, 64, 8, 5),
    (False, 2, 1, 128): _loop_tiles(64, 64, 8, 2),
    (False, 2, 1, 256): _loop_tiles(64, 32, 8, 2),
    (False, 2, 1, 512): _loop_tiles(32, 16, 8, 5),
    (False, 4, 4, 64): _loop_tiles(64, 32, 8, 1),
    (False, 4, 4, 128): _loop_tiles(32, 16, 8, 1),
    (False, 4, 4, 256): _loop_tiles(16, 16, 8, 1),
    (False, 4, 4, 512): _loop_tiles(16, 16, 8, 1),
    (False, 4, 1, 64): _loop_tiles(64, 32, 8, 1),
    (False, 4, 1, 128): _loop_tiles(32, 16, 8, 1),
    (False, 4, 1, 256): _loop_tiles(16, 16, 8, 1),
    (False, 4, 1, 512): _loop_tiles(16, 16, 8, 1),
}
"""The largest prefill tiles that compile without spills with every option.

As in decoding, five stages load one step while the previous one is computed. With up to four
stages, each step is awaited as soon as it is requested. 128 rows of 512 elements and two steps
leave no shared memory for a third. There, Hopper requests a step before the last product of the
previous one, and then waits for it.
"""

PAIR_TILES = {
    64: replace(_loop_tiles(128, 64, 8, 5), reads_pairs=True),
    128: replace(_loop_tiles(128, 64, 8, 5), reads_pairs=True),
    256: replace(_loop_tiles(128, 16, 8, 5), reads_pairs=True),
    512: replace(_loop_tiles(32, 16, 8, 5), reads_pairs=True),
}
"""Tiles of prefill before Hopper by padded head_dim, for pages with elements of one byte.

Matrix instructions of these GPUs read registers, and loads from shared memory into registers give
at least 16 bits. Single bytes of values would take two to three times as many instructions. 32 keys
of 256 elements would take a fifth fewer instructions, but spill with some options.
"""

NARROW_WINDOW = 512
"""Most keys of a window for which tiles of 128 keys read too many keys outside of it.

With tiles of 64 keys, an H100 takes 0.7 of the time for a window of 128. It takes 0.93 to 0.99 for
one of 512.
"""

NARROW_KEYS = 64
"""Keys of a prefill tile for such windows. Shared memory then holds NARROW_STAGES steps or more."""

NARROW_STAGES = 4

SPECIALIZED_TILES = {
    64: (128, 4, True),
    128: (128, 2, True),
    256: (64, 2, False),
}
"""Keys, stages and whether groups take turns, by padded head_dim.

These tiles fill shared memory and spill no register. Turns are taken where FlashAttention-3 takes
them.
"""
