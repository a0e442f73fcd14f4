# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Kernel of `jenga_kernels.state_scan` for Hopper, with one decay for each head and loads ahead.

While a chunk is computed, the next one's x, B and C are loaded into shared memory. Two products
depend on the previous chunk: the state with C, and the one that adds to the state. The state stays
in registers, transposed so that it is the left operand of both without a copy. The kernel is
written in Gluon, which has no interpreter. `mamba.scan_heads` computes the same in Triton.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jenga_kernels.triton.attention.hopper.load import copy_box
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
    TOKEN_LAYOUT,
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

STEP_BYTES = gl.constexpr(16)
"""Bytes of a token's step sizes in one load, those of some heads: the least that TMA loads."""


class AheadTiles(NamedTuple):
    """Tiles and flags for which `state_scan_hopper_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_DIM: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    BLOCK_N: int
    PARTS: int
    BLOCK_R: int | None
    IS_OVERLAPPED: bool


@with_groups(requests=Requests, checkpoints=Checkpoints, tiles=AheadTiles)
@gluon.jit(do_not_specialize=["dt_min", "dt_max", "num_requests", "segment_tokens"])
def state_scan_hopper_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    # Inputs
    segment_states_ptr,  # f32[num_segments, num_heads, head_dim, d_state], or None without cuts
    x_descriptor,  # [num_tokens, num_heads, head_dim]
    dt_ptr,  # [num_tokens, num_heads]
    dt_descriptor,  # the same, or None if TMA cannot load these
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
    num_tokens = gl.load(requests.query_starts_ptr + request + 1) - query_start
    start = 0
    if segment_states_ptr is not None:
        start, num_tokens = segment_range(number, of_request, num_tokens)
    state_slot = gl.load(requests.state_slots_ptr + request * stride_slots)
    out_ptr += query_start * stride_out_token + head * stride_out_head + first_dim
    if state_slot <= 0:
        await_kernel_before(tiles.IS_OVERLAPPED)
        store_zeros(out_ptr, start, num_tokens, stride_out_token)
        return

    dt_ptr += query_start * stride_dt_token + head * stride_dt_head
    states_ptr += head * stride_states_head + first_dim * stride_states_dim
    inputs = (x_descriptor, B_descriptor, C_descriptor, dt_descriptor)
    place = (
        query_start,
        head.to(gl.int32),
        first_dim,
        (head // tiles.HEADS_PER_GROUP).to(gl.int32),
    )
    rate = gl.load(A_ptr + head) * LOG2_E
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = gl.load(dt_bias_ptr + head * stride_dt_bias_head).to(gl.float32)
    step_size = (dt_bias, dt_min, dt_max)
    if D_ptr is not None:
        dims = gl.arange(0, CHANNELS, gl.SliceLayout(1, SQUARE_LAYOUT))
        D_ptr += head * stride_D_head + first_dim * stride_D_dim
        D = gl.load(D_ptr + dims * stride_D_dim).to(gl.float32)[:, None]

    x_tiles = gl.allocate_shared_memory(dtype, [2, TOKENS, CHANNELS], TILE_LAYOUT)
    B_tiles = gl.allocate_shared_memory(dtype, [2 * PARTS, TOKENS, tiles.BLOCK_N], TILE_LAYOUT)
    C_tiles = gl.allocate_shared_memory(dtype, [2 * PARTS, TOKENS, tiles.BLOCK_N], TILE_LAYOUT)
    dt_tiles = x_tiles
    if dt_descriptor is not None:
        dt_shape: gl.constexpr = [2, TOKENS, dt_descriptor.block_shape[1]]
        dt_tiles = gl.allocate_shared_memory(dt_descriptor.dtype, dt_shape, dt_descriptor.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    ring = (x_tiles, B_tiles, C_tiles, dt_tiles, ready)
    mixing = gl.allocate_shared_memory(dtype, [TOKENS, TOKENS], TILE_LAYOUT)
    results = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [TOKENS, CHANNELS], TILE_LAYOUT)
    shared_logs = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)
    shared_ahead = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)

    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    if segment_states_ptr is not None and checkpoints.checkpoint_after_ptr is not None:
        end = last_stretch
        stretch = checkpoints_through(checkpoints.checkpoint_after_ptr, stretch, end, start)
        last_stretch = checkpoints_through(
            checkpoints.checkpoint_after_ptr, stretch, end, num_tokens
        )
    stop = stretch_stop(stretch, last_stretch, checkpoints.checkpoint_after_ptr, num_tokens)
    if num_tokens > start:
        _load_chunk(inputs, place, ring, 0, start, tiles.BLOCK_N, PARTS)
    if dt_descriptor is None:
        steps = load_steps(dt_ptr, stride_dt_token, start, num_tokens)
        # The assembler starts work that depends on a load as soon as it has arrived. So step sizes
        # are loaded two chunks ahead.
        next_first = gl.minimum(start + TOKENS, stop)
        next_steps = load_steps(dt_ptr, stride_dt_token, next_first, num_tokens)
    else:
        mbarrier.wait(ready.index(0), 0, pred=num_tokens > start)
        steps = _steps_of(dt_tiles, 0, head)
    logs, ahead, last_log = decays(
        steps, start, stop, step_size, rate, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS
    )
    if segment_states_ptr is None:
        initial_slot = gl.load(requests.initial_slots_ptr + request * stride_initial)
        initial_ptr = states_ptr + initial_slot.to(gl.int64) * stride_states_slot
        h = load_state(initial_ptr, initial_slot > 0, stride_states_dim, tiles.BLOCK_N, PARTS)
    else:
        if number + 1 < of_request:
            state_slot = 0  # its final state is the next segment's initial one
        D_STATE: gl.constexpr = PARTS * tiles.BLOCK_N
        initial_ptr = segment_states_ptr + segment.to(gl.int64) * stride_segment_states
        initial_ptr += (head * tiles.HEAD_DIM + first_dim) * D_STATE
        await_kernel_before(tiles.IS_OVERLAPPED)
        h = load_state(initial_ptr, True, D_STATE, tiles.BLOCK_N, PARTS)
    chunk = 0
    for s in range(stretch, last_stretch + 1):
        slot = state_slot
        if checkpoints.checkpoint_after_ptr is not None and s < last_stretch:
            slot = gl.load(checkpoints.checkpoint_slots_ptr + s)
        stop_after = stretch_stop(s + 1, last_stretch, checkpoints.checkpoint_after_ptr, num_tokens)
        for first in range(start, stop, TOKENS):
            stage = chunk % 2
            shared_logs.store(logs)
            shared_ahead.store(ahead)
            is_last = first + TOKENS >= stop
            next_first = gl.where(is_last, stop, first + TOKENS)
            next_stop = gl.where(is_last, stop_after, stop)
            if next_first < num_tokens:
                _load_chunk(inputs, place, ring, 1 - stage, next_first, tiles.BLOCK_N, PARTS)
            if dt_descriptor is None:
                mbarrier.wait(ready.index(stage), (chunk // 2) & 1)
                first_after = gl.minimum(next_first + TOKENS, next_stop)
                steps_after = load_steps(dt_ptr, stride_dt_token, first_after, num_tokens)
            if stop - first < TOKENS:
                zero_rows(x_tiles, stage, stop - first, CHANNELS, 1)
                zero_rows(B_tiles, stage, stop - first, tiles.BLOCK_N, PARTS)
                fence_async_shared()

            # Scores between the chunk's tokens, with a row for each token that adds to others.
            scores = gl.full([TOKENS, TOKENS], 0.0, gl.float32, SQUARE_LAYOUT)
            for part in gl.static_range(PARTS):
                b = B_tiles.index(stage * PARTS + part)
                c = C_tiles.index(stage * PARTS + part).permute((1, 0))
                scores = warpgroup_mma(b, c, scores, use_acc=part > 0, is_async=True)
            if PARTS > 1:  # registers have no room for more
                scores = warpgroup_mma_wait(0, deps=[scores])
                mixing.store(mixing_weights(scores, shared_logs, shared_ahead).to(dtype))
            # Contribution of the state before the chunk.
            y = gl.full([CHANNELS, TOKENS], 0.0, gl.float32, SQUARE_LAYOUT)
            for part in gl.static_range(PARTS):
                c = C_tiles.index(stage * PARTS + part).permute((1, 0))
                left = gl.convert_layout(h[part].to(dtype), LEFT_LAYOUT)
                y = warpgroup_mma(left, c, y, use_acc=part > 0, is_async=True)
                if PARTS == 1:
                    scores = warpgroup_mma_wait(1, deps=[scores])
                    mixing.store(mixing_weights(scores, shared_logs, shared_ahead).to(dtype))
                y = warpgroup_mma_wait(0, deps=[y])
            fence_async_shared()
            y = y * exp2(shared_logs.load(gl.SliceLayout(0, SQUARE_LAYOUT)))[None, :]
            x = x_tiles.index(stage).permute((1, 0)).load(LEFT_LAYOUT)
            shares = exp2(last_log - shared_ahead.load(gl.SliceLayout(0, LEFT_LAYOUT)))
            kept = (x.to(gl.float32) * shares[None, :]).to(dtype)
            y = warpgroup_mma(x, mixing, y, is_async=True)
            decay = exp2(last_log)
            state = ()
            for part in gl.static_range(PARTS):
                b = B_tiles.index(stage * PARTS + part)
                state += (warpgroup_mma(kept, b, h[part] * decay, is_async=True),)
            if dt_descriptor is not None:
                has_next = next_first < num_tokens
                mbarrier.wait(ready.index(1 - stage), ((chunk + 1) // 2) & 1, pred=has_next)
                next_steps = _steps_of(dt_tiles, 1 - stage, head)
            logs, ahead, last_log = decays(
                next_steps,
                next_first,
                next_stop,
                step_size,
                rate,
                tiles.IS_SOFTPLUS,
                tiles.HAS_LIMITS,
            )
            if dt_descriptor is None:
                next_steps = steps_after
            y = warpgroup_mma_wait(PARTS, deps=[y])
            if D_ptr is not None:
                y += D * gl.convert_layout(x, SQUARE_LAYOUT).to(gl.float32)
            results.permute((1, 0)).store(y.to(results.dtype))
            store_rows(results, out_ptr + first * stride_out_token, stride_out_token, stop - first)
            h = ()
            for part in gl.static_range(PARTS):
                h += (warpgroup_mma_wait(PARTS - 1 - part, deps=[state[part]]),)
            chunk += 1
        start = stop
        stop = stop_after
        last_ptr = states_ptr + slot.to(gl.int64) * stride_states_slot
        store_state(last_ptr, h, slot > 0, stride_states_dim, tiles.BLOCK_N, PARTS)


@gluon.jit
def _load_chunk(inputs, place, ring, stage, first, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Start loads of x, B and C of tokens [first, first + TOKENS)."""
    x_descriptor, B_descriptor, C_descriptor, dt_descriptor = inputs
    query_start, head, first_dim, group = place
    x_tiles, B_tiles, C_tiles, dt_tiles, ready = ring
    barrier = ready.index(stage)
    token = query_start + first
    DT_BYTES: gl.constexpr = 0 if dt_descriptor is None else TOKENS * STEP_BYTES
    mbarrier.expect(barrier, TOKENS * (CHANNELS + 2 * PARTS * BLOCK_N) * 2 + DT_BYTES)
    if dt_descriptor is not None:
        first_head = head // dt_descriptor.block_shape[1] * dt_descriptor.block_shape[1]
        copy_box(dt_descriptor, [token, first_head], barrier, dt_tiles.index(stage))
    load_tile(x_descriptor, token, head, first_dim, x_tiles, stage, barrier, 2, CHANNELS)
    load_tile(B_descriptor, token, group, 0, B_tiles, stage, barrier, 2, BLOCK_N, PARTS)
    load_tile(C_descriptor, token, group, 0, C_tiles, stage, barrier, 2, BLOCK_N, PARTS)


@gluon.jit
def _steps_of(dt_tiles, stage, head):
    """Get step sizes as `load_steps` does, for one of the heads that were loaded together."""
    HEADS: gl.constexpr = dt_tiles.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([2, HEADS], [32, 1], [1, 4], [1, 0])
    heads = gl.arange(0, HEADS, gl.SliceLayout(0, layout))
    steps = dt_tiles.index(stage).load(layout).to(gl.float32)
    steps = gl.sum(gl.where((heads == head % HEADS)[None, :], steps, 0.0), 1)
    return gl.convert_layout(steps, TOKEN_LAYOUT)


def steps_descriptor(dt: torch.Tensor) -> TensorDescriptor | None:
    """Make the TMA descriptor for step sizes; None if TMA cannot load them.

    Args:
        dt: Projected step sizes, [num_tokens, num_heads].
    """
    stride_token, stride_head = dt.stride()
    element_bytes = dt.element_size()
    is_aligned = dt.data_ptr() % 16 == 0 and stride_token * element_bytes % 16 == 0
    if dt.shape[1] == 1 or stride_head != 1 or stride_token <= 0 or not is_aligned:
        return None
    block = [TOKENS.value, STEP_BYTES.value // element_bytes]
    layout = gl.NVMMASharedLayout(0, 8 * element_bytes, 2)
    return TensorDescriptor(dt, list(dt.shape), [stride_token, 1], block, layout)
