# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Warp-specialised kernel of `jenga_kernels.state_scan` for Hopper: two groups of warps.

One group computes the weights between a chunk's tokens, which needs no state, and starts the loads
of later chunks. The other group holds the state and computes outputs. So the first group is a chunk
ahead, and a chunk takes as long as the longer half of its work. In `hopper.scan`, one group does
both. A program has all registers of a multiprocessor. The kernel is written in Gluon, which has no
interpreter. It computes what `hopper.scan` and `mamba.scan_heads` do.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jenga_kernels.triton.lib.gluon_device import await_kernel_before
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.recurrent.groups import Checkpoints, Requests
from jenga_kernels.triton.recurrent.hopper.chunks import (
    CHANNELS,
    LEFT_LAYOUT,
    LOG2_E,
    NUMBERS_LAYOUT,
    SQUARE_LAYOUT,
    TILE_LAYOUT,
    TOKENS,
    checkpoint_range,
    decays,
    exp2,
    load_state,
    load_steps,
    load_tile,
    mixing_weights,
    store_rows,
    store_state,
    store_zeros,
    stretch_stop,
    zero_rows,
)
from jenga_kernels.triton.recurrent.hopper.segments import (
    checkpoints_through,
    segment_at,
    segment_range,
)

MIXING_REGISTERS = gl.constexpr(232)
"""Registers of a thread of the group without the state. The other group has as many as possible."""

ONE_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of a single number."""


class SpecializedTiles(NamedTuple):
    """Tiles and flags for which `state_scan_specialized_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_DIM: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    BLOCK_N: int
    PARTS: int
    STAGES: int
    BLOCK_R: int | None
    IS_OVERLAPPED: bool


@with_groups(requests=Requests, checkpoints=Checkpoints, tiles=SpecializedTiles)
@gluon.jit(do_not_specialize=["dt_min", "dt_max", "num_requests", "segment_tokens"])
def state_scan_specialized_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    # Inputs
    segment_states_ptr,  # f32[num_segments, num_heads, head_dim, d_state], or None without cuts
    x_descriptor,  # [num_tokens, num_heads, head_dim]
    dt_ptr,  # [num_tokens, num_heads]
    A_ptr,  # f32[num_heads]
    B_descriptor,  # [num_tokens, num_groups, d_state]
    C_descriptor,  # [num_tokens, num_groups, d_state]
    D_ptr,  # [num_heads, head_dim] or None
    dt_bias_ptr,  # [num_heads] or None
    requests,
    checkpoints,
    # Scalars
    dt_min,
    dt_max,
    # Sizes
    num_requests,
    segment_tokens,
    # Strides, in elements
    stride_out_token: gl.int64,
    stride_out_head: gl.int64,
    stride_states_slot: gl.int64,
    stride_states_head: gl.int64,
    stride_states_dim: gl.int64,
    stride_segment_states: gl.int64,
    stride_dt_token: gl.int64,
    stride_dt_head: gl.int64,
    stride_D_head: gl.int64,
    stride_D_dim: gl.int64,
    stride_dt_bias_head: gl.int64,
    stride_initial: gl.int64,
    stride_slots: gl.int64,
    # Tiles and flags
    tiles: gl.constexpr,
):
    """Scan request r in CHANNELS channels of one head, chunk by chunk, in program (b, r).

    If requests are cut, it is segment r instead, and `segment_states_ptr` has its initial state.
    """
    PARTS: gl.constexpr = tiles.PARTS
    STAGES: gl.constexpr = tiles.STAGES
    BLOCKS: gl.constexpr = tiles.HEAD_DIM // CHANNELS
    dtype: gl.constexpr = x_descriptor.dtype
    head = (gl.program_id(0) // BLOCKS).to(gl.int64)
    first_dim = (gl.program_id(0) % BLOCKS) * CHANNELS
    segment = gl.program_id(1)
    request = segment
    if segment_states_ptr is not None:
        request, number, of_request = segment_at(
            segment, requests.query_starts_ptr, num_requests, segment_tokens, tiles.BLOCK_R
        )
        if of_request == 0:
            await_kernel_before(tiles.IS_OVERLAPPED)
            return
    query_start = gl.load(requests.query_starts_ptr + request)
    stop_after_all = gl.load(requests.query_starts_ptr + request + 1) - query_start
    start = 0
    if segment_states_ptr is not None:
        start, stop_after_all = segment_range(number, of_request, stop_after_all)
    state_slot = gl.load(requests.state_slots_ptr + request * stride_slots)
    out_ptr += query_start * stride_out_token + head * stride_out_head + first_dim
    if state_slot <= 0:
        await_kernel_before(tiles.IS_OVERLAPPED)
        store_zeros(out_ptr, start, stop_after_all, stride_out_token)
        return

    dt_ptr += query_start * stride_dt_token + head * stride_dt_head
    states_ptr += head * stride_states_head + first_dim * stride_states_dim
    rate = gl.load(A_ptr + head) * LOG2_E
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = gl.load(dt_bias_ptr + head * stride_dt_bias_head).to(gl.float32)
    if D_ptr is not None:
        D_ptr += head * stride_D_head + first_dim * stride_D_dim
    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    if segment_states_ptr is not None and checkpoints.checkpoint_after_ptr is not None:
        end = last_stretch
        stretch = checkpoints_through(checkpoints.checkpoint_after_ptr, stretch, end, start)
        last_stretch = checkpoints_through(
            checkpoints.checkpoint_after_ptr, stretch, end, stop_after_all
        )
    if segment_states_ptr is None:
        initial_slot = gl.load(requests.initial_slots_ptr + request * stride_initial)
        initial_ptr = states_ptr + initial_slot.to(gl.int64) * stride_states_slot
        is_begun = initial_slot > 0
        stride_initial_dim = stride_states_dim
    else:
        if number + 1 < of_request:
            state_slot = 0  # its final state is the next segment's initial one
        D_STATE: gl.constexpr = PARTS * tiles.BLOCK_N
        initial_ptr = segment_states_ptr + segment.to(gl.int64) * stride_segment_states
        initial_ptr += (head * tiles.HEAD_DIM + first_dim) * D_STATE
        is_begun = segment >= 0
        stride_initial_dim = gl.to_tensor(D_STATE).to(gl.int64)

    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, CHANNELS], TILE_LAYOUT)
    B_tiles = gl.allocate_shared_memory(dtype, [STAGES * PARTS, TOKENS, tiles.BLOCK_N], TILE_LAYOUT)
    C_tiles = gl.allocate_shared_memory(dtype, [STAGES * PARTS, TOKENS, tiles.BLOCK_N], TILE_LAYOUT)
    mixing = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, TOKENS], TILE_LAYOUT)
    results = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [TOKENS, CHANNELS], TILE_LAYOUT)
    since = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], NUMBERS_LAYOUT)
    shares = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], NUMBERS_LAYOUT)
    shared_logs = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)
    shared_ahead = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mixed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(mixed.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    ring = (x_tiles, B_tiles, C_tiles, mixing, since, shares)
    barriers = (ready, mixed, free)
    tokens = (start, stop_after_all, stretch, last_stretch)
    place = (
        query_start,
        head.to(gl.int32),
        first_dim,
        (head // tiles.HEADS_PER_GROUP).to(gl.int32),
    )
    gl.warp_specialize(
        [
            (
                _carry_state,
                (
                    out_ptr,
                    states_ptr,
                    D_ptr,
                    checkpoints.checkpoint_after_ptr,
                    checkpoints.checkpoint_slots_ptr,
                    (initial_ptr, is_begun, stride_initial_dim, state_slot),
                    tokens,
                    stride_out_token,
                    stride_states_slot,
                    stride_states_dim,
                    stride_D_dim,
                    ring,
                    results,
                    barriers,
                    tiles,
                ),
            ),
            (
                _mix_tokens,
                (
                    x_descriptor,
                    B_descriptor,
                    C_descriptor,
                    dt_ptr,
                    checkpoints.checkpoint_after_ptr,
                    place,
                    (rate, dt_bias, dt_min, dt_max),
                    tokens,
                    stride_dt_token,
                    ring,
                    (shared_logs, shared_ahead),
                    barriers,
                    tiles,
                ),
            ),
        ],
        [4],
        [MIXING_REGISTERS],
    )


@gluon.jit
def _carry_state(
    out_ptr,
    states_ptr,
    D_ptr,
    checkpoint_after_ptr,
    checkpoint_slots_ptr,
    ends,
    tokens,
    stride_out_token,
    stride_states_slot,
    stride_states_dim,
    stride_D_dim,
    ring,
    results,
    barriers,
    tiles: gl.constexpr,
):
    """Carry the state from chunk to chunk, and compute outputs."""
    PARTS: gl.constexpr = tiles.PARTS
    STAGES: gl.constexpr = tiles.STAGES
    x_tiles, B_tiles, C_tiles, mixing, since, shares = ring
    ready, mixed, free = barriers
    initial_ptr, is_begun, stride_initial_dim, state_slot = ends
    start, stop_after_all, stretch, last_stretch = tokens
    dtype: gl.constexpr = x_tiles.dtype
    if D_ptr is not None:
        dims = gl.arange(0, CHANNELS, gl.SliceLayout(1, SQUARE_LAYOUT))
        D = gl.load(D_ptr + dims * stride_D_dim).to(gl.float32)[:, None]
    await_kernel_before(tiles.IS_OVERLAPPED)
    h = load_state(initial_ptr, is_begun, stride_initial_dim, tiles.BLOCK_N, PARTS)
    chunk = 0
    for s in range(stretch, last_stretch + 1):
        slot = state_slot
        if checkpoint_after_ptr is not None and s < last_stretch:
            slot = gl.load(checkpoint_slots_ptr + s)
        stop = stretch_stop(s, last_stretch, checkpoint_after_ptr, stop_after_all)
        for first in range(start, stop, TOKENS):
            stage, phase = chunk % STAGES, (chunk // STAGES) & 1
            mbarrier.wait(ready.index(stage), phase)
            y = gl.full([CHANNELS, TOKENS], 0.0, gl.float32, SQUARE_LAYOUT)
            for part in gl.static_range(PARTS):
                c = C_tiles.index(stage * PARTS + part).permute((1, 0))
                left = gl.convert_layout(h[part].to(dtype), LEFT_LAYOUT)
                y = warpgroup_mma(left, c, y, use_acc=part > 0, is_async=True)
            mbarrier.wait(mixed.index(stage), phase)
            x = x_tiles.index(stage).permute((1, 0)).load(LEFT_LAYOUT)
            kept = shares.index(stage).load(gl.SliceLayout(0, LEFT_LAYOUT))[None, :]
            kept = (x.to(gl.float32) * kept).to(dtype)
            # The decay of a state through the last token is that of the chunk.
            decay = gl.sum(since.index(stage).slice(TOKENS - 1, 1).load(ONE_LAYOUT), 0)
            decayed = ()
            for part in gl.static_range(PARTS):
                decayed += (h[part] * decay,)
            y = warpgroup_mma_wait(0, deps=[y])
            y = y * since.index(stage).load(gl.SliceLayout(0, SQUARE_LAYOUT))[None, :]
            y = warpgroup_mma(x, mixing.index(stage), y, is_async=True)
            state = ()
            for part in gl.static_range(PARTS):
                b = B_tiles.index(stage * PARTS + part)
                state += (warpgroup_mma(kept, b, decayed[part], is_async=True),)
            y = warpgroup_mma_wait(PARTS, deps=[y])
            if D_ptr is not None:
                y += D * gl.convert_layout(x, SQUARE_LAYOUT).to(gl.float32)
            results.permute((1, 0)).store(y.to(results.dtype))
            store_rows(results, out_ptr + first * stride_out_token, stride_out_token, stop - first)
            h = ()
            for part in gl.static_range(PARTS):
                h += (warpgroup_mma_wait(PARTS - 1 - part, deps=[state[part]]),)
            mbarrier.arrive(free.index(stage), count=1)
            chunk += 1
        start = stop
        last_ptr = states_ptr + slot.to(gl.int64) * stride_states_slot
        store_state(last_ptr, h, slot > 0, stride_states_dim, tiles.BLOCK_N, PARTS)


@gluon.jit
def _mix_tokens(
    x_descriptor,
    B_descriptor,
    C_descriptor,
    dt_ptr,
    checkpoint_after_ptr,
    place,
    step_size,
    tokens,
    stride_dt_token,
    ring,
    numbers,
    barriers,
    tiles: gl.constexpr,
):
    """Compute the weights between a chunk's tokens, chunk by chunk, and start later loads."""
    PARTS: gl.constexpr = tiles.PARTS
    STAGES: gl.constexpr = tiles.STAGES
    x_tiles, B_tiles, C_tiles, mixing, since, shares = ring
    shared_logs, shared_ahead = numbers
    ready, mixed, free = barriers
    start, stop_after_all, stretch, last_stretch = tokens
    rate, dt_bias, dt_min, dt_max = step_size
    inputs = (x_descriptor, B_descriptor, C_descriptor)
    dtype: gl.constexpr = x_tiles.dtype
    stop = stretch_stop(stretch, last_stretch, checkpoint_after_ptr, stop_after_all)
    # Next chunk to load: its first token, its stretch, and the end of that.
    asked, asked_stretch, asked_stop = start, stretch, stop
    for i in gl.static_range(STAGES - 1):
        if asked < stop_after_all:
            _load_chunk(inputs, place, ring, ready, i, asked, tiles.BLOCK_N, PARTS, STAGES)
        asked, asked_stretch, asked_stop = _next_chunk(
            asked, asked_stretch, asked_stop, last_stretch, checkpoint_after_ptr, stop_after_all
        )
    steps = load_steps(dt_ptr, stride_dt_token, start, stop)
    first = start
    chunk = 0
    while first < stop_after_all:
        stage, phase = chunk % STAGES, (chunk // STAGES) & 1
        next_first, next_stretch, next_stop = _next_chunk(
            first, stretch, stop, last_stretch, checkpoint_after_ptr, stop_after_all
        )
        next_steps = load_steps(dt_ptr, stride_dt_token, next_first, next_stop)
        mbarrier.wait(ready.index(stage), phase)
        if stop - first < TOKENS:
            zero_rows(x_tiles, stage, stop - first, CHANNELS, 1, STAGES)
            zero_rows(B_tiles, stage, stop - first, tiles.BLOCK_N, PARTS, STAGES)
            fence_async_shared()
        # Scores between the chunk's tokens, with a row for each token that adds to others.
        scores = gl.full([TOKENS, TOKENS], 0.0, gl.float32, SQUARE_LAYOUT)
        for part in gl.static_range(PARTS):
            b = B_tiles.index(stage * PARTS + part)
            c = C_tiles.index(stage * PARTS + part).permute((1, 0))
            scores = warpgroup_mma(b, c, scores, use_acc=part > 0, is_async=True)
        logs, ahead, last_log = decays(
            steps, first, stop, (dt_bias, dt_min, dt_max), rate, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS
        )
        shared_logs.store(logs)
        shared_ahead.store(ahead)
        since.index(stage).store(exp2(logs))
        shares.index(stage).store(exp2(last_log - ahead))
        scores = warpgroup_mma_wait(0, deps=[scores])
        weights = mixing_weights(scores, shared_logs, shared_ahead)
        mixing.index(stage).store(weights.to(dtype))
        fence_async_shared()
        mbarrier.arrive(mixed.index(stage), count=1)
        if asked < stop_after_all:
            ahead_chunk = chunk + STAGES - 1
            was_used = ahead_chunk >= STAGES
            last_phase = (ahead_chunk // STAGES - 1) & 1
            next_stage = ahead_chunk % STAGES
            mbarrier.wait(free.index(next_stage), last_phase, pred=was_used)
            _load_chunk(inputs, place, ring, ready, next_stage, asked, tiles.BLOCK_N, PARTS, STAGES)
        asked, asked_stretch, asked_stop = _next_chunk(
            asked, asked_stretch, asked_stop, last_stretch, checkpoint_after_ptr, stop_after_all
        )
        steps = next_steps
        first, stretch, stop = next_first, next_stretch, next_stop
        chunk += 1


@gluon.jit
def _next_chunk(first, stretch, stop, last_stretch, checkpoint_after_ptr, stop_after_all):
    """First token of the next chunk, its stretch, and the end of that stretch."""
    next_first = first + TOKENS
    if next_first >= stop:
        next_first = stop
        stretch += 1
        stop = stretch_stop(stretch, last_stretch, checkpoint_after_ptr, stop_after_all)
    return next_first, stretch, stop


@gluon.jit
def _load_chunk(
    inputs,
    place,
    ring,
    ready,
    stage,
    first,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Start loads of x, B and C of tokens [first, first + TOKENS)."""
    x_descriptor, B_descriptor, C_descriptor = inputs
    query_start, head, first_dim, group = place
    x_tiles, B_tiles, C_tiles, _, _, _ = ring
    barrier = ready.index(stage)
    token = query_start + first
    mbarrier.expect(barrier, TOKENS * (CHANNELS + 2 * PARTS * BLOCK_N) * 2)
    load_tile(x_descriptor, token, head, first_dim, x_tiles, stage, barrier, STAGES, CHANNELS)
    load_tile(B_descriptor, token, group, 0, B_tiles, stage, barrier, STAGES, BLOCK_N, PARTS)
    load_tile(C_descriptor, token, group, 0, C_tiles, stage, barrier, STAGES, BLOCK_N, PARTS)
