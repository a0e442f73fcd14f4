"""Tile sizes of the kernels of recurrent layers.

Those for GPUs compile without spills (tests/kernels/mamba/test_state_*.py). Those for the
interpreter are large, because its cost is per operation and hardly per element.
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
        num_warps: Warps of a program.
        num_stages: Loads in flight ahead of the arithmetic.
        least_state: Least width of a tile of the state, as matrix products require.
        state_parts: Number of parts of a state's elements, each a tile of its own.
        run_tokens: Consecutive tokens that a thread handles one after another.
    """

    block_tokens: int
    block_dims: int
    num_warps: int
    num_stages: int = 1
    least_state: int = 1
    state_parts: int = 1
    run_tokens: int = 1


def channel_scan_tiles(machine: Machine, head_dim: int, d_state: int) -> ScanTiles:
    """Choose tiles for `state_scan` if every channel and state element has its own decay."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=4, block_dims=power_of_two(head_dim), num_warps=1)
    # One warp with 8 state elements a thread: small programs, because one prompt has few of them.
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
    """Choose tiles for `state_scan` with one decay for each head.

    Chunks of 64 tokens have one stage. With more, Triton's warpgroup products whose left operand is
    in registers may continue into the next iteration of the loop, and read registers that it has
    overwritten. Those operands have a row for each token, and no warpgroup takes 32 rows.

    Programs are small, so that the programs of one prompt fill a GPU. For wide states they are
    larger, because each reads all of B and C. If twice as many would still have a multiprocessor
    each, programs for wide states are half as large. States that need masks are the exception,
    because the masks' registers would spill. On an H200, Falcon-H1's layers then take four fifths
    of the time for one prompt of 2048 tokens.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        head_dim: Channels of a head.
        d_state: State elements of a channel.
        element_bytes: Bytes of an element of x.
        num_scans: Heads of all requests.
        allow_tf32: Whether products of float32 may run on tensor cores.
    """
    whole_head = max(LEAST_PRODUCT, power_of_two(head_dim))
    is_wide = d_state > WIDE_STATE
    num_stages = 1
    # Parts of 64 elements keep 64 columns of B and C in registers at a time. With parts of 128,
    # the assembler of Triton 3.6 and 3.7 (ptxas 12.8) makes products read a wrong place of shared
    # memory: `MachineCode.num_lost_descriptors`.
    state_parts = max(1, power_of_two(d_state) // 64)
    if machine.is_interpreter:
        block_tokens, block_dims, num_warps = 64, whole_head, 1
    elif element_bytes > 2:  # noqa: PLR2004 - bytes of bfloat16 and float16
        # Operands of tensor cores are in shared memory on Hopper, and in registers on older GPUs.
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
        # With 32 channels, the assembler of Triton 3.6 and 3.7 loses a descriptor here too.
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
"""Channels of a program of that scan, the rows of a warpgroup matrix instruction."""

CHUNK_STATE = 128
"""Most state elements of a product of that scan."""

CHUNK_ALIGNMENT = 16
"""Bytes that divide the addresses and strides of tensors that TMA loads."""


def is_copied_ahead(rows: torch.Tensor) -> bool:
    """Whether TMA can load rows of 16 bits an element, [num_tokens, num_heads, width]."""
    return rows.data_ptr() % CHUNK_ALIGNMENT == 0 and all(
        size == 1 or (stride > 0 and stride * 2 % CHUNK_ALIGNMENT == 0)
        for size, stride in zip(rows.shape[:2], rows.stride()[:2], strict=True)
    )


def hopper_scan_tiles(
    machine: Machine, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None
) -> ScanTiles | None:
    """Choose tiles for the `state_scan` kernel that loads ahead, on Hopper; None if it cannot run.

    Four warps share a state. On an H100, eight warps with half of it each took a quarter more time
    for one prompt, and twice as much for several.

    Args:
        machine: GPU, or interpreter, that would run the kernel.
        x: Inputs, [num_tokens, num_heads, head_dim].
        B: Input projections, [num_tokens, num_groups, d_state].
        C: Output projections, shape and dtype of B.
        z: Gates, which the kernel does not take.
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
    """Whether each program of a scan has a multiprocessor, and all its registers, to itself."""
    return num_programs <= machine.num_processors


SEGMENT_SHARE = 0.5
"""Instructions that compute the final states of segments, relative to those of their scan."""

SEGMENT_COST_TOKENS, WIDE_SEGMENT_COST_TOKENS = 490, 170
"""Cost of segments in tokens of a scan: two more launches, and states carried between segments.

The first is for states of up to 128 elements a channel, the second for wider ones.

On an H100 it is 10 us for prompts of 512 to 8192 tokens through 16 or 32 heads of Nemotron-H and
Granite, if segments fill the GPU. It is 6 us in segments of half as many programs, and 6 us through
Falcon-H1 (`perf/results/h100-80gb-hbm3/variants.jsonl`).
"""

LEAST_SAVED = 0.1
"""Least share of a scan's time that segments have to save."""

LEAST_SEGMENTS = 2
"""Fewest segments that can save that share."""


def scan_segment_tokens(
    machine: Machine,
    *,
    d_state: int,
    num_programs: int,
    num_requests: int,
    num_tokens: int,
    longest_tokens: int | None,
) -> int | None:
    """Choose the tokens of segments that requests are cut into to fill a GPU; None for no cuts.

    A program needs a whole multiprocessor for its full speed. Two on one take half as long again
    each.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        d_state: State elements of a channel.
        num_programs: Number of programs for a request that is not cut.
        num_requests: Number of requests.
        num_tokens: Number of tokens of all requests.
        longest_tokens: Number of tokens of the longest request, or an upper bound. None means that
            all are assumed to be equally long.
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
    """Choose tiles for `causal_conv`."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=64, block_dims=min(4096, power_of_two(dim)), num_warps=1)
    # 8 tokens of 8 channels a thread. For their taps it loads 11 tokens, where it would load 32.
    return ScanTiles(block_tokens=32, block_dims=128, num_warps=2, run_tokens=8)


def conv_update_tiles(machine: Machine, dim: int) -> ScanTiles:
    """Choose tiles for `conv_update`, which handles tokens one by one."""
    if machine.is_interpreter:
        return ScanTiles(block_tokens=1, block_dims=min(4096, power_of_two(dim)), num_warps=1)
    return ScanTiles(block_tokens=1, block_dims=256, num_warps=2)


STATE_BYTES_PER_WARP = 2048
"""Bytes of a float32 state that one warp of `state_update` reads at once; twice that for narrower
types.

It was the fastest on an H200 (`perf/results/h200`). With 4096 bytes, float32 takes up to a tenth
more time if few requests leave many multiprocessors idle, and as much time otherwise. With 2048
bytes, 16-bit states take more time.
"""


FEWER_STATE_ELEMENTS = 4
"""Divisor of these bytes if programs would leave multiprocessors idle.

An H200 took 5.9 us for one token of Jamba 1.5 mini with states in float32, in 256 programs. It took
6.6 us in bfloat16, with half as many bytes in 64 programs.
"""


def state_update_tiles(
    machine: Machine, head_dim: int, d_state: int, state_element_bytes: int, *, num_states: int
) -> ScanTiles:
    """Choose tiles for `state_update`.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        head_dim: Channels of a head.
        d_state: State elements of a channel.
        state_element_bytes: Bytes of a state element.
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
        block_dims: Channels of a head that a program reads at once.
        num_warps: Warps of a program.
        is_at_once: Whether matrix products serve all tokens of a call at once.
    """

    block_dims: int
    num_warps: int
    is_at_once: bool = False


TOKEN_REPLAY_ELEMENTS = 4096
"""State elements of a program, which is one warp, where `state_replay` serves one token a request.

It was the fastest on an H100, in float32 and bfloat16. Two warps have to synchronise for their sums
and take up to a sixth more time. Half as many elements take a twentieth more.
"""

FEW_REPLAY_ELEMENTS = 1024
"""State elements of such a program if larger ones would be fewer than a GPU runs at a time."""

REPLAY_PROGRAMS_PER_PROCESSOR = 16
"""Approximate number of such warps that a multiprocessor has registers for."""

TOKEN_REPLAY_HEADS = 16
"""Most heads for which one program computes the weights of a history's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReplayTiles:
    """Tiles of `state_replay` if every request has one token.

    Attributes:
        block_heads: Heads of a group for which a program computes the weights of a history.
        weights_warps: Warps of such a program.
        block_dims: Channels of a head whose state a program reads.
        num_warps: Warps of such a program.
    """

    block_heads: int
    weights_warps: int
    block_dims: int
    num_warps: int


def token_replay_tiles(
    machine: Machine, num_states: int, heads_per_group: int, head_dim: int, d_state: int
) -> TokenReplayTiles:
    """Choose tiles for `state_replay` if every request has one token.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        num_states: Heads of all requests.
        heads_per_group: Heads that share input projections.
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


def write_registers(state_elements: int) -> int:
    """Choose the most registers of a thread that adds one token to a state and writes it.

    As many programs as those of an update then share a multiprocessor. Without a limit, the loop
    over the history takes up to 161 registers, and fewer programs fit.

    Args:
        state_elements: State elements of a program, which is one warp.
    """
    return 64 if state_elements <= FEW_WRITE_ELEMENTS else 128


FEW_WRITE_ELEMENTS = 512
"""State elements of a program that fit in 64 registers of a thread beside the token's inputs."""


REPLAY_ELEMENTS = 8192
"""State elements that a program of a replay holds in registers: 64 a thread.

`state_replay` holds half as many if it advances the state token by token, because it holds
projections too.
"""

REPLAY_BYTES = 32768
"""Bytes of a state that a program holds if it serves all tokens at once; half as many on GPUs whose
products have all operands in registers."""

WIDE_REPLAY_ELEMENTS = 2048
"""State elements of a program for inputs in float32, which tensor cores do not take."""


USUAL_HISTORY = 16
"""Most tokens of a history whose rows fit into registers beside a state of that size."""


def replay_elements(
    machine: Machine,
    state_element_bytes: int,
    input_element_bytes: int,
    history_tokens: int,
    *,
    is_at_once: bool,
) -> int:
    """Choose the number of state elements of a program of a replay on a GPU."""
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
    """Choose tiles for `state_replay` if requests may have several tokens.

    Matrix products serve these tokens. For a state in float32 they do so only if parts of its
    elements fit into registers beside the products.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
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
