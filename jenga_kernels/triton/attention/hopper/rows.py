# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Attention of its rows by a group of four warps, in the prefill kernel for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jenga_kernels.triton.attention.hopper.softmax import LOG2_E, log2, reciprocal, softmax_step
from jenga_kernels.triton.attention.hopper.work import (
    ROWS,
    end_visible,
    first_visible,
    said,
)

LN_2 = gl.constexpr(0.6931471805599453)

GROUP_ROWS = gl.constexpr(ROWS.value // 2)
"""Rows of a group of warps."""


@gluon.jit
def attend_rows(
    results,
    q_ptr,
    terms,
    spans_ptr,
    scoring,  # scale, soft_cap, window_tokens, chunk_tokens
    stride_q_token,
    stride_q_head,
    rows,
    ring,
    tiles: gl.constexpr,
    GROUP_INDEX: gl.constexpr,
):
    """Compute rows GROUP_INDEX * GROUP_ROWS and on of all row tiles."""
    done = 0
    num_begun = 0
    request = _await_item(rows, num_begun)
    while request >= 0:
        done += _attend_row_tile(
            results,
            q_ptr,
            terms,
            spans_ptr,
            done,
            num_begun,
            scoring,
            stride_q_token,
            stride_q_head,
            rows,
            ring,
            tiles,
            GROUP_INDEX,
        )
        num_begun += 1
        request = _await_item(rows, num_begun)


@gluon.jit
def _await_item(rows, num_begun):
    """Wait for the next row tile, and return its request."""
    _, items, item_ready, _, _ = rows
    mbarrier.wait(item_ready.index(num_begun % 2), (num_begun // 2) & 1)
    request, _, _, _, _, _, _, _ = said(items, num_begun % 2)
    return request


@gluon.jit
def _attend_row_tile(
    results,
    q_ptr,
    terms,
    spans_ptr,
    done,  # number of key tiles that came before in the ring
    num_begun,  # number of row tiles that came before
    scoring,
    stride_q_token,
    stride_q_head,
    rows,
    ring,
    tiles: gl.constexpr,
    GROUP_INDEX: gl.constexpr,
):
    """Loop over the key tiles of a row tile, and return their number."""
    NUM_HEADS: gl.constexpr = tiles.NUM_KV_HEADS * tiles.GROUP
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc_row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    copy_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // tiles.BLOCK_D, tiles.BLOCK_D // 8], [4, 1], [1, 0]
    )
    copy_row_layout: gl.constexpr = gl.SliceLayout(1, copy_layout)
    _, _, window_tokens, chunk_tokens = scoring
    q_tiles, items, _, item_free, q_descriptor = rows
    place = num_begun % 2
    _, kv_head, row_start, query_start, query_len, seq_len, tiles_start, num_tiles = said(
        items, place
    )
    row_start += GROUP_INDEX * GROUP_ROWS
    dims = gl.arange(0, tiles.BLOCK_D, gl.SliceLayout(0, copy_layout))
    if q_descriptor is None:
        q = q_tiles.index(GROUP_INDEX)
        in_tile, tokens, heads = _rows(row_start, query_len, kv_head, tiles.GROUP, copy_row_layout)
        is_there = (in_tile < query_len * tiles.GROUP)[:, None] & (dims < tiles.HEAD_DIM)[None, :]
        offsets = (query_start + tokens).to(gl.int64) * stride_q_token + heads * stride_q_head
        q.store(gl.load(q_ptr + offsets[:, None] + dims[None, :], mask=is_there, other=0.0))
        fence_async_shared()
    else:
        q = q_tiles.index(place * 2 + GROUP_INDEX)

    in_tile, tokens, heads = _rows(row_start, query_len, kv_head, tiles.GROUP, row_layout)
    positions = seq_len - query_len + tokens
    span_starts = None
    span_ends = None
    if spans_ptr is not None:
        span_ptrs = spans_ptr + (query_start + tokens).to(gl.int64) * 2
        span_starts = gl.maximum(gl.load(span_ptrs), 0)
        span_ends = gl.minimum(gl.load(span_ptrs + 1), seq_len)
    slopes = None
    if terms.alibi_slopes_ptr is not None:
        slopes = gl.load(terms.alibi_slopes_ptr + heads)

    # Every row reads keys [full_start, full_end), so the tiles within need no mask.
    last_token = gl.minimum((row_start + GROUP_ROWS - 1) // tiles.GROUP, query_len - 1)
    first_token = gl.minimum(row_start // tiles.GROUP, query_len - 1)
    full_start = first_visible(seq_len - query_len + last_token, window_tokens, chunk_tokens)
    full_end = end_visible(seq_len - query_len + first_token, seq_len, tiles.IS_CAUSAL)
    first_full = gl.minimum(
        gl.cdiv(gl.maximum(full_start - tiles_start, 0), tiles.BLOCK_N), num_tiles
    )
    first_full = gl.maximum(first_full, 1)
    end_full = gl.maximum(gl.maximum(full_end - tiles_start, 0) // tiles.BLOCK_N, first_full)

    k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns = ring
    first_stage = done % tiles.NUM_STAGES
    mbarrier.wait(k_ready.index(first_stage), (done // tiles.NUM_STAGES) & 1)
    if tiles.TAKES_TURNS:
        _await_turn(turns, done, GROUP_INDEX)
    scores = _ask_for_scores(q, k_tiles.index(first_stage), tiles.BLOCK_N)
    if tiles.TAKES_TURNS:
        mbarrier.arrive(turns.index(1 - GROUP_INDEX), count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(first_stage), count=1)
    row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, row_layout)
    row_sum = gl.full([GROUP_ROWS], 0, gl.float32, row_layout)
    weights, _, row_max, row_sum = softmax_step(
        scores,
        row_max,
        row_sum,
        tiles_start,
        positions,
        seq_len,
        span_starts,
        span_ends,
        slopes,
        scoring,
        True,
        tiles.IS_CAUSAL,
        tiles.BLOCK_N,
    )
    weights = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, acc_layout, 2))
    _await_keys(k_ready, done + 1, num_tiles > 1, tiles.NUM_STAGES)
    acc = gl.full([GROUP_ROWS, tiles.BLOCK_D], 0, gl.float32, acc_layout)
    # One loop for all tiles: instructions that run once have to be fetched, which costs most where
    # rows read few keys.
    for tile in range(1, num_tiles):
        is_edge = (tile < first_full) | (tile >= end_full)
        acc, weights, row_max, row_sum = _attend_tile(
            acc,
            weights,
            row_max,
            row_sum,
            tile,
            is_edge,
            num_tiles,
            tiles_start,
            done,
            q,
            positions,
            seq_len,
            span_starts,
            span_ends,
            slopes,
            scoring,
            ring,
            tiles,
            GROUP_INDEX,
        )
    last = done + num_tiles - 1
    last_stage = last % tiles.NUM_STAGES
    mbarrier.wait(v_ready.index(last_stage), (last // tiles.NUM_STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(last_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(last_stage), count=1)

    # Read again, because the loop over keys needs all registers.
    _, kv_head, row_start, query_start, query_len, _, _, _ = said(items, place)
    row_start += GROUP_INDEX * GROUP_ROWS
    in_tile, tokens, heads = _rows(row_start, query_len, kv_head, tiles.GROUP, row_layout)
    if terms.sinks_ptr is not None:
        sinks = gl.load(terms.sinks_ptr + heads).to(gl.float32) * LOG2_E
        new_max = gl.maximum(row_max, sinks)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = gl.exp2(row_max - shift)
        acc = acc * gl.convert_layout(rescale, acc_row_layout)[:, None]
        row_sum = row_sum * rescale + gl.exp2(sinks - shift)
        row_max = new_max
    has_keys = row_sum > 0
    divisor = gl.where(has_keys, row_sum, 1.0)
    if results.lse_ptr is not None:
        lse = gl.where(has_keys, (row_max + log2(divisor)) * LN_2, float("-inf"))
        lse_ptrs = results.lse_ptr + (query_start + tokens).to(gl.int64) * NUM_HEADS + heads
        gl.store(lse_ptrs, lse, mask=in_tile < query_len * tiles.GROUP)
    factor = reciprocal(divisor)
    out = acc * gl.convert_layout(factor, acc_row_layout)[:, None]
    # Results pass through the shared memory of the queries, so that whole rows are written.
    q.store(out.to(q.dtype))
    in_tile, tokens, heads = _rows(row_start, query_len, kv_head, tiles.GROUP, copy_row_layout)
    is_there = (in_tile < query_len * tiles.GROUP)[:, None] & (dims < tiles.HEAD_DIM)[None, :]
    offsets = ((query_start + tokens).to(gl.int64) * NUM_HEADS + heads) * tiles.HEAD_DIM
    out = q.load(copy_layout)
    if q_descriptor is not None:
        fence_async_shared()
    mbarrier.arrive(item_free.index(place), count=1)
    gl.store(results.out_ptr + offsets[:, None] + dims[None, :], out, mask=is_there)
    return num_tiles


@gluon.jit
def _rows(row_start, query_len, kv_head, GROUP: gl.constexpr, layout: gl.constexpr):
    """Rows of the group, their tokens in the request (the last one past the end), and heads."""
    rows = row_start + gl.arange(0, GROUP_ROWS, layout)
    return rows, gl.minimum(rows // GROUP, query_len - 1), kv_head * GROUP + rows % GROUP


@gluon.jit
def _attend_tile(
    # Carried from one tile to the next
    acc,  # f32[GROUP_ROWS, BLOCK_D]
    weights,  # [GROUP_ROWS, BLOCK_N], of the previous tile
    row_max,  # f32[GROUP_ROWS]
    row_sum,  # f32[GROUP_ROWS]
    # The tile
    tile,
    is_edge,
    num_tiles,
    tiles_start,
    done,
    # Arguments that all tiles have in common
    q,
    positions,
    seq_len,
    span_starts,
    span_ends,
    slopes,
    scoring,
    ring,
    tiles: gl.constexpr,
    GROUP_INDEX: gl.constexpr,
):
    """Compute scores and weights of a tile while the previous one is multiplied with its values."""
    k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns = ring
    index = done + tile
    stage = index % tiles.NUM_STAGES
    stage_before = (index - 1) % tiles.NUM_STAGES

    if tiles.TAKES_TURNS:
        _await_turn(turns, index, GROUP_INDEX)
    scores = _ask_for_scores(q, k_tiles.index(stage), tiles.BLOCK_N)
    mbarrier.wait(v_ready.index(stage_before), ((index - 1) // tiles.NUM_STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(stage_before), acc, is_async=True)
    if tiles.TAKES_TURNS:
        mbarrier.arrive(turns.index(1 - GROUP_INDEX), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(stage), count=1)

    new_weights, rescale, row_max, row_sum = softmax_step(
        scores,
        row_max,
        row_sum,
        tiles_start + tile * tiles.BLOCK_N,
        positions,
        seq_len,
        span_starts,
        span_ends,
        slopes,
        scoring,
        is_edge,
        tiles.IS_CAUSAL,
        tiles.BLOCK_N,
    )
    # The assembler moves nothing across this wait, so the softmax overlaps with the product.
    _await_keys(k_ready, index + 1, tile + 1 < num_tiles, tiles.NUM_STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(stage_before), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = gl.convert_layout(new_weights.to(q.dtype), weights.type.layout)
    return acc, weights, row_max, row_sum


@gluon.jit
def _await_turn(turns, index, GROUP_INDEX: gl.constexpr):
    """Wait until the other group has issued its products: of this tile, or of the previous one."""
    mbarrier.wait(turns.index(GROUP_INDEX), (index & 1) ^ (1 - GROUP_INDEX))


@gluon.jit
def _await_keys(ready, index, is_there, NUM_STAGES: gl.constexpr):
    phase = (index // NUM_STAGES) & 1
    mbarrier.wait(ready.index(index % NUM_STAGES), phase, pred=is_there)


@gluon.jit
def _ask_for_scores(q, keys, BLOCK_N: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.full([GROUP_ROWS, BLOCK_N], 0, gl.float32, layout)
    return warpgroup_mma(q, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
