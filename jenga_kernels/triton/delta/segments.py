"""Kernels of `jenga_kernels.delta_scan` in segments: what segments do to states, and these states.

A segment turns a state H [head_v_dim, head_k_dim] into H M + S. S [head_v_dim, head_k_dim] is the
state that it leaves if it begins with zero. M [head_k_dim, head_k_dim] has a row for each row of
the identity, which it treats as a row of a state whose value is zero at every token. A first kernel
computes both from prepared chunks, a second one the initial states of segments. The scan then has a
program for each segment.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta.groups import Chunks
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import ceil_div, device_function, rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import matmul, matmul_add
from jenga_kernels.triton.recurrent.groups import Requests
from jenga_kernels.triton.recurrent.recurrence import checkpoint_range, mask_if
from jenga_kernels.triton.recurrent.segments import (
    checkpoints_through,
    segment_at,
    segment_range,
    segments_of,
)


@device_function
def first_chunk_from(token, num_tokens, first, end, checkpoint_after_ptr, BLOCK_T: tl.constexpr):
    """Find a request's first chunk that begins at a token or later.

    Checkpoints [first, end) are those of the request. Stretches end at them, and each stretch has
    chunks of its own.

    Returns:
        The chunk's first token, or `num_tokens` if no chunk is left; the index of its stretch, and
        the first token of that stretch.
    """
    if checkpoint_after_ptr is None:
        return token, first, token * 0
    else:
        stretch = checkpoints_through(checkpoint_after_ptr, first, end, token)
        begin = tl.load(checkpoint_after_ptr + stretch - 1, mask=stretch > first, other=0)
        stop = tl.load(checkpoint_after_ptr + stretch, mask=stretch < end, other=num_tokens)
        token = tl.minimum(begin + ceil_div(token - begin, BLOCK_T) * BLOCK_T, stop)
        is_next = (token == stop) & (stretch < end)
        return token, stretch + is_next.to(tl.int32), tl.where(is_next, stop, begin)


@device_function
def chunks_of_segment(
    number, of_request, num_tokens, first, end, checkpoint_after_ptr, BLOCK_T: tl.constexpr
):
    """Find the whole chunks of a segment: those that begin in its tokens.

    Returns:
        For the first chunk and for the first one after the segment: its first token, and the index
        of its stretch. Last, the first token of the first chunk's stretch.
    """
    start, stop = segment_range(number, of_request, num_tokens)
    start, stretch, begin = first_chunk_from(
        start, num_tokens, first, end, checkpoint_after_ptr, BLOCK_T
    )
    stop, last_stretch, _ = first_chunk_from(
        stop, num_tokens, first, end, checkpoint_after_ptr, BLOCK_T
    )
    return start, stretch, stop, last_stretch, begin


class SegmentTiles(NamedTuple):
    """Tiles and flags for which `delta_segment_states_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    HEAD_V_DIM: int
    IS_PER_CHANNEL: bool
    BLOCK_T: int
    BLOCK_K: int
    BLOCK_V: int
    NUM_V_HEADS: int
    BLOCK_R: int


# Counts differ from step to step and must not cause another compilation.
@with_groups(chunks=Chunks, requests=Requests, tiles=SegmentTiles)
@triton.jit(do_not_specialize=["num_requests", "segment_tokens", "num_tokens_of_all", "num_chunks"])
def delta_segment_states_kernel(
    # Outputs
    segment_states_ptr,  # f32[num_segments, num_v_heads, head_v_dim + head_k_dim, head_k_dim]
    # Inputs
    v_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    chunks,
    requests,
    checkpoint_starts_ptr,  # i32[num_requests + 1] or None
    checkpoint_after_ptr,  # i32[num_checkpoints] or None
    # Sizes
    num_requests,
    segment_tokens,
    num_tokens_of_all,
    num_chunks,
    # Strides, in elements
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Scan segment i for BLOCK_V rows of S or M of one head, in program (b, i), without outputs.

    A request's last segment is left out, because no other begins with its final state.
    """
    V_BLOCKS: tl.constexpr = (tiles.HEAD_V_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    K_BLOCKS: tl.constexpr = (tiles.HEAD_K_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    BLOCKS: tl.constexpr = V_BLOCKS + K_BLOCKS
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(1)
    request, number, of_request = segment_at(
        segment, requests.query_starts_ptr, num_requests, segment_tokens, tiles.BLOCK_R
    )
    if number + 1 >= of_request:
        return
    if tl.load(requests.state_slots_ptr + request * stride_slots) <= 0:
        return
    ks = tl.arange(0, tiles.BLOCK_K)
    tile = tl.arange(0, tiles.BLOCK_T)
    # Rows of M follow those of S. Their values are zero.
    vs = block * tiles.BLOCK_V + tl.arange(0, tiles.BLOCK_V)
    of_identity = vs - V_BLOCKS * tiles.BLOCK_V
    is_v = (vs < tiles.HEAD_V_DIM)[None, :]
    dtype = v_ptr.dtype.element_ty
    query_start = tl.load(requests.query_starts_ptr + request).to(tl.int64)
    num_tokens = tl.load(requests.query_starts_ptr + request + 1) - query_start.to(tl.int32)
    first_checkpoint, end_checkpoint = checkpoint_range(checkpoint_starts_ptr, request)
    start, stretch, stop_after_all, last_stretch, begin = chunks_of_segment(
        number,
        of_request,
        num_tokens,
        first_checkpoint,
        end_checkpoint,
        checkpoint_after_ptr,
        tiles.BLOCK_T,
    )
    v_ptr += query_start * stride_v_token + head * stride_v_head + vs[None, :]
    in_head = head * num_tokens_of_all + query_start
    since_start_ptr = chunks.since_start_ptr
    until_end_ptr = chunks.until_end_ptr
    kept_keys_ptr = chunks.kept_keys_ptr
    decays_ptr = chunks.decays_ptr
    if tiles.IS_PER_CHANNEL:
        in_keys = in_head * tiles.BLOCK_K + ks[None, :]
        kept_keys_ptr += in_keys
        decays_ptr += head * num_chunks * tiles.BLOCK_K + ks
    else:
        group = head // tiles.HEADS_PER_GROUP
        in_keys = (group * num_tokens_of_all + query_start) * tiles.BLOCK_K + ks[None, :]
        since_start_ptr += in_head
        until_end_ptr += in_head
        decays_ptr += head * num_chunks
    keys_ptr = chunks.keys_ptr + in_keys
    solution_ptr = chunks.solution_ptr + (in_head * tiles.BLOCK_T + tile[None, :])

    h = (ks[:, None] == of_identity[None, :]).to(tl.float32)  # [K, V]
    for s in range(stretch, last_stretch + 1):
        stop = stop_after_all
        if checkpoint_after_ptr is not None and s < last_stretch:
            stop = tl.load(checkpoint_after_ptr + s)
        # Chunks are numbered as in `find_chunk`.
        chunk = (query_start + begin) // tiles.BLOCK_T + request + s
        chunk += (start - begin) // tiles.BLOCK_T
        for first in range(start, stop, tiles.BLOCK_T):
            tokens = (first + tile).to(tl.int64)
            live = tokens < stop
            row = tokens[:, None]
            rows = live[:, None]
            k = tl.load(keys_ptr + row * tiles.BLOCK_K, mask=rows, other=0.0)  # [T, K]
            v = tl.load(v_ptr + row * stride_v_token, mask=rows & is_v, other=0.0)  # [T, V]
            solution = tl.load(solution_ptr + row * tiles.BLOCK_T, mask=rows, other=0.0)  # [T, T]
            held = matmul(k, rounded(h, dtype))  # [T, V]
            if tiles.IS_PER_CHANNEL:
                decay = tl.load(decays_ptr + chunk * tiles.BLOCK_K)[:, None]  # [K, 1]
                kept_k = tl.load(
                    kept_keys_ptr + row * tiles.BLOCK_K, mask=rows, other=0.0
                )  # [T, K]
                kept = matmul(solution, rounded(v.to(tl.float32) - held, dtype))
            else:
                decay = tl.load(decays_ptr + chunk)
                since_start = tl.load(since_start_ptr + tokens, mask=live, other=0.0)[:, None]
                until_end = tl.load(until_end_ptr + tokens, mask=live, other=0.0)[:, None]
                kept_k = k
                missing = rounded(v.to(tl.float32) - held * since_start, dtype)
                kept = matmul(solution, missing) * until_end
            h = matmul_add(tl.trans(kept_k), rounded(kept, dtype), h * decay)
            chunk += 1
        start = stop
        begin = stop

    is_carried = block >= V_BLOCKS
    in_rows = tl.where(is_carried, of_identity + tiles.HEAD_V_DIM, vs)
    is_row = tl.where(is_carried, of_identity < tiles.HEAD_K_DIM, vs < tiles.HEAD_V_DIM)
    HEAD_ROWS: tl.constexpr = tiles.HEAD_V_DIM + tiles.HEAD_K_DIM
    STRIDE: tl.constexpr = tiles.NUM_V_HEADS * HEAD_ROWS * tiles.HEAD_K_DIM
    segment_states_ptr += page_offsets(segment, STRIDE)
    segment_states_ptr += (head * HEAD_ROWS + in_rows[None, :]) * tiles.HEAD_K_DIM
    in_state = (ks < tiles.HEAD_K_DIM)[:, None] & is_row[None, :]
    tl.store(segment_states_ptr + ks[:, None], h, mask=in_state)


class PassTiles(NamedTuple):
    """Tiles and flags for which `delta_pass_states_kernel` is compiled."""

    HEAD_K_DIM: int
    HEAD_V_DIM: int
    BLOCK_K: int
    BLOCK_V: int
    NUM_V_HEADS: int
    BLOCK_R: int


@with_groups(requests=Requests, tiles=PassTiles)
@triton.jit(do_not_specialize=["num_requests", "segment_tokens"])
def delta_pass_states_kernel(
    # Outputs, read too
    segment_states_ptr,  # f32[num_segments, num_v_heads, head_v_dim + head_k_dim, head_k_dim]
    # Inputs
    states_ptr,  # [num_slots, num_v_heads, head_v_dim, head_k_dim]
    requests,
    # Sizes
    num_requests,
    segment_tokens,
    # Strides, in elements
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_states_dim: tl.int64,
    stride_initial: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Replace S of request r's segments by their initial states, in program (b, r).

    A program has BLOCK_V rows of one head's state.
    """
    BLOCKS: tl.constexpr = (tiles.HEAD_V_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    state_slot = tl.load(requests.state_slots_ptr + request * stride_slots)
    if state_slot <= 0:
        return
    vs = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_V + tl.arange(0, tiles.BLOCK_V)[:, None]
    ks = tl.arange(0, tiles.BLOCK_K)
    is_k = (ks < tiles.HEAD_K_DIM)[None, :]
    in_state = (vs < tiles.HEAD_V_DIM) & is_k
    in_matrix = (ks < tiles.HEAD_K_DIM)[:, None] & is_k
    counts = segments_of(requests.query_starts_ptr, num_requests, segment_tokens, tiles.BLOCK_R)
    of_all = tl.arange(0, tiles.BLOCK_R)
    first = tl.sum(tl.where(of_all < request, counts, 0), 0)
    last = first + tl.sum(tl.where(of_all == request, counts, 0), 0) - 1
    initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    states_ptr += page_offsets(initial_slot, stride_states_slot) + head * stride_states_head
    states_ptr += vs * stride_states_dim + ks[None, :]
    h = tl.load(states_ptr, mask=mask_if(initial_slot > 0, in_state), other=0.0)
    h = h.to(tl.float32)  # [V, K]

    HEAD_ROWS: tl.constexpr = tiles.HEAD_V_DIM + tiles.HEAD_K_DIM
    STRIDE: tl.constexpr = tiles.NUM_V_HEADS * HEAD_ROWS * tiles.HEAD_K_DIM
    segment_states_ptr += page_offsets(first, STRIDE)
    segment_states_ptr += head * HEAD_ROWS * tiles.HEAD_K_DIM
    in_left = vs * tiles.HEAD_K_DIM + ks[None, :]
    in_carried = (tiles.HEAD_V_DIM + ks[:, None]) * tiles.HEAD_K_DIM + ks[None, :]
    for _ in range(first, last):
        left = tl.load(segment_states_ptr + in_left, mask=in_state, other=0.0)  # [V, K]
        carried = tl.load(segment_states_ptr + in_carried, mask=in_matrix, other=0.0)  # [K, K]
        # Other threads may have read what is overwritten here.
        tl.debug_barrier()
        tl.store(segment_states_ptr + in_left, h, mask=in_state)
        # Three products of tensor cores are about as accurate as float32.
        h = tl.dot(h, carried, left, input_precision="tf32x3")
        segment_states_ptr += STRIDE
    tl.store(segment_states_ptr + in_left, h, mask=in_state)
