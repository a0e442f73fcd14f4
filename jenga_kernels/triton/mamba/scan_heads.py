"""Kernel of `jenga_kernels.state_scan` with one decay per head: matrix products over chunks."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import await_kernel_before, device_function, rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import matmul_add
from jenga_kernels.triton.mamba.groups import Inputs, StepLimits
from jenga_kernels.triton.recurrent.groups import Checkpoints, Requests
from jenga_kernels.triton.recurrent.recurrence import (
    LOG2E,
    checkpoint_range,
    mask_if,
    silu,
    step_sizes,
    stretch_end,
)
from jenga_kernels.triton.recurrent.segments import checkpoints_through, segment_at, segment_range

LEAST_LOG2 = tl.constexpr(-126.0)
"""Least decay of a token, in powers of two. With less, the state before it would not matter."""

LEAST_DT = tl.constexpr(1e-37)
"""Step size that adds nothing and, unlike zero, has a logarithm."""

GRID = tl.constexpr(1024.0)
"""Divisor for exact sums: multiples of 1 / GRID down to BLOCK_T * LEAST_LOG2 add up exactly in
float32."""


@device_function
def exact_part(logarithms):
    """Round down to multiples of 1 / GRID, whose sums and differences are exact."""
    return tl.floor(logarithms * GRID) * (1 / GRID)


@device_function
def mixing_weights(scores, coarse, fine, dt, BLOCK_T: tl.constexpr):
    """Weight of token j of a chunk in token i: score of C and B times step size times decay."""
    tile = tl.arange(0, BLOCK_T)
    # log2(dt) is added to the decay. A separate vector would be computed again for every column.
    ahead = coarse if fine is not None else coarse - tl.log2(tl.maximum(dt, LEAST_DT))
    exponent = coarse[:, None] - ahead[None, :]
    if fine is not None:
        exponent += fine[:, None] - fine[None, :]
        scores *= dt[None, :]
    exponent = tl.where(tile[:, None] >= tile[None, :], exponent, float("-inf"))
    return scores * tl.exp2(exponent)  # [T, T]


@device_function
def load_state(ptr, is_dim, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Load a state as PARTS tiles f32[BLOCK_N, P], from the starts of its channels, [1, P]."""
    parts = ()
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        ns = part * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        parts += (tl.load(ptr + ns, mask=(ns < D_STATE) & is_dim, other=0.0).to(tl.float32),)
    return parts


@device_function
def next_state(h, b, kept, decay, PARTS: tl.constexpr, IS_TF32: tl.constexpr):
    """Compute the state after a chunk, part by part."""
    parts = ()
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        parts += (matmul_add(tl.trans(b[part]), kept, h[part] * decay, IS_TF32),)
    return parts


@device_function
def store_state(
    ptr, parts, is_dim, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr
):
    """Store a state as `load_state` gives it, rounded to the states' element type."""
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        ns = part * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        tl.store(ptr + ns, parts[part].to(ptr.dtype.element_ty), mask=(ns < D_STATE) & is_dim)


class HeadsTiles(NamedTuple):
    """Tiles and flags for which `state_scan_heads_kernel` is compiled."""

    HEADS_PER_GROUP: int
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


@with_groups(
    inputs=Inputs, requests=Requests, checkpoints=Checkpoints, limits=StepLimits, tiles=HeadsTiles
)
@triton.jit(do_not_specialize=["num_requests", "segment_tokens"])
def state_scan_heads_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_heads, head_dim]
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    # Inputs
    segment_states_ptr,  # f32[num_segments, num_heads, head_dim, d_state], or None without cuts
    inputs,
    requests,
    checkpoints,
    # Scalars
    limits,
    # Sizes
    num_requests,
    segment_tokens,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_states_dim: tl.int64,
    stride_segment_states: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_D_head: tl.int64,
    stride_D_dim: tl.int64,
    stride_z_token: tl.int64,
    stride_z_head: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_initial: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Scan request r in BLOCK_P channels of one head, chunk by chunk, in program (b, r).

    If requests are cut, it is segment r instead, and `segment_states_ptr` has its initial state.
    """
    PARTS: tl.constexpr = tiles.PARTS
    x_ptr = inputs.x_ptr
    D_ptr = inputs.D_ptr
    z_ptr = inputs.z_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_DIM + tiles.BLOCK_P - 1) // tiles.BLOCK_P
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    segment = tl.program_id(1)
    request = segment
    if segment_states_ptr is not None:
        request, number, of_request = segment_at(
            segment, requests.query_starts_ptr, num_requests, segment_tokens, tiles.BLOCK_R
        )
        if of_request == 0:
            await_kernel_before(tiles.IS_OVERLAPPED)
            return
    dims = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_P + tl.arange(0, tiles.BLOCK_P)
    ns = tl.arange(0, tiles.BLOCK_N)
    tile = tl.arange(0, tiles.BLOCK_T)
    is_dim = (dims < tiles.HEAD_DIM)[None, :]
    dtype = x_ptr.dtype.element_ty
    query_start = tl.load(requests.query_starts_ptr + request)
    num_tokens = tl.load(requests.query_starts_ptr + request + 1) - query_start
    start, stop_after_all = 0, num_tokens
    if segment_states_ptr is not None:
        start, stop_after_all = segment_range(number, of_request, num_tokens)
    state_slot = tl.load(requests.state_slots_ptr + request * stride_slots)
    out_ptr += query_start * stride_out_token + head * stride_out_head + dims[None, :]

    if state_slot <= 0:
        await_kernel_before(tiles.IS_OVERLAPPED)
        for first in range(start, stop_after_all, tiles.BLOCK_T):
            tokens = (first + tile).to(tl.int64)[:, None]
            is_live = is_dim & (tokens < stop_after_all)
            zero = tl.full([tiles.BLOCK_T, tiles.BLOCK_P], 0.0, out_ptr.dtype.element_ty)
            tl.store(out_ptr + tokens * stride_out_token, zero, mask=is_live)
        return

    group = head // tiles.HEADS_PER_GROUP
    x_ptr += query_start * stride_x_token + head * stride_x_head + dims[None, :]
    dt_ptr = inputs.dt_ptr + (query_start * stride_dt_token + head * stride_dt_head)
    B_ptr = inputs.B_ptr + (query_start * stride_B_token + group * stride_B_group + ns[None, :])
    C_ptr = inputs.C_ptr + (query_start * stride_C_token + group * stride_C_group + ns[None, :])
    # Offsets of rows only. Those of all elements would stay in registers until the store.
    in_page = head * stride_states_head + dims[None, :] * stride_states_dim  # [1, P]
    rate = tl.load(inputs.A_ptr + head) * LOG2E
    dt_bias = None
    if inputs.dt_bias_ptr is not None:
        dt_bias = tl.load(inputs.dt_bias_ptr + head * stride_dt_bias_head).to(tl.float32)
    if D_ptr is not None:
        D_ptr += head * stride_D_head + dims * stride_D_dim
        D = tl.load(D_ptr, mask=dims < tiles.HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    if z_ptr is not None:
        z_ptr += query_start * stride_z_token + head * stride_z_head + dims[None, :]
    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    if segment_states_ptr is None:
        initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
        initial = states_ptr + (page_offsets(initial_slot, stride_states_slot) + in_page)
        has_initial = mask_if(initial_slot > 0, is_dim)
        h = load_state(initial, has_initial, tiles.D_STATE, tiles.BLOCK_N, PARTS)
    else:
        if number + 1 < of_request:
            state_slot = 0  # its final state is the next segment's initial one
        if checkpoints.checkpoint_after_ptr is not None:
            end = last_stretch
            stretch = checkpoints_through(checkpoints.checkpoint_after_ptr, stretch, end, start)
            last_stretch = checkpoints_through(
                checkpoints.checkpoint_after_ptr, stretch, end, stop_after_all
            )
        HEAD_ELEMENTS: tl.constexpr = tiles.HEAD_DIM * tiles.D_STATE
        initial = segment_states_ptr + page_offsets(segment, stride_segment_states)
        initial += head * HEAD_ELEMENTS + dims[None, :] * tiles.D_STATE
        await_kernel_before(tiles.IS_OVERLAPPED)
        h = load_state(initial, is_dim, tiles.D_STATE, tiles.BLOCK_N, PARTS)

    for s in range(stretch, last_stretch + 1):
        stop, slot = stretch_end(
            s,
            last_stretch,
            checkpoints.checkpoint_after_ptr,
            checkpoints.checkpoint_slots_ptr,
            stop_after_all,
            state_slot,
        )
        for first in range(start, stop, tiles.BLOCK_T):
            tokens = (first + tile).to(tl.int64)
            live = tokens < stop
            rows = live[:, None]
            row = tokens[:, None]
            dt = tl.load(dt_ptr + tokens * stride_dt_token, mask=live, other=0.0).to(tl.float32)
            dt = step_sizes(
                dt, dt_bias, limits.dt_min, limits.dt_max, tiles.IS_SOFTPLUS, tiles.HAS_LIMITS
            )
            # A token past the stretch gets step size zero, which leaves the state as it is.
            dt = tl.where(live, dt, 0.0)
            # Logarithms to base two of the decay from the chunk's start through each token. Their
            # differences must be accurate after any amount of decay. For float32, they are split
            # into a part that adds up exactly and a small one. Narrower inputs need no small part.
            coarse = tl.maximum(dt * rate, LEAST_LOG2)
            fine = None
            if dtype == tl.float32:
                fine = tl.cumsum(coarse - exact_part(coarse), 0)
                coarse = exact_part(coarse)
            coarse = tl.cumsum(coarse, 0)
            x = tl.load(x_ptr + row * stride_x_token, mask=rows & is_dim, other=0.0)  # [T, P]
            y = tl.full([tiles.BLOCK_T, tiles.BLOCK_P], 0.0, tl.float32)
            scores = tl.full([tiles.BLOCK_T, tiles.BLOCK_T], 0.0, tl.float32)
            # For a wide state, one part of a chunk's B and C is in registers at a time.
            b = ()
            for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
                is_n = rows & (part * tiles.BLOCK_N + ns < tiles.D_STATE)[None, :]
                place = row * stride_B_token + part * tiles.BLOCK_N
                b += (tl.load(B_ptr + place, mask=is_n, other=0.0),)  # [T, N]
                place = row * stride_C_token + part * tiles.BLOCK_N
                c = tl.load(C_ptr + place, mask=is_n, other=0.0)  # [T, N]
                y = matmul_add(c, h[part].to(dtype), y, tiles.IS_TF32)
                scores = matmul_add(c, tl.trans(b[part]), scores, tiles.IS_TF32)

            # Contribution of the state before the chunk, then of the chunk's own tokens.
            since_start = coarse if fine is None else coarse + fine
            y *= tl.exp2(since_start)[:, None]
            weights = mixing_weights(scores, coarse, fine, dt, tiles.BLOCK_T)
            y = matmul_add(weights.to(dtype), x, y, tiles.IS_TF32)

            last = tile == tiles.BLOCK_T - 1
            until_end = tl.sum(tl.where(last, coarse, 0.0), 0) - coarse
            if fine is not None:
                until_end += tl.sum(tl.where(last, fine, 0.0), 0) - fine
            x32 = x.to(tl.float32)
            kept = rounded(x32 * (tl.exp2(until_end) * dt)[:, None], dtype)
            decay = tl.exp2(tl.sum(tl.where(last, since_start, 0.0), 0))
            h = next_state(h, b, kept, decay, PARTS, tiles.IS_TF32)
            if D_ptr is not None:
                y += D * x32
            if z_ptr is not None:
                z = tl.load(z_ptr + row * stride_z_token, mask=rows & is_dim, other=0.0)
                y *= silu(z.to(tl.float32))
            y = y.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * stride_out_token, y, mask=rows & is_dim)
        start = stop
        state_ptr = states_ptr + (page_offsets(slot, stride_states_slot) + in_page)
        store_state(state_ptr, h, mask_if(slot > 0, is_dim), tiles.D_STATE, tiles.BLOCK_N, PARTS)
