# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Second kernel of `jenga_kernels.delta_scan` for Hopper, with loads ahead and transposed states.

While a chunk is computed, the first kernel's results for the next ones are loaded into shared
memory. Three of a chunk's five products depend on one another. States stay in registers, with a row
for each value, so that they and their products are left operands without a copy. The kernel is
written in Gluon, which has no interpreter. `delta.scan` computes the same in Triton.
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
    NUMBERS_LAYOUT,
    SQUARE_LAYOUT,
    TILE_LAYOUT,
    TOKEN_LAYOUT,
    TOKENS,
    checkpoint_range,
    load_state,
    load_tile,
    store_rows,
    store_state,
    store_zeros,
    stretch_stop,
    zero_rows,
)

KEYS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of numbers of key channels."""


class ScanTiles(NamedTuple):
    """Tiles and flags for which `delta_scan_hopper_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_V_DIM: int
    IS_PER_CHANNEL: bool
    BLOCK_K: int
    NUM_STAGES: int
    IS_OVERLAPPED: bool


@with_groups(requests=Requests, checkpoints=Checkpoints, tiles=ScanTiles)
@gluon.jit(do_not_specialize=["num_tokens_of_all", "num_chunks"])
def delta_scan_hopper_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_v_dim, head_k_dim]
    # Inputs
    v_descriptor,  # [num_tokens, num_v_heads, head_v_dim]
    queries_descriptor,  # [num_tokens, num_qk_heads or num_v_heads, BLOCK_K]
    keys_descriptor,  # [num_tokens, num_qk_heads or num_v_heads, BLOCK_K]
    kept_keys_descriptor,  # [num_tokens, num_v_heads, BLOCK_K], or None: the same as keys
    scores_descriptor,  # [num_tokens, num_v_heads, TOKENS]
    solution_descriptor,  # [num_tokens, num_v_heads, TOKENS]
    since_start_ptr,  # f32[num_v_heads, num_tokens], or None if queries and keys include it
    until_end_ptr,  # f32[num_v_heads, num_tokens] or None
    decays_ptr,  # f32[num_v_heads, num_chunks] or f32[num_v_heads, num_chunks, BLOCK_K]
    requests,
    checkpoints,
    # Sizes
    num_tokens_of_all,
    num_chunks,
    # Strides, in elements
    stride_out_token: gl.int64,
    stride_out_head: gl.int64,
    stride_states_slot: gl.int64,
    stride_states_head: gl.int64,
    stride_states_dim: gl.int64,
    stride_initial: gl.int64,
    stride_slots: gl.int64,
    # Tiles and flags
    tiles: gl.constexpr,
):
    """Scan request r in CHANNELS values of one head, chunk by chunk, in program (b, r)."""
    NUM_STAGES: gl.constexpr = tiles.NUM_STAGES
    BLOCKS: gl.constexpr = tiles.HEAD_V_DIM // CHANNELS
    dtype: gl.constexpr = v_descriptor.dtype
    head = (gl.program_id(0) // BLOCKS).to(gl.int64)
    first_dim = (gl.program_id(0) % BLOCKS) * CHANNELS
    request = gl.program_id(1)
    query_start = gl.load(requests.query_starts_ptr + request)
    num_tokens = gl.load(requests.query_starts_ptr + request + 1) - query_start
    state_slot = gl.load(requests.state_slots_ptr + request * stride_slots)
    initial_slot = gl.load(requests.initial_slots_ptr + request * stride_initial)
    out_ptr += query_start * stride_out_token + head * stride_out_head + first_dim
    if state_slot <= 0:
        await_kernel_before(tiles.IS_OVERLAPPED)
        store_zeros(out_ptr, 0, num_tokens, stride_out_token)
        return

    in_head = head * num_tokens_of_all + query_start
    group = head if tiles.IS_PER_CHANNEL else head // tiles.HEADS_PER_GROUP
    place = (query_start, head.to(gl.int32), group.to(gl.int32), first_dim)
    inputs = (
        v_descriptor,
        queries_descriptor,
        keys_descriptor,
        kept_keys_descriptor,
        scores_descriptor,
        solution_descriptor,
    )
    v_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, TOKENS, CHANNELS], TILE_LAYOUT)
    q_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, TOKENS, tiles.BLOCK_K], TILE_LAYOUT)
    k_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, TOKENS, tiles.BLOCK_K], TILE_LAYOUT)
    kept_k_tiles = k_tiles
    if tiles.IS_PER_CHANNEL:
        kept_k_tiles = gl.allocate_shared_memory(
            dtype, [NUM_STAGES, TOKENS, tiles.BLOCK_K], TILE_LAYOUT
        )
    scores_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, TOKENS, TOKENS], TILE_LAYOUT)
    solution_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, TOKENS, TOKENS], TILE_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    ring = (v_tiles, q_tiles, k_tiles, kept_k_tiles, scores_tiles, solution_tiles, ready)
    shared_since = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)
    shared_until = gl.allocate_shared_memory(gl.float32, [TOKENS], NUMBERS_LAYOUT)
    shared_decay = gl.allocate_shared_memory(gl.float32, [tiles.BLOCK_K], NUMBERS_LAYOUT)
    weights = (since_start_ptr, until_end_ptr, decays_ptr)
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_K, 16])
    columns: gl.constexpr = gl.SliceLayout(0, SQUARE_LAYOUT)

    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    stop = stretch_stop(stretch, last_stretch, checkpoints.checkpoint_after_ptr, num_tokens)
    states_ptr += head * stride_states_head + first_dim * stride_states_dim
    initial_ptr = states_ptr + initial_slot.to(gl.int64) * stride_states_slot
    h = load_state(initial_ptr, initial_slot > 0, stride_states_dim, tiles.BLOCK_K, 1)[0]
    # Chunks are numbered as in `find_chunk`.
    chunk = query_start // TOKENS + request + stretch
    await_kernel_before(tiles.IS_OVERLAPPED)
    stretches = (last_stretch, checkpoints.checkpoint_after_ptr, num_tokens)
    asked = (0, stop, stretch)
    for i in gl.static_range(NUM_STAGES - 1):
        asked = _ask(
            inputs,
            place,
            ring,
            i,
            asked,
            stretches,
            tiles.IS_PER_CHANNEL,
            tiles.BLOCK_K,
            NUM_STAGES,
        )
    since, until, decay = _load_weights(
        weights, in_head, 0, stop, head * num_chunks + chunk, tiles.IS_PER_CHANNEL, tiles.BLOCK_K
    )
    turn = 0
    start = 0
    for s in range(stretch, last_stretch + 1):
        slot = state_slot
        if checkpoints.checkpoint_after_ptr is not None and s < last_stretch:
            slot = gl.load(checkpoints.checkpoint_slots_ptr + s)
        stop_after = stretch_stop(s + 1, last_stretch, checkpoints.checkpoint_after_ptr, num_tokens)
        for first in range(start, stop, TOKENS):
            stage = turn % NUM_STAGES
            if tiles.IS_PER_CHANNEL:
                shared_decay.store(decay)
            else:
                shared_since.store(since)
                shared_until.store(until)
            is_last = first + TOKENS >= stop
            next_first = gl.where(is_last, stop, first + TOKENS)
            next_stop = gl.where(is_last, stop_after, stop)
            after_stretch = (query_start + stop) // TOKENS + request + s + 1
            chunk = gl.where(is_last, after_stretch, chunk + 1)
            free = (turn + NUM_STAGES - 1) % NUM_STAGES
            asked = _ask(
                inputs,
                place,
                ring,
                free,
                asked,
                stretches,
                tiles.IS_PER_CHANNEL,
                tiles.BLOCK_K,
                NUM_STAGES,
            )
            next_since, next_until, next_decay = _load_weights(
                weights,
                in_head,
                next_first,
                next_stop,
                head * num_chunks + chunk,
                tiles.IS_PER_CHANNEL,
                tiles.BLOCK_K,
            )
            mbarrier.wait(ready.index(stage), (turn // NUM_STAGES) & 1)
            if stop - first < TOKENS:
                zero_rows(v_tiles, stage, stop - first, CHANNELS, 1, NUM_STAGES)
                zero_rows(k_tiles, stage, stop - first, tiles.BLOCK_K, 1, NUM_STAGES)
                zero_rows(solution_tiles, stage, stop - first, TOKENS, 1, NUM_STAGES)
                if tiles.IS_PER_CHANNEL:
                    zero_rows(kept_k_tiles, stage, stop - first, tiles.BLOCK_K, 1, NUM_STAGES)
                fence_async_shared()

            # Values replace those that the state before the chunk holds under the keys. The
            # solution accounts for the values that the chunk's own tokens hold under each other's
            # keys.
            zeros = gl.full([CHANNELS, TOKENS], 0.0, gl.float32, SQUARE_LAYOUT)
            before = gl.convert_layout(h.to(dtype), LEFT_LAYOUT)
            k = k_tiles.index(stage).permute((1, 0))
            held = warpgroup_mma(before, k, zeros, use_acc=False, is_async=True)
            q = q_tiles.index(stage).permute((1, 0))
            y = warpgroup_mma(before, q, zeros, use_acc=False, is_async=True)
            v = v_tiles.index(stage).permute((1, 0)).load(LEFT_LAYOUT)
            v = gl.convert_layout(v, SQUARE_LAYOUT).to(gl.float32)
            held = warpgroup_mma_wait(1, deps=[held])
            if not tiles.IS_PER_CHANNEL:
                held *= shared_since.load(columns)[None, :]
            missing = gl.convert_layout((v - held).to(dtype), LEFT_LAYOUT)
            solution = solution_tiles.index(stage).permute((1, 0))
            changes = warpgroup_mma(missing, solution, zeros, use_acc=False, is_async=True)
            if tiles.IS_PER_CHANNEL:
                h *= shared_decay.load(gl.SliceLayout(0, state_layout))[None, :]
            else:
                h *= decay
            y = warpgroup_mma_wait(1, deps=[y])
            if not tiles.IS_PER_CHANNEL:
                y *= shared_since.load(columns)[None, :]
            changes = warpgroup_mma_wait(0, deps=[changes])
            added = gl.convert_layout(changes.to(dtype), LEFT_LAYOUT)
            scores = scores_tiles.index(stage).permute((1, 0))
            y = warpgroup_mma(added, scores, y, is_async=True)
            kept = added
            if not tiles.IS_PER_CHANNEL:
                kept = (changes * shared_until.load(columns)[None, :]).to(dtype)
                kept = gl.convert_layout(kept, LEFT_LAYOUT)
            h = warpgroup_mma(kept, kept_k_tiles.index(stage), h, is_async=True)
            y = warpgroup_mma_wait(1, deps=[y])
            # Values have been read, so results take their place.
            results = v_tiles.index(stage)
            results.permute((1, 0)).store(y.to(dtype))
            store_rows(results, out_ptr + first * stride_out_token, stride_out_token, stop - first)
            fence_async_shared()
            h = warpgroup_mma_wait(0, deps=[h])
            since, until, decay = next_since, next_until, next_decay
            turn += 1
        start = stop
        stop = stop_after
        last_ptr = states_ptr + slot.to(gl.int64) * stride_states_slot
        store_state(last_ptr, (h,), slot > 0, stride_states_dim, tiles.BLOCK_K, 1)


@gluon.jit
def _ask(
    inputs,
    place,
    ring,
    stage,
    asked,
    stretches,
    IS_PER_CHANNEL: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Start the loads of a chunk, if there is one.

    `asked` is its first token, the end of its stretch, and the index of the stretch.

    Returns:
        The same for the next chunk.
    """
    first, stop, stretch = asked
    last_stretch, checkpoint_after_ptr, num_tokens = stretches
    if first < num_tokens:
        _load_chunk(inputs, place, ring, stage, first, IS_PER_CHANNEL, BLOCK_K, NUM_STAGES)
    is_last = first + TOKENS >= stop
    first = gl.where(is_last, stop, first + TOKENS)
    if checkpoint_after_ptr is not None:
        stretch += is_last.to(gl.int32)
        stop = stretch_stop(stretch, last_stretch, checkpoint_after_ptr, num_tokens)
    return first, stop, stretch


@gluon.jit
def _load_chunk(
    inputs,
    place,
    ring,
    stage,
    first,
    IS_PER_CHANNEL: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Start the loads of everything that belongs to tokens [first, first + TOKENS)."""
    v_descriptor, q_descriptor, k_descriptor, kept_k_descriptor, scores, solution = inputs
    v_tiles, q_tiles, k_tiles, kept_k_tiles, scores_tiles, solution_tiles, ready = ring
    query_start, head, group, first_dim = place
    barrier = ready.index(stage)
    token = query_start + first
    NUM_KEYS: gl.constexpr = 3 if IS_PER_CHANNEL else 2
    mbarrier.expect(barrier, TOKENS * (NUM_KEYS * BLOCK_K + CHANNELS + 2 * TOKENS) * 2)
    load_tile(k_descriptor, token, group, 0, k_tiles, stage, barrier, NUM_STAGES, BLOCK_K)
    load_tile(q_descriptor, token, group, 0, q_tiles, stage, barrier, NUM_STAGES, BLOCK_K)
    load_tile(v_descriptor, token, head, first_dim, v_tiles, stage, barrier, NUM_STAGES, CHANNELS)
    load_tile(solution, token, head, 0, solution_tiles, stage, barrier, NUM_STAGES, TOKENS)
    load_tile(scores, token, head, 0, scores_tiles, stage, barrier, NUM_STAGES, TOKENS)
    if IS_PER_CHANNEL:
        load_tile(
            kept_k_descriptor, token, head, 0, kept_k_tiles, stage, barrier, NUM_STAGES, BLOCK_K
        )


@gluon.jit
def _load_weights(
    weights, in_head, first, stop, chunk, IS_PER_CHANNEL: gl.constexpr, BLOCK_K: gl.constexpr
):
    """Load decays of a chunk: up to and after each token, 0 past the stretch, and of the state."""
    since_start_ptr, until_end_ptr, decays_ptr = weights
    is_any = first < stop
    if IS_PER_CHANNEL:
        ks = gl.arange(0, BLOCK_K, KEYS_LAYOUT)
        decay = gl.load(decays_ptr + chunk * BLOCK_K + ks, mask=is_any, other=0.0)
        return decay, decay, decay  # queries and keys include the other two
    else:
        tokens = first + gl.arange(0, TOKENS, TOKEN_LAYOUT)
        since = gl.load(since_start_ptr + in_head + tokens, mask=tokens < stop, other=0.0)
        until = gl.load(until_end_ptr + in_head + tokens, mask=tokens < stop, other=0.0)
        return since, until, gl.load(decays_ptr + chunk, mask=is_any, other=0.0)
