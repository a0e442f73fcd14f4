# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Half of the results of all rows, by a group of four warps in `hopper.decode`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jenga_kernels.triton.attention.hopper.softmax import log2, reciprocal, softmax_step
from jenga_kernels.triton.attention.hopper.work import end_visible, said
from jenga_kernels.triton.latent.hopper.load import HALF_DIM, KEYS, NUM_PARTS, ROTARY_PART, ROWS

LN_2 = gl.constexpr(0.6931471805599453)

SCORE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))
"""Layout of a tile's scores."""

RESULT_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM.value, 16]))
"""Layout of half of the results."""

LEFT_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, SCORE_LAYOUT.value, 2))
"""Layout of rotary queries, the left operand of a product with keys."""

WEIGHT_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, RESULT_LAYOUT.value, 2))
"""Layout of weights, the left operand of a product with values."""

ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORE_LAYOUT.value))

RESULT_ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, RESULT_LAYOUT.value))

COPY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
"""Layout in which results are written: a warp has one row at a time."""

RESCALE = gl.constexpr(0)
"""Index of the factor of results so far, among the numbers of rows that the groups exchange."""

ROW_MAX = gl.constexpr(1)
"""Index of the greatest score so far."""

ROW_SUM = gl.constexpr(2)
"""Index of the sum of weights of the tiles whose scores a group has computed."""

NUM_TOLD = gl.constexpr(3)


@gluon.jit
def attend_half(
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    latent_scale_ptr,
    scale,
    room,
    NUM_HEADS: gl.constexpr,
    NUM_MEMBERS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Compute half SIDE of the results of each run, and the scores of every other tile of keys."""
    _, _, _, _, items, _, barriers = room
    _, _, _, _, item_ready, _, _ = barriers
    done = 0
    num_begun = 0
    mbarrier.wait(item_ready, 0)
    request, _, _, _, _, _, _, _ = said(items, 0)
    while request >= 0:
        done += _attend_run(
            out_ptr,
            lse_ptr,
            partial_out_ptr,
            partial_lse_ptr,
            latent_scale_ptr,
            scale,
            done,
            num_begun & 1,
            room,
            NUM_HEADS,
            NUM_MEMBERS,
            QUERY_TOKENS,
            IS_CAUSAL,
            TAKES_TURNS,
            SIDE,
        )
        num_begun += 1
        mbarrier.wait(item_ready, num_begun & 1)
        request, _, _, _, _, _, _, _ = said(items, 0)


@gluon.jit
def _attend_run(
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    latent_scale_ptr,
    scale,
    done,  # number of steps that came before
    run_phase,  # phase of the barriers of runs
    room,
    NUM_HEADS: gl.constexpr,
    NUM_MEMBERS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Loop over the keys of a run, and return the number of its steps."""
    q, latents, rotary, weights, items, told, barriers = room
    ready, free, _, weights_ready, _, item_free, sums_ready = barriers
    dtype: gl.constexpr = q.dtype
    first_row = gl.program_id(0) % NUM_MEMBERS * ROWS
    _, tile_start, num_steps, _, query_len, seq_len, _, _ = said(items, 0)
    q_rotary = weights.index(1).load(LEFT_LAYOUT)
    rows = first_row + gl.arange(0, ROWS, ROW_LAYOUT)
    positions = seq_len - query_len + gl.minimum(rows // NUM_HEADS, query_len - 1)
    # Every row reads the keys before this one, so tiles of them need no mask.
    full_end = end_visible(seq_len - query_len + first_row // NUM_HEADS, seq_len, IS_CAUSAL)
    if latent_scale_ptr is not None:
        scale *= gl.load(latent_scale_ptr)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    row_sum = gl.full([ROWS], 0, gl.float32, ROW_LAYOUT)
    acc = gl.full([ROWS, HALF_DIM], 0, gl.float32, RESULT_LAYOUT)
    # Tile 0 of a step belongs to side 0, whose weights come first, because the greatest score of a
    # row is passed from tile to tile.
    for step in range(num_steps):
        phase = (done + step) & 1
        first_key = ((tile_start + step) * 2 + SIDE) * KEYS
        is_edge = first_key + KEYS > full_end
        # The compiler would keep shared memory addresses of operands in too many registers.
        zero = _unknown_zero(step)
        if TAKES_TURNS and SIDE == 1:
            # Wait for the scores of the other tile, whose softmax then overlaps these products.
            mbarrier.wait(free.index(0 * NUM_PARTS + ROTARY_PART), phase)
        scores = _scores(q, q_rotary, latents, rotary, ready, free, phase, zero, SIDE)
        if SIDE == 1:
            mbarrier.wait(weights_ready.index(0), phase)
            acc, row_max, row_sum = _rescaled(acc, row_sum, told, 0)
            acc = _ask_for_results(weights.index(zero), latents, ready, phase, acc, zero, 0, SIDE)
        new_weights, rescale, row_max, row_sum = softmax_step(
            scores,
            row_max,
            row_sum,
            first_key,
            positions,
            seq_len,
            None,
            None,
            None,
            (scale, None, None, None),
            is_edge,
            IS_CAUSAL,
            KEYS,
        )
        new_weights = new_weights.to(dtype)
        told.index(SIDE * NUM_TOLD + RESCALE).store(rescale)
        told.index(SIDE * NUM_TOLD + ROW_MAX).store(row_max)
        weights.index(SIDE).store(new_weights)
        fence_async_shared()
        mbarrier.arrive(weights_ready.index(SIDE), count=1)
        if SIDE == 1:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(0 * NUM_PARTS + SIDE), count=1)
        acc = acc * gl.convert_layout(rescale, RESULT_ROW_LAYOUT)[:, None]
        own = gl.convert_layout(new_weights, WEIGHT_LAYOUT)
        acc = _ask_for_results(own, latents, ready, phase, acc, zero, SIDE, SIDE)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(SIDE * NUM_PARTS + SIDE), count=1)
        if SIDE == 0:
            mbarrier.wait(weights_ready.index(1), phase)
            acc, row_max, row_sum = _rescaled(acc, row_sum, told, 1)
            acc = _ask_for_results(
                weights.index(zero + 1), latents, ready, phase, acc, zero, 1, SIDE
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(1 * NUM_PARTS + SIDE), count=1)

    told.index(SIDE * NUM_TOLD + ROW_SUM).store(row_sum)
    mbarrier.arrive(sums_ready.index(SIDE), count=1)
    mbarrier.wait(sums_ready.index(1 - SIDE), run_phase)
    row_sum += told.index((1 - SIDE) * NUM_TOLD + ROW_SUM).load(ROW_LAYOUT)
    has_keys = row_sum > 0
    divisor = gl.where(has_keys, row_sum, 1.0)
    factor = reciprocal(divisor)
    if latent_scale_ptr is not None:
        factor *= gl.load(latent_scale_ptr)
    out = acc * gl.convert_layout(factor, RESULT_ROW_LAYOUT)[:, None]
    lse = gl.where(has_keys, (row_max + log2(divisor)) * LN_2, float("-inf"))
    # Read again, because the loop over keys needs all registers.
    _, _, _, query_start, query_len, _, partial, _ = said(items, 0)
    end_row = query_len * NUM_HEADS
    # Indices of result rows fit into 32 bits; offsets of their elements do not.
    if partial >= 0:
        mbarrier.arrive(item_free, count=1)
        partial_rows = partial * (QUERY_TOKENS * NUM_HEADS)
        _store_part(partial_out_ptr, partial_rows, first_row, end_row, out, SIDE)
        if SIDE == 0:
            _store_sums(partial_lse_ptr, partial_rows, first_row, end_row, lse)
    else:
        # Results pass through the shared memory of the queries, so that whole rows are written.
        q.index(SIDE).store(out.to(dtype))
        whole = q.index(SIDE).load(COPY_LAYOUT)
        fence_async_shared()
        mbarrier.arrive(item_free, count=1)
        out_rows = query_start * NUM_HEADS
        _store_part(out_ptr, out_rows, first_row, end_row, whole, SIDE)
        if lse_ptr is not None and SIDE == 0:
            _store_sums(lse_ptr, out_rows, first_row, end_row, lse)
    return num_steps


@gluon.jit
def _store_part(ptr, rows_before, first_row, end_row, values, SIDE: gl.constexpr):
    """Store half of the elements of rows in their own layout."""
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
    dims = gl.arange(0, HALF_DIM, gl.SliceLayout(0, values.type.layout))
    offsets = (rows_before + rows).to(gl.int64) * (2 * HALF_DIM) + SIDE * HALF_DIM
    gl.store(ptr + offsets[:, None] + dims[None, :], values, mask=(rows < end_row)[:, None])


@gluon.jit
def _store_sums(ptr, rows_before, first_row, end_row, lse):
    rows = first_row + gl.arange(0, ROWS, ROW_LAYOUT)
    gl.store(ptr + rows_before + rows, lse, mask=rows < end_row)


@gluon.jit
def _scores(q, q_rotary, latents, rotary, ready, free, phase, zero, SIDE: gl.constexpr):
    """Compute the scores f32[ROWS, KEYS] of this side's tile, and free its rotary keys."""
    rotary_part: gl.constexpr = SIDE * NUM_PARTS + ROTARY_PART
    scores = gl.full([ROWS, KEYS], 0, gl.float32, SCORE_LAYOUT)
    mbarrier.wait(ready.index(rotary_part), phase)
    keys = rotary.index(zero + SIDE).permute((1, 0))
    scores = warpgroup_mma(q_rotary, keys, scores, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        mbarrier.wait(ready.index(SIDE * NUM_PARTS + half), phase)
        keys = latents.index(zero + (SIDE * 2 + half)).permute((1, 0))
        scores = warpgroup_mma(q.index(zero + half), keys, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(free.index(rotary_part), count=1)
    return scores


@gluon.jit
def _rescaled(acc, row_sum, told, SIDE: gl.constexpr):
    """Rescale results and sums of weights by the other side's tile; get the greatest scores."""
    rescale = told.index(SIDE * NUM_TOLD + RESCALE).load(ROW_LAYOUT)
    row_max = told.index(SIDE * NUM_TOLD + ROW_MAX).load(ROW_LAYOUT)
    acc = acc * gl.convert_layout(rescale, RESULT_ROW_LAYOUT)[:, None]
    return acc, row_max, row_sum * rescale


@gluon.jit
def _ask_for_results(
    weights, latents, ready, phase, acc, zero, tile: gl.constexpr, SIDE: gl.constexpr
):
    """Start the product of weights with this side's half of the latents of a tile."""
    mbarrier.wait(ready.index(tile * NUM_PARTS + SIDE), phase)
    return warpgroup_mma(weights, latents.index(zero + (tile * 2 + SIDE)), acc, is_async=True)


@gluon.jit
def _unknown_zero(step):
    """Return 0 in a way that the compiler cannot know to be the same in every step."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=True, pack=1
    )
