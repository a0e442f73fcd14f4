"""Kernel of `jenga_kernels.state_scan`: final states of segments, with one decay for each head."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.device import let_next_begin, rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.mamba.groups import StateInputs, StepLimits
from jenga_kernels.triton.mamba.scan_heads import LEAST_LOG2, next_state, store_state
from jenga_kernels.triton.recurrent.recurrence import LOG2E, step_sizes
from jenga_kernels.triton.recurrent.segments import segment_at, segment_range


class SegmentTiles(NamedTuple):
    """Tiles and flags for which `segment_states_kernel` is compiled."""

    HEADS_PER_GROUP: int
    NUM_HEADS: int
    HEAD_DIM: int
    D_STATE: int
    IS_SOFTPLUS: bool
    HAS_LIMITS: bool
    BLOCK_T: int
    BLOCK_P: int
    BLOCK_N: int
    PARTS: int
    BLOCK_R: int | None
    IS_TF32: bool
    IS_OVERLAPPED: bool


@with_groups(inputs=StateInputs, limits=StepLimits, tiles=SegmentTiles)
@triton.jit(do_not_specialize=["num_requests", "segment_tokens"])
def segment_states_kernel(
    # Outputs
    segment_states_ptr,  # f32[num_segments, num_heads, head_dim, d_state]
    decays_ptr,  # f32[num_segments, num_heads]
    # Inputs
    inputs,
    query_starts_ptr,  # i32[num_requests + 1]
    state_slots_ptr,  # i32[num_requests]
    # Scalars
    limits,
    # Sizes
    num_requests,
    segment_tokens,
    # Strides, in elements
    stride_segment_states: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Scan segment i in BLOCK_P channels of one head, from zero, in program (b, i).

    There are no outputs. A request's last segment is left out, because no other begins with its
    final state.
    """
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    BLOCK_P: tl.constexpr = tiles.BLOCK_P
    PARTS: tl.constexpr = tiles.PARTS
    x_ptr = inputs.x_ptr
    dt_ptr = inputs.dt_ptr
    B_ptr = inputs.B_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    let_next_begin(tiles.IS_OVERLAPPED)
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    segment = tl.program_id(1)
    dims = (tl.program_id(0) % BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
    ns = tl.arange(0, BLOCK_N)
    tile = tl.arange(0, tiles.BLOCK_T)
    is_dim = (dims < tiles.HEAD_DIM)[None, :]
    dtype = x_ptr.dtype.element_ty
    request, number, of_request = segment_at(
        segment, query_starts_ptr, num_requests, segment_tokens, tiles.BLOCK_R
    )
    if number + 1 >= of_request:
        return
    if tl.load(state_slots_ptr + request * stride_slots) <= 0:
        return
    query_start = tl.load(query_starts_ptr + request)
    num_tokens = tl.load(query_starts_ptr + request + 1) - query_start
    start, stop = segment_range(number, of_request, num_tokens)
    x_ptr += query_start * stride_x_token + head * stride_x_head + dims[None, :]
    dt_ptr += query_start * stride_dt_token + head * stride_dt_head
    B_ptr += query_start * stride_B_token + (head // tiles.HEADS_PER_GROUP) * stride_B_group
    B_ptr += ns[None, :]
    rate = tl.load(inputs.A_ptr + head) * LOG2E
    dt_bias = None
    if inputs.dt_bias_ptr is not None:
        dt_bias = tl.load(inputs.dt_bias_ptr + head * stride_dt_bias_head).to(tl.float32)

    h = ()
    for _ in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        h += (tl.zeros([BLOCK_N, BLOCK_P], tl.float32),)
    left = 1.0
    # All chunks are whole, because the length of a segment before the last is a multiple of any.
    for first in range(start, stop, tiles.BLOCK_T):
        tokens = (first + tile).to(tl.int64)
        row = tokens[:, None]
        dt = tl.load(dt_ptr + tokens * stride_dt_token).to(tl.float32)
        dt = step_sizes(
            dt, dt_bias, limits.dt_min, limits.dt_max, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS
        )
        # The decay after each token is a sum over the next tokens, not a difference of sums.
        is_behind = tile < tiles.BLOCK_T - 1
        behind = tl.load(dt_ptr + (tokens + 1) * stride_dt_token, mask=is_behind, other=0.0)
        behind = step_sizes(
            behind.to(tl.float32),
            dt_bias,
            limits.dt_min,
            limits.dt_max,
            tiles.IS_SOFTPLUS,
            tiles.HAS_LIMITS,
        )
        behind = tl.where(is_behind, tl.maximum(behind * rate, LEAST_LOG2), 0.0)
        until_end = tl.cumsum(behind, 0, reverse=True)
        decay = tl.exp2(tl.sum(tl.maximum(dt * rate, LEAST_LOG2), 0))
        x = tl.load(x_ptr + row * stride_x_token, mask=is_dim, other=0.0)  # [T, P]
        kept = rounded(x.to(tl.float32) * (tl.exp2(until_end) * dt)[:, None], dtype)
        b = ()
        for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            is_n = (part * BLOCK_N + ns < tiles.D_STATE)[None, :]
            place = row * stride_B_token + part * BLOCK_N
            b += (tl.load(B_ptr + place, mask=is_n, other=0.0),)  # [T, N]
        h = next_state(h, b, kept, decay, PARTS, tiles.IS_TF32)
        left *= decay

    HEAD_ELEMENTS: tl.constexpr = tiles.HEAD_DIM * tiles.D_STATE
    segment_states_ptr += segment.to(tl.int64) * stride_segment_states + head * HEAD_ELEMENTS
    store_state(
        segment_states_ptr + dims[None, :] * tiles.D_STATE,
        h,
        is_dim,
        tiles.D_STATE,
        BLOCK_N,
        PARTS,
    )
    # All programs of a head have the same decay.
    tl.store(
        decays_ptr + segment * tiles.NUM_HEADS + head, left, mask=tl.program_id(0) % BLOCKS == 0
    )
