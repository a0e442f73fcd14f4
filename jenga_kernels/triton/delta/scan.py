"""Second kernel of `jenga_kernels.delta_scan`: states from chunk to chunk, and outputs."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta.groups import Chunks
from jenga_kernels.triton.delta.segments import chunks_of_segment
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import matmul, matmul_add
from jenga_kernels.triton.recurrent.groups import Checkpoints, Requests
from jenga_kernels.triton.recurrent.recurrence import checkpoint_range, mask_if, stretch_end
from jenga_kernels.triton.recurrent.segments import segment_at


class ScanTiles(NamedTuple):
    """Tiles and flags for which `delta_scan_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    HEAD_V_DIM: int
    IS_PER_CHANNEL: bool
    BLOCK_T: int
    BLOCK_K: int
    BLOCK_V: int
    NUM_V_HEADS: int
    BLOCK_R: int | None


# Counts differ from step to step and must not cause another compilation.
@with_groups(chunks=Chunks, requests=Requests, checkpoints=Checkpoints, tiles=ScanTiles)
@triton.jit(do_not_specialize=["num_requests", "segment_tokens", "num_tokens_of_all", "num_chunks"])
def delta_scan_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_v_dim, head_k_dim]
    # Inputs
    segment_states_ptr,  # f32[num_segments, num_v_heads, head_v_dim + head_k_dim, head_k_dim]
    v_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    chunks,
    requests,
    checkpoints,
    # Sizes
    num_requests,
    segment_tokens,
    num_tokens_of_all,
    num_chunks,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_states_dim: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_initial: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Scan request r in BLOCK_V values of one head, chunk by chunk, in program (b, r).

    If requests are cut, it is segment r instead, and `segment_states_ptr` has its initial state.
    Without cuts, `segment_states_ptr` is None.
    """
    kept_keys_ptr = chunks.kept_keys_ptr
    since_start_ptr = chunks.since_start_ptr
    until_end_ptr = chunks.until_end_ptr
    decays_ptr = chunks.decays_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_V_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    segment = tl.program_id(1)
    request = segment
    if segment_states_ptr is not None:
        request, number, of_request = segment_at(
            segment, requests.query_starts_ptr, num_requests, segment_tokens, tiles.BLOCK_R
        )
        if of_request == 0:
            return
    vs = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_V + tl.arange(0, tiles.BLOCK_V)
    ks = tl.arange(0, tiles.BLOCK_K)
    tile = tl.arange(0, tiles.BLOCK_T)
    is_v = (vs < tiles.HEAD_V_DIM)[None, :]
    in_state = (ks < tiles.HEAD_K_DIM)[:, None] & is_v
    dtype = v_ptr.dtype.element_ty
    query_start = tl.load(requests.query_starts_ptr + request).to(tl.int64)
    num_tokens = tl.load(requests.query_starts_ptr + request + 1) - query_start.to(tl.int32)
    state_slot = tl.load(requests.state_slots_ptr + request * stride_slots)
    if segment_states_ptr is None:
        initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    out_ptr += query_start * stride_out_token + head * stride_out_head + vs[None, :]

    if state_slot <= 0:
        if segment_states_ptr is not None:
            num_tokens = tl.where(number == 0, num_tokens, 0)  # the first segment has all zeros
        for first in range(0, num_tokens, tiles.BLOCK_T):
            tokens = (first + tile).to(tl.int64)[:, None]
            zero = tl.full([tiles.BLOCK_T, tiles.BLOCK_V], 0.0, out_ptr.dtype.element_ty)
            tl.store(out_ptr + tokens * stride_out_token, zero, mask=is_v & (tokens < num_tokens))
        return

    v_ptr += query_start * stride_v_token + head * stride_v_head + vs[None, :]
    in_head = head * num_tokens_of_all + query_start
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
    queries_ptr = chunks.queries_ptr + in_keys
    keys_ptr = chunks.keys_ptr + in_keys
    scores_ptr = chunks.scores_ptr + (in_head * tiles.BLOCK_T + tile[None, :])
    solution_ptr = chunks.solution_ptr + (in_head * tiles.BLOCK_T + tile[None, :])
    # Offsets of rows only. Those of all elements would stay in registers until the store.
    in_page = head * stride_states_head + vs[None, :] * stride_states_dim  # [1, V]
    if segment_states_ptr is None:
        initial = states_ptr + (page_offsets(initial_slot, stride_states_slot) + in_page)
        h = tl.load(initial + ks[:, None], mask=mask_if(initial_slot > 0, in_state), other=0.0).to(
            tl.float32
        )  # [K, V]
    else:
        HEAD_ROWS: tl.constexpr = tiles.HEAD_V_DIM + tiles.HEAD_K_DIM
        STRIDE: tl.constexpr = tiles.NUM_V_HEADS * HEAD_ROWS * tiles.HEAD_K_DIM
        initial = segment_states_ptr + page_offsets(segment, STRIDE)
        initial += (head * HEAD_ROWS + vs[None, :]) * tiles.HEAD_K_DIM
        h = tl.load(initial + ks[:, None], mask=in_state, other=0.0)  # [K, V]

    start = 0
    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    if segment_states_ptr is not None:
        start, stretch, num_tokens, last_stretch, begin = chunks_of_segment(
            number,
            of_request,
            num_tokens,
            stretch,
            last_stretch,
            checkpoints.checkpoint_after_ptr,
            tiles.BLOCK_T,
        )
        if number + 1 < of_request:
            state_slot = 0  # its final state is the next segment's initial one
    for s in range(stretch, last_stretch + 1):
        stop, slot = stretch_end(
            s,
            last_stretch,
            checkpoints.checkpoint_after_ptr,
            checkpoints.checkpoint_slots_ptr,
            num_tokens,
            state_slot,
        )
        # Chunks are numbered as in `find_chunk`.
        if segment_states_ptr is None:
            chunk = (query_start + start) // tiles.BLOCK_T + request + s
        else:
            chunk = (query_start + begin) // tiles.BLOCK_T + request + s
            chunk += (start - begin) // tiles.BLOCK_T
            begin = stop
        for first in range(start, stop, tiles.BLOCK_T):
            tokens = (first + tile).to(tl.int64)
            live = tokens < stop
            row = tokens[:, None]
            rows = live[:, None]
            k = tl.load(keys_ptr + row * tiles.BLOCK_K, mask=rows, other=0.0)  # [T, K]
            v = tl.load(v_ptr + row * stride_v_token, mask=rows & is_v, other=0.0)  # [T, V]
            solution = tl.load(solution_ptr + row * tiles.BLOCK_T, mask=rows, other=0.0)  # [T, T]
            # Values replace those that the state before the chunk holds under the keys. The
            # solution accounts for the values that the chunk's own tokens hold under each other's
            # keys.
            before = rounded(h, dtype)
            held = matmul(k, before)  # [T, V]
            if tiles.IS_PER_CHANNEL:
                decay = tl.load(decays_ptr + chunk * tiles.BLOCK_K)[:, None]  # [K, 1]
                kept_k = tl.load(
                    kept_keys_ptr + row * tiles.BLOCK_K, mask=rows, other=0.0
                )  # [T, K]
                changes = matmul(solution, rounded(v.to(tl.float32) - held, dtype))
                kept = changes
            else:
                decay = tl.load(decays_ptr + chunk)
                since_start = tl.load(since_start_ptr + tokens, mask=live, other=0.0)[:, None]
                until_end = tl.load(until_end_ptr + tokens, mask=live, other=0.0)[:, None]
                kept_k = k
                changes = matmul(solution, rounded(v.to(tl.float32) - held * since_start, dtype))
                kept = changes * until_end

            q = tl.load(queries_ptr + row * tiles.BLOCK_K, mask=rows, other=0.0)  # [T, K]
            scores = tl.load(scores_ptr + row * tiles.BLOCK_T, mask=rows, other=0.0)  # [T, T]
            y = matmul(q, before)
            if not tiles.IS_PER_CHANNEL:
                y *= since_start
            y = rounded(matmul_add(scores, rounded(changes, dtype), y), dtype)
            tl.store(out_ptr + row * stride_out_token, y, mask=rows & is_v)
            h = matmul_add(tl.trans(kept_k), rounded(kept, dtype), h * decay)
            chunk += 1
        start = stop
        state_ptr = states_ptr + (page_offsets(slot, stride_states_slot) + in_page)
        tl.store(
            state_ptr + ks[:, None],
            rounded(h, states_ptr.dtype.element_ty),
            mask=mask_if(slot > 0, in_state),
        )
