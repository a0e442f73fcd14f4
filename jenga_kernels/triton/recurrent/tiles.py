"""Tile sizes of the kernels of recurrent layers.

Those for GPUs compile without spills (tests/kernels/test_state_*.py); those for the interpreter are
large, because it pays per operation and hardly per element.
"""

from dataclasses import dataclass

import torch

from jenga_kernels.triton.lib.tiles import BLACKWELL, HOPPER, Machine, power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTiles:
    """Tiles of a scan over a prompt.

    Attributes:
        block_tokens: Tokens loaded at a time.
        block_dims: Channels of a program.
        num_warps: Warps a program.
        num_stages: Loads in flight ahead of the arithmetic.
        least_state: Least width of a tile of the state; matrix products have one.
        state_parts: Parts of a state's elements, each a tile of its own.
        run_tokens: Tokens next to each other that a thread takes one after another.
    """

    block_tokens: int
    block_dims: int
    num_warps: int
    num_stages: int = 1
    least_state: int = 1
    state_parts: int = 1
    run_tokens: int = 1


def channel_scan_tiles(machine: Machine, head_dim: int, d_state: int) -> ScanTiles:
    """Tiles of `state_scan` where every channel and state element decays on its own."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=4, block_dims=power_of_two(head_dim), num_warps=1)
    # One warp with 8 state elements a thread: many small programs, since one prompt has few.
    block_dims = max(1, 256 // power_of_two(d_state))
    return ScanTiles(block_tokens=4, block_dims=block_dims, num_warps=1)


LEAST_PRODUCT = 16
"""Least size of each dimension of a matrix product."""


WIDE_STATE = 128
"""Greatest d_state whose tiles fit in registers with chunks of 64 tokens."""


def head_scan_tiles(
    machine: Machine,
    head_dim: int,
    d_state: int,
    element_bytes: int,
    *,
    num_scans: int,
    allow_tf32: bool = False,
) -> ScanTiles:
    """Tiles of `state_scan` where a head decays as one.

    Chunks of 64 tokens have one stage: with more, Triton's warpgroup products whose left operand is
    in registers may run on into the next turn of the loop and read what that one has overwritten.
    Those operands have a row for each token, and no warpgroup takes 32 rows. Programs are small, so
    that those of one prompt fill a GPU; of wide states they are larger: each reads all of B and C.
    Where twice as many would still have a processor each, they are half as large, unless a state
    needs masks, whose registers would spill: Falcon-H1's layers take four fifths of the time so for
    one prompt of 2048 tokens on an H200.

    Args:
        machine: Where it runs.
        head_dim: Channels of a head.
        d_state: State elements of a channel.
        element_bytes: Bytes of an element of x.
        num_scans: Heads of all requests.
        allow_tf32: Whether products of float32 may run on tensor cores.
    """
    whole_head = max(LEAST_PRODUCT, power_of_two(head_dim))
    is_wide = d_state > WIDE_STATE
    num_stages = 1
    # Parts of 64 elements, so that of B and C as much is in registers at a time. With parts of 128
    # the assembler of Triton 3.6 and 3.7 (ptxas 12.8) has products read shared memory anywhere:
    # `MachineCode.num_lost_descriptors`.
    state_parts = max(1, power_of_two(d_state) // 64)
    if machine.is_interpreter:
        block_tokens, block_dims, num_warps = 64, whole_head, 1
    elif element_bytes > 2:  # noqa: PLR2004 - bytes of bfloat16 and float16
        # Operands of tensor cores are in shared memory on Hopper, and in registers before.
        has_room = allow_tf32 and machine.has_large_tiles and not is_wide
        block_tokens, block_dims, num_warps = (64, 32, 8) if has_room else (16, 16, 8)
        state_parts = 1
    elif not machine.has_large_tiles:
        block_tokens, block_dims, num_warps = (16, 16, 4) if is_wide else (32, 32, 4)
        state_parts = 1
    elif is_wide:
        block_tokens, block_dims, num_warps, num_stages = 32, 64, 8, 3
        num_programs = num_scans * -(-whole_head // block_dims)
        if 2 * num_programs <= machine.num_processors and d_state == power_of_two(d_state):
            block_dims, num_warps = 32, 4
    elif d_state <= WIDE_STATE // 2:
        # With 32 channels the assembler of Triton 3.6 and 3.7 loses a descriptor here, too.
        block_tokens, block_dims, num_warps = 64, 64, 4
        whole_head = max(whole_head, block_dims)
    else:
        block_tokens, block_dims, num_warps = 64, 32, 4
    return ScanTiles(
        block_tokens=block_tokens,
        block_dims=min(whole_head, block_dims),
        num_warps=num_warps,
        num_stages=num_stages,
        least_state=LEAST_PRODUCT,
        state_parts=state_parts,
    )


CHUNK_TOKENS = 64
"""Tokens of a chunk of the scan for Hopper."""

CHUNK_CHANNELS = 64
"""Channels of one of its programs, the rows of a warpgroup matrix instruction."""

CHUNK_STATE = 128
"""Most state elements of one of its products."""

CHUNK_ALIGNMENT = 16
"""Bytes that addresses and strides of what the copy engine brings are multiples of."""


def is_copied_ahead(rows: torch.Tensor) -> bool:
    """Whether the copy engine finds rows of 16 bits an element, [num_tokens, num_heads, width]."""
    return rows.data_ptr() % CHUNK_ALIGNMENT == 0 and all(
        size == 1 or (stride > 0 and stride * 2 % CHUNK_ALIGNMENT == 0)
        for size, stride in zip(rows.shape[:2], rows.stride()[:2], strict=True)
    )


def hopper_scan_tiles(
    machine: Machine, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None
) -> ScanTiles | None:
    """Tiles of `state_scan` by the kernel whose loads run ahead; None where it cannot run.

    Four warps have a state; eight, with half of it each, took a quarter more time for one prompt
    and twice as much for several on an H100.

    Args:
        machine: Where it would run.
        x: Inputs, [num_tokens, num_heads, head_dim].
        B: Input projections, [num_tokens, num_groups, d_state].
        C: Output projections, shape and dtype of B.
        z: Gates, which it does not take.
    """
    d_state = B.shape[2]
    can_run = (
        HOPPER <= machine.capability < BLACKWELL
        and x.element_size() == 2  # noqa: PLR2004 - bytes of bfloat16 and float16
        and x.shape[0] > 0
        and x.shape[2] % CHUNK_CHANNELS == 0
        and d_state in (CHUNK_STATE // 2, CHUNK_STATE, 2 * CHUNK_STATE)
        and z is None
        and all(map(is_copied_ahead, (x, B, C)))
    )
    if not can_run:
        return None
    return ScanTiles(
        block_tokens=CHUNK_TOKENS,
        block_dims=CHUNK_CHANNELS,
        num_warps=4,
        state_parts=max(1, d_state // CHUNK_STATE),
    )


def are_lone(machine: Machine, num_programs: int) -> bool:
    """Whether each program of a scan has a processor for itself, and can have all its registers."""
    return num_programs <= machine.num_processors


SEGMENT_SHARE = 0.5
"""Instructions of what a segment leaves, over those of its scan."""

SEGMENT_COST_TOKENS, WIDE_SEGMENT_COST_TOKENS = 490, 170
"""Tokens of a scan that take as long as two more launches, and as passing on states.

For states of 128 elements a channel and of 256. On an H100 that is 10 us for prompts of 512 to 8192
tokens through 16 or 32 heads of Nemotron-H and Granite, in segments that fill it, 6 us in those of
half as many programs, and 6 us through Falcon-H1 (`perf/results/h100-80gb-hbm3/variants.jsonl`).
"""

LEAST_SAVED = 0.1
"""Share of a scan's time that segments have to save."""

LEAST_SEGMENTS = 2
"""Segments that it takes to save so much."""


def scan_segment_tokens(
    machine: Machine,
    *,
    d_state: int,
    num_programs: int,
    num_requests: int,
    num_tokens: int,
    longest_tokens: int | None,
) -> int | None:
    """Tokens of the segments that requests are cut into, so that a GPU is full; None: they are not.

    A program needs a whole processor for its speed: two on one take half as long again each.

    Args:
        machine: Where it runs.
        d_state: State elements of a channel.
        num_programs: Of a request that is not cut.
        num_requests: Requests.
        num_tokens: Of all requests.
        longest_tokens: Of the longest request, or more; None: they are taken for equally long.
    """
    if machine.is_interpreter:
        return None
    longest = -(-num_tokens // num_requests) if longest_tokens is None else longest_tokens
    num_cuts = machine.num_processors // num_programs - num_requests
    if num_cuts < 1:
        return None
    segment_tokens = -(-num_tokens // (num_cuts + 1))
    segment_tokens = -(-segment_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
    cost_tokens = WIDE_SEGMENT_COST_TOKENS if d_state > WIDE_STATE else SEGMENT_COST_TOKENS
    cut_tokens = (1 + SEGMENT_SHARE) * segment_tokens + cost_tokens
    if cut_tokens > (1 - LEAST_SAVED) * longest:
        return None
    return segment_tokens


def conv_tiles(machine: Machine, dim: int) -> ScanTiles:
    """Tiles of `causal_conv`."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=64, block_dims=min(4096, power_of_two(dim)), num_warps=1)
    # 8 tokens of 8 channels a thread, which loads 11 for their taps where it would load 32.
    return ScanTiles(block_tokens=32, block_dims=128, num_warps=2, run_tokens=8)


def conv_update_tiles(machine: Machine, dim: int) -> ScanTiles:
    """Tiles of `conv_update`; it walks tokens one by one."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=1, block_dims=min(4096, power_of_two(dim)), num_warps=1)
    return ScanTiles(block_tokens=1, block_dims=256, num_warps=2)


STATE_BYTES_PER_WARP = 2048
"""State in float32 that one warp of `state_update` reads at once; of narrower states twice as much.

An H200 was fastest so (`perf/results/h200`): 4096 bytes of float32 take up to a tenth more time
where few requests leave many processors idle, and as much elsewhere; of 16 bits 2048 take more.
"""


FEWER_STATE_ELEMENTS = 4
"""Part of that for a warp where programs would leave processors idle.

An H200 took 5.9 us for one token of Jamba 1.5 mini with states in float32, in 256 programs, and
6.6 in bfloat16, whose half as many bytes were in 64.
"""


def state_update_tiles(
    machine: Machine, head_dim: int, d_state: int, state_element_bytes: int, *, num_states: int
) -> ScanTiles:
    """Tiles of `state_update`.

    Args:
        machine: Where it runs.
        head_dim: Channels of a head.
        d_state: State elements of a channel.
        state_element_bytes: Bytes of one.
        num_states: Heads of all requests.
    """
    if machine.is_interpreter:
        return ScanTiles(block_tokens=1, block_dims=power_of_two(head_dim), num_warps=1)
    # One warp, so that the sum over a row of the state needs no barrier.
    row_bytes = power_of_two(d_state) * state_element_bytes
    warp_bytes = STATE_BYTES_PER_WARP * (1 if state_element_bytes > 2 else 2)  # noqa: PLR2004
    block_dims = min(power_of_two(head_dim), max(1, warp_bytes // row_bytes))
    if num_states * -(-head_dim // block_dims) < machine.num_processors:
        block_dims = max(1, block_dims // FEWER_STATE_ELEMENTS)
    return ScanTiles(block_tokens=1, block_dims=block_dims, num_warps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTiles:
    """Tiles of `state_replay`.

    Attributes:
        block_dims: Channels of a head that it reads at once.
        num_warps: Warps a program.
        is_at_once: Whether matrix products serve all tokens of a call at once.
    """

    block_dims: int
    num_warps: int
    is_at_once: bool = False


TOKEN_REPLAY_ELEMENTS = 4096
"""Elements of a state that a program of `state_replay` has which serves one token, for one warp.

An H100 was fastest so, in float32 and bfloat16: two warps, which have to meet for their sums, take
up to a sixth more time, and half as many elements a twentieth more.
"""

FEW_REPLAY_ELEMENTS = 1024
"""And where programs that large are fewer than a GPU runs at a time."""

REPLAY_PROGRAMS_PER_PROCESSOR = 16
"""Warps with so many registers that a processor runs at a time, or nearly."""

TOKEN_REPLAY_HEADS = 16
"""Most heads that one of its programs weighs the tokens of a history for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReplayTiles:
    """Tiles of `state_replay` where every request has one token.

    Attributes:
        block_heads: Heads of a group that a program weighs a history's tokens for.
        weights_warps: Warps of such a program.
        block_dims: Channels of a head that a program reads the state of.
        num_warps: Warps of such a program.
    """

    block_heads: int
    weights_warps: int
    block_dims: int
    num_warps: int


def token_replay_tiles(
    machine: Machine, num_states: int, heads_per_group: int, head_dim: int, d_state: int
) -> TokenReplayTiles:
    """Tiles of `state_replay` where every request has one token.

    Args:
        machine: Where it runs.
        num_states: Heads of all requests.
        heads_per_group: Heads that have the projections of inputs in common.
        head_dim: Channels of a head.
        d_state: State elements of a channel.
    """
    whole_head, whole_group = power_of_two(head_dim), power_of_two(heads_per_group)
    if machine.is_interpreter:
        return TokenReplayTiles(
            block_heads=whole_group, weights_warps=1, block_dims=whole_head, num_warps=1
        )
    num_programs = num_states * whole_head * power_of_two(d_state) // TOKEN_REPLAY_ELEMENTS
    is_few = num_programs < REPLAY_PROGRAMS_PER_PROCESSOR * machine.num_processors
    elements = FEW_REPLAY_ELEMENTS if is_few else TOKEN_REPLAY_ELEMENTS
    return TokenReplayTiles(
        block_heads=min(TOKEN_REPLAY_HEADS, whole_group),
        weights_warps=4,
        block_dims=min(whole_head, max(1, elements // power_of_two(d_state))),
        num_warps=1,
    )


REPLAY_ELEMENTS = 8192
"""Elements of a state that a program of a replay has in registers: 64 a thread.

Half as many where `state_replay` advances the state token by token, with projections beside it.
"""

REPLAY_BYTES = 32768
"""Bytes of a state that a program has which serves all tokens at once; half as many on GPUs whose
products have all operands in registers."""

WIDE_REPLAY_ELEMENTS = 2048
"""Elements of a state that a program has of inputs in float32, which no tensor core takes."""


USUAL_HISTORY = 16
"""Tokens of a history whose rows fit into registers beside so much of a state."""


def replay_elements(
    machine: Machine,
    state_element_bytes: int,
    input_element_bytes: int,
    history_tokens: int,
    *,
    is_at_once: bool,
) -> int:
    """Elements of a state that a program of a replay has on a GPU."""
    if input_element_bytes > 2:  # noqa: PLR2004 - bytes of bfloat16 and float16
        return WIDE_REPLAY_ELEMENTS
    parts = max(1, power_of_two(history_tokens) // USUAL_HISTORY)
    if not is_at_once:
        return REPLAY_ELEMENTS // parts
    parts *= 1 if machine.has_large_tiles else 2
    return REPLAY_BYTES // state_element_bytes // parts


def state_replay_tiles(
    machine: Machine,
    head_dim: int,
    d_state: int,
    *,
    state_element_bytes: int,
    input_element_bytes: int,
    history_tokens: int,
) -> ReplayTiles:
    """Tiles of `state_replay` where requests may have several tokens.

    These are served by products; but of a state in float32 only where parts of its elements fit
    into registers beside these.

    Args:
        machine: Where it runs.
        head_dim: Channels of a head.
        d_state: State elements of a channel.
        state_element_bytes: Bytes of an element of the state.
        input_element_bytes: Bytes of an element of x.
        history_tokens: Rows of a history.
    """
    whole_head = max(LEAST_PRODUCT, power_of_two(head_dim))
    has_room = machine.is_interpreter or machine.has_large_tiles
    fits = history_tokens <= USUAL_HISTORY
    if state_element_bytes > 2:  # noqa: PLR2004 - bytes of bfloat16 and float16
        is_at_once = has_room and fits and d_state <= WIDE_STATE
    else:
        is_at_once = has_room or fits
    if machine.is_interpreter:
        return ReplayTiles(block_dims=whole_head, num_warps=1, is_at_once=is_at_once)
    elements = replay_elements(
        machine, state_element_bytes, input_element_bytes, history_tokens, is_at_once=is_at_once
    )
    if not is_at_once:
        elements //= 2
    whole_state = max(2 * LEAST_PRODUCT, power_of_two(d_state))
    block_dims = min(whole_head, max(LEAST_PRODUCT, elements // whole_state))
    num_warps = min(4, max(1, block_dims * whole_state // 1024))
    if not is_at_once:
        num_warps = 4
    return ReplayTiles(block_dims=block_dims, num_warps=num_warps, is_at_once=is_at_once)
