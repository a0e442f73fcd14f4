"""Tile sizes of the kernels of the gated delta rule.

Those for GPUs compile without spills (tests/kernels/delta/test_delta_*.py). Those for the
interpreter are large, because its cost is per operation and hardly per element.
"""

from dataclasses import dataclass

import torch

from jenga_kernels.triton.lib.tiles import BLACKWELL, HOPPER, Machine, line_elements, power_of_two
from jenga_kernels.triton.recurrent.tiles import (
    CHUNK_CHANNELS,
    CHUNK_TOKENS,
    LEAST_PRODUCT,
    REPLAY_ELEMENTS,
    USUAL_HISTORY,
    is_copied_ahead,
    replay_elements,
)

RUN_TOKENS = 4
"""Consecutive tokens that a thread holds if every key channel has its own decay."""


CHUNK_REGISTERS = 168
"""Most registers of a thread that prepares a chunk with one decay for each head.

With so many, three programs share a multiprocessor. An H100 took 142 us for 8192 tokens through 32
heads with three programs, 154 with four, which have too few registers, and 175 with two.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTiles:
    """Tiles of `delta_scan`.

    Attributes:
        block_tokens: Tokens of a chunk.
        block_keys: Width of a tile of keys.
        block_values: Values of a program that scans chunks.
        chunk_warps: Warps of a program that prepares one chunk.
        chunk_registers: Most registers of a thread of that program. None lets the compiler choose.
        scan_warps: Warps of a program that scans chunks.
        scan_stages: Number of chunks that such a program holds or loads at a time, the current one
            included.
    """

    block_tokens: int
    block_keys: int
    block_values: int
    chunk_warps: int
    chunk_registers: int | None
    scan_warps: int
    scan_stages: int


def delta_scan_tiles(
    machine: Machine,
    head_k_dim: int,
    head_v_dim: int,
    element_bytes: int,
    *,
    is_per_channel: bool,
) -> DeltaTiles:
    """Choose tiles for `delta_scan`.

    With several stages, every left operand of the scan's products must be in shared memory, where
    the loads put it. Triton's warpgroup products of registers may continue into the next iteration
    of the loop, and read registers that it has overwritten. There are three stages, because Triton
    loads after an iteration's last product. With two, the next iteration would wait for all of its
    chunk.

    Programs are small, so that the programs of one prompt fill a GPU. Chunks of 64 tokens with a
    decay for each channel do not fit into the registers that Blackwell's results pass through.

    Args:
        machine: GPU, or interpreter, that runs the kernels.
        head_k_dim: Elements of a key.
        head_v_dim: Elements of a value.
        element_bytes: Bytes of an element of keys and values.
        is_per_channel: Whether every key channel has its own decay.
    """
    whole_value = max(LEAST_PRODUCT, power_of_two(head_v_dim))
    block_tokens, block_values, chunk_warps, scan_warps, scan_stages = 64, 32, 4, 4, 3
    if machine.is_interpreter:
        block_values, chunk_warps, scan_warps, scan_stages = whole_value, 1, 1, 1
    elif element_bytes > 2:  # noqa: PLR2004 - wider than 16 bits: no tensor cores
        block_tokens, block_values, chunk_warps, scan_warps, scan_stages = 16, 16, 4, 8, 1
    elif not machine.has_large_tiles or (is_per_channel and machine.capability >= BLACKWELL):
        block_tokens, scan_stages = 32, 2
    block_keys = max(LEAST_PRODUCT, power_of_two(head_k_dim))
    if is_per_channel and not machine.is_interpreter:
        if block_tokens > 32:  # noqa: PLR2004 - more tokens take too many registers of a thread
            chunk_warps = 8
        # If a thread had one channel of a run, threads would sum products in different orders.
        runs = block_tokens // RUN_TOKENS
        chunk_warps = max(1, min(chunk_warps, runs * block_keys // 64))
    chunk_registers = None
    if block_tokens == CHUNK_TOKENS and not (is_per_channel or machine.is_interpreter):
        chunk_registers = CHUNK_REGISTERS
    return DeltaTiles(
        block_tokens=block_tokens,
        block_keys=block_keys,
        block_values=min(whole_value, block_values),
        chunk_warps=chunk_warps,
        chunk_registers=chunk_registers,
        scan_warps=scan_warps,
        scan_stages=scan_stages,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTiles:
    """Tiles of a fused `delta_scan`.

    Attributes:
        block_tokens: Tokens of a chunk.
        block_values: Values of a program.
        num_warps: Warps of a program.
    """

    block_tokens: int
    block_values: int
    num_warps: int


def delta_fused_tiles(machine: Machine, tiles: DeltaTiles, head_v_dim: int) -> FusedTiles:
    """Choose tiles for a fused `delta_scan`.

    A program has a whole head of 128 values if possible, because each one prepares all chunks for
    itself. Beside such a state, chunks of 64 tokens do not fit into registers.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        tiles: Tiles of the two kernels that it replaces.
        head_v_dim: Elements of a value.
    """
    block_tokens, block_values, num_warps = 32, 128, 8
    if machine.is_interpreter or tiles.block_tokens < block_tokens:
        block_tokens, block_values = tiles.block_tokens, tiles.block_values
        num_warps = tiles.scan_warps
    elif not machine.has_large_tiles:
        block_values = 64
    whole_value = max(LEAST_PRODUCT, power_of_two(head_v_dim))
    return FusedTiles(
        block_tokens=block_tokens,
        block_values=min(whole_value, block_values),
        num_warps=num_warps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTiles:
    """Tiles of the kernel of `delta_scan` that computes the initial states of segments.

    Attributes:
        block_values: Values of a program, rows of the state.
        num_warps: Warps of a program.
    """

    block_values: int
    num_warps: int


def delta_pass_tiles(machine: Machine, head_k_dim: int, head_v_dim: int) -> PassTiles:
    """Choose tiles for the kernel of `delta_scan` that computes the initial states of segments.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        head_k_dim: Elements of a key.
        head_v_dim: Elements of a value.
    """
    if machine.is_interpreter:
        return PassTiles(block_values=max(LEAST_PRODUCT, power_of_two(head_v_dim)), num_warps=1)
    # A warp has 16 columns of a state, so that the rows that it reads fit into registers.
    whole_key = max(LEAST_PRODUCT, power_of_two(head_k_dim))
    return PassTiles(block_values=LEAST_PRODUCT, num_warps=whole_key // LEAST_PRODUCT)


HOPPER_KEYS = (64, 128)
"""Numbers of elements of a key that the scan for Hopper takes."""


def has_hopper_delta_scan(
    machine: Machine, head_k_dim: int, v: torch.Tensor, block_tokens: int
) -> bool:
    """Whether the second kernel of `delta_scan` is the one for Hopper, which loads ahead.

    Args:
        machine: GPU, or interpreter, that would run the kernel.
        head_k_dim: Elements of a key.
        v: Values, [num_tokens, num_v_heads, head_v_dim].
        block_tokens: Tokens of a chunk.
    """
    return (
        HOPPER <= machine.capability < BLACKWELL
        and v.element_size() == 2  # noqa: PLR2004 - bytes of bfloat16 and float16
        and v.shape[0] > 0
        and v.shape[2] % CHUNK_CHANNELS == 0
        and head_k_dim in HOPPER_KEYS
        and block_tokens == CHUNK_TOKENS
        and is_copied_ahead(v)
    )


def hopper_programs(v: torch.Tensor) -> int:
    """Number of programs of the scan for Hopper for one request.

    Args:
        v: Values, [num_tokens, num_v_heads, head_v_dim].
    """
    return v.shape[1] * (v.shape[2] // CHUNK_CHANNELS)


STATE_ELEMENTS_PER_WARP = 2048
"""State elements that a warp of `delta_update` reads at once: 64 registers of a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTiles:
    """Tiles of `delta_update`. Its programs have one warp, so that sums of a row need no barrier.

    Attributes:
        block_values: Values of a program, rows of the state.
        block_line: Keys of a line of a row. A thread holds some of each line, and sums over these
            by itself.
    """

    block_values: int
    block_line: int


def delta_update_tiles(
    machine: Machine, head_k_dim: int, head_v_dim: int, state_element_bytes: int
) -> UpdateTiles:
    """Choose tiles for `delta_update`."""
    whole_key, whole_value = power_of_two(head_k_dim), power_of_two(head_v_dim)
    if machine.is_interpreter:
        block_values = whole_value
    else:
        block_values = min(whole_value, max(1, STATE_ELEMENTS_PER_WARP // whole_key))
    return UpdateTiles(
        block_values=block_values,
        block_line=line_elements(machine, head_k_dim, state_element_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaReplayTiles:
    """Tiles of `delta_replay`.

    Attributes:
        block_values: Values of a program, rows of the state.
        block_line: Keys of a line of a row, as in `UpdateTiles`.
        num_warps: Warps of a program.
        is_at_once: Whether matrix products serve all tokens of a call at once.
    """

    block_values: int
    block_line: int
    num_warps: int
    is_at_once: bool


def delta_replay_tiles(
    machine: Machine,
    head_k_dim: int,
    head_v_dim: int,
    *,
    state_element_bytes: int,
    key_element_bytes: int,
    history_tokens: int,
    is_per_channel: bool,
    has_one_token: bool,
) -> DeltaReplayTiles:
    """Choose tiles for `delta_replay`.

    Products with a float32 state split each of its elements into parts. For one token, sums take
    fewer instructions. On GPUs with operands in registers, the parts do not fit there.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        head_k_dim: Elements of a key.
        head_v_dim: Elements of a value.
        state_element_bytes: Bytes of an element of the state.
        key_element_bytes: Bytes of an element of keys and values.
        history_tokens: Rows of a history.
        is_per_channel: Whether every key channel has its own decay.
        has_one_token: Whether every request has one token.
    """
    has_room = machine.is_interpreter or machine.has_large_tiles
    is_usual = history_tokens <= USUAL_HISTORY
    if is_per_channel:
        is_at_once = False
    elif state_element_bytes > 2:  # noqa: PLR2004 - bytes of bfloat16 and float16
        is_at_once = not has_one_token and has_room and is_usual
    else:
        is_at_once = is_usual or (has_room and history_tokens <= 2 * USUAL_HISTORY)
    whole_value = max(LEAST_PRODUCT, power_of_two(head_v_dim))
    whole_key = max(2 * LEAST_PRODUCT, power_of_two(head_k_dim))
    block_line = max(LEAST_PRODUCT, line_elements(machine, head_k_dim, state_element_bytes))
    if machine.is_interpreter:
        block_values, num_warps = whole_value, 1
    else:
        elements = replay_elements(
            machine, state_element_bytes, key_element_bytes, history_tokens, is_at_once=is_at_once
        )
        num_warps, warp_elements = 4, 1024
        if not is_at_once and history_tokens > 2 * USUAL_HISTORY and key_element_bytes <= 2:  # noqa: PLR2004
            elements, num_warps, warp_elements = REPLAY_ELEMENTS // 2, 8, 512
        block_values = min(whole_value, max(LEAST_PRODUCT, elements // whole_key))
        # Threads with copies of the same elements would sum them in different orders.
        num_warps = min(num_warps, max(1, block_values * whole_key // warp_elements))
    return DeltaReplayTiles(
        block_values=block_values,
        block_line=block_line,
        num_warps=num_warps,
        is_at_once=is_at_once,
    )
