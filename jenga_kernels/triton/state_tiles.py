"""Tile sizes of the kernels of recurrent layers.

Those for GPUs compile without spills (tests/kernels/test_state_*.py); those for the interpreter are
large, because it pays per operation and hardly per element.
"""

from dataclasses import dataclass

import triton

from jenga_kernels.triton.tiles import Machine, power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTiles:
    """Tiles of a scan over a prompt.

    Attributes:
        block_tokens: Tokens loaded at a time.
        block_dims: Channels of a program.
        num_warps: Warps a program.
        num_stages: Loads in flight ahead of the arithmetic.
        least_state: Least width of a tile of the state; matrix products have one.
    """

    block_tokens: int
    block_dims: int
    num_warps: int
    num_stages: int = 1
    least_state: int = 1


def channel_scan_tiles(machine: Machine, head_dim: int, d_state: int) -> ScanTiles:
    """Tiles of `state_scan` where every channel and state element decays on its own."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=16, block_dims=power_of_two(head_dim), num_warps=1)
    # One warp with 8 state elements a thread: many small programs, since one prompt has few.
    block_dims = max(1, 256 // power_of_two(d_state))
    return ScanTiles(block_tokens=4, block_dims=block_dims, num_warps=1)


LEAST_PRODUCT = 16
"""Least size of each dimension of a matrix product."""


MAX_STATE_COLUMNS = 128
"""Greatest d_state at which 64 channels of it fit in the registers of 4 warps."""


def head_scan_tiles(machine: Machine, num_columns: int, head_dim: int, d_state: int) -> ScanTiles:
    """Tiles of `state_scan` where a head decays as one.

    Args:
        machine: Where it runs.
        num_columns: Heads times requests: sequential scans that go on side by side.
        head_dim: Channels of a head.
        d_state: State elements of a channel.
    """
    block_dims = max(LEAST_PRODUCT, power_of_two(head_dim))
    if machine.is_interpreter:
        return ScanTiles(
            block_tokens=64, block_dims=block_dims, num_warps=1, least_state=LEAST_PRODUCT
        )
    # Few scans: cut heads so that two programs share a processor and hide each other's waits.
    is_few = num_columns * triton.cdiv(head_dim, 64) < 2 * machine.num_processors
    block_dims = min(block_dims, 32 if is_few or d_state > MAX_STATE_COLUMNS else 64)
    # One stage: with more, warpgroup products whose left operand is in registers go wrong.
    return ScanTiles(
        block_tokens=64,
        block_dims=block_dims,
        num_warps=4,
        num_stages=1,
        least_state=LEAST_PRODUCT,
    )


def conv_tiles(machine: Machine, dim: int) -> ScanTiles:
    """Tiles of `causal_conv`."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=64, block_dims=min(4096, power_of_two(dim)), num_warps=1)
    # 16 tokens of 8 channels a thread: the taps' other loads of a token come from the first cache.
    return ScanTiles(block_tokens=32, block_dims=64, num_warps=4)


def conv_update_tiles(machine: Machine, dim: int) -> ScanTiles:
    """Tiles of `conv_update`; it walks tokens one by one."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=1, block_dims=min(4096, power_of_two(dim)), num_warps=1)
    return ScanTiles(block_tokens=1, block_dims=256, num_warps=4)


STATE_BYTES_PER_WARP = 4096
"""State that one warp of `state_update` reads at once, 128 bytes a thread: eight 16-byte loads."""


def state_update_tiles(
    machine: Machine, head_dim: int, d_state: int, state_element_bytes: int
) -> ScanTiles:
    """Tiles of `state_update`."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=1, block_dims=power_of_two(head_dim), num_warps=1)
    # One warp, so that the sum over a row of the state needs no barrier.
    row_bytes = power_of_two(d_state) * state_element_bytes
    block_dims = min(power_of_two(head_dim), max(1, STATE_BYTES_PER_WARP // row_bytes))
    return ScanTiles(block_tokens=1, block_dims=block_dims, num_warps=1)
