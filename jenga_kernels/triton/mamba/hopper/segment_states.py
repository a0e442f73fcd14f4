# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Kernel of `jenga_kernels.state_scan` for Hopper: final states of segments, one decay per head.

It is `hopper.scan` without outputs and their inputs. `mamba.segment_states` does the same in
Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jenga_kernels.triton.lib.gluon_device import let_next_begin
from jenga_kernels.triton.recurrent.hopper.chunks import (
    CHANNELS,
    LEFT_LAYOUT,
    LOG2_E,
    NUMBERS_LAYOUT,
    TILE_LAYOUT,
    TOKENS,
    decays,
    exp2,
    load_steps,
    load_tile,
    store_state,
)
from jenga_kernels.triton.recurrent.hopper.segments import segment_at, segment_range

STAGES = gl.constexpr(3)
"""Chunks in shared memory: the current one, and those that are being loaded."""


@gluon.jit(do_not_specialize=["dt_min", "dt_max", "num_requests", "segment_tokens"])
def segment_states_hopper_kernel(
    # Outputs
    segment_states_ptr,  # f32[num_segments, num_heads, head_dim, d_state]
    decays_ptr,  # f32[num_segments, num_heads]
    # Inputs
    x_descriptor,  # [num_tokens, num_heads, head_dim]
    dt_ptr,  # [num_tokens, num_heads]
    A_ptr,  # f32[num_heads]
    B_descriptor,  # [num_tokens, num_groups, d_state]
    dt_bias_ptr,  # [num_heads] or None
    query_starts_ptr,  # i32[num_requests + 1]
    state_slots_ptr,  # i32[num_requests]
    # Scalars
    dt_min,
    dt_max,
    # Sizes
    num_requests,
    segment_tokens,
    # Strides, in elements
    stride_segment_states: gl.int64,
    stride_dt_token: gl.int64,
    stride_dt_head: gl.int64,
    stride_dt_bias_head: gl.int64,
    stride_slots: gl.int64,
    # Tiles and flags
    HEADS_PER_GROUP: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    IS_SOFTPLUS: gl.constexpr,
    HAS_LIMITS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_R: gl.constexpr,
    IS_OVERLAPPED: gl.constexpr,
):
    """Scan segment i in CHANNELS channels of one head, from zero, in program (b, i).

    There are no outputs. A request's last segment is left out, because no other begins with its
    final state.
    """
    BLOCKS: gl.constexpr = HEAD_DIM // CHANNELS
    D_STATE: gl.constexpr = PARTS * BLOCK_N
    dtype: gl.constexpr = x_descriptor.dtype
    let_next_begin(IS_OVERLAPPED)
    head = (gl.program_id(0) // BLOCKS).to(gl.int64)
    first_dim = (gl.program_id(0) % BLOCKS) * CHANNELS
    segment = gl.program_id(1)
    request, number, of_request = segment_at(
        segment, query_starts_ptr, num_requests, segment_tokens, BLOCK_R
    )
    if number + 1 >= of_request:
        return
    if gl.load(state_slots_ptr + request * stride_slots) <= 0:
        return
    query_start = gl.load(query_starts_ptr + request)
    num_tokens = gl.load(query_starts_ptr + request + 1) - query_start
    start, stop = segment_range(number, of_request, num_tokens)
    dt_ptr += query_start * stride_dt_token + head * stride_dt_head
    inputs = (x_descriptor, B_descriptor)
    place = (query_start, head.to(gl.int32), first_dim, (head // HEADS_PER_GROUP).to(gl.int32))
    rate = gl.load(A_ptr + head) * LOG2_E
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = gl.load(dt_bias_ptr + head * stride_dt_bias_head).to(gl.float32)
    step_size = (dt_bias, dt_min, dt_max)

    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, CHANNELS], TILE_LAYOUT)
    B_tiles = gl.allocate_shared_memory(dtype, [STAGES * PARTS, TOKENS, BLOCK_N], TILE_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    tiles = (x_tiles, B_tiles, ready)
    shared_ahead = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)

    for i in gl.static_range(STAGES - 1):
        if start + i * TOKENS < stop:
            _load_chunk(inputs, place, tiles, i, start + i * TOKENS, BLOCK_N, PARTS)
    steps = load_steps(dt_ptr, stride_dt_token, start, stop)
    next_steps = load_steps(dt_ptr, stride_dt_token, start + TOKENS, stop)
    _logs, ahead, last_log = decays(steps, start, stop, step_size, rate, IS_SOFTPLUS, HAS_LIMITS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    h = ()
    for _ in gl.static_range(PARTS):
        h += (gl.full([CHANNELS, BLOCK_N], 0.0, gl.float32, layout),)
    left = 1.0
    mbarrier.wait(ready.index(0), 0)
    # All chunks are whole, because the length of a segment before the last is a multiple of TOKENS.
    for first in range(start, stop, TOKENS):
        chunk = (first - start) // TOKENS
        stage = chunk % STAGES
        shared_ahead.store(ahead)
        # After this store, which all warps pass together, none uses the previous chunk any more.
        last_stage, last_first = (chunk + STAGES - 1) % STAGES, first + (STAGES - 1) * TOKENS
        if last_first < stop:
            _load_chunk(inputs, place, tiles, last_stage, last_first, BLOCK_N, PARTS)
        steps_after = load_steps(dt_ptr, stride_dt_token, first + 2 * TOKENS, stop)
        x = x_tiles.index(stage).permute((1, 0)).load(LEFT_LAYOUT)
        shares = exp2(last_log - shared_ahead.load(gl.SliceLayout(0, LEFT_LAYOUT)))
        kept = (x.to(gl.float32) * shares[None, :]).to(dtype)
        decay = exp2(last_log)
        state = ()
        for part in gl.static_range(PARTS):
            b = B_tiles.index(stage * PARTS + part)
            state += (warpgroup_mma(kept, b, h[part] * decay, is_async=True),)
        left *= decay
        _logs, ahead, last_log = decays(
            next_steps, first + TOKENS, stop, step_size, rate, IS_SOFTPLUS, HAS_LIMITS
        )
        next_steps = steps_after
        # The assembler moves nothing across this wait, so step sizes overlap with the products.
        next_stage, phase = (chunk + 1) % STAGES, ((chunk + 1) // STAGES) & 1
        mbarrier.wait(ready.index(next_stage), phase, pred=first + TOKENS < stop)
        h = ()
        for part in gl.static_range(PARTS):
            h += (warpgroup_mma_wait(PARTS - 1 - part, deps=[state[part]]),)

    segment_states_ptr += segment.to(gl.int64) * stride_segment_states
    segment_states_ptr += (head * HEAD_DIM + first_dim) * D_STATE
    store_state(segment_states_ptr, h, True, D_STATE, BLOCK_N, PARTS)
    # All programs of a head have the same decay.
    gl.store(decays_ptr + segment * NUM_HEADS + head, left, mask=first_dim == 0)


@gluon.jit
def _load_chunk(inputs, place, tiles, stage, first, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Start loads of x and B of tokens [first, first + TOKENS)."""
    x_descriptor, B_descriptor = inputs
    query_start, head, first_dim, group = place
    x_tiles, B_tiles, ready = tiles
    barrier = ready.index(stage)
    token = query_start + first
    mbarrier.expect(barrier, TOKENS * (CHANNELS + PARTS * BLOCK_N) * 2)
    load_tile(x_descriptor, token, head, first_dim, x_tiles, stage, barrier, STAGES, CHANNELS)
    load_tile(B_descriptor, token, group, 0, B_tiles, stage, barrier, STAGES, BLOCK_N, PARTS)
