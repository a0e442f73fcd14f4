"""First kernel of `jenga_kernels.delta_scan` with a decay for every key channel."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta import tiles as delta_tiles
from jenga_kernels.triton.delta.groups import ChunkInputs, Chunks
from jenga_kernels.triton.delta.rule import (
    decay_log2,
    find_chunk,
    rate_log2,
    sigmoid,
    unit_factors,
    unit_triangular_inverse,
)
from jenga_kernels.triton.lib.device import device_function, let_next_begin, rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import INTERPRETED, matmul
from jenga_kernels.triton.recurrent.recurrence import row_sums

RUN_TOKENS = tl.constexpr(delta_tiles.RUN_TOKENS)
"""Consecutive tokens that a thread holds. Work between them needs no other thread."""


@device_function
def load_run(ptr, stride_token, run_starts, end, is_k):
    """Load the four tokens of each run, [runs, K] each; 0 past the end."""
    return (
        tl.load(ptr, mask=(run_starts < end) & is_k, other=0.0),
        tl.load(ptr + stride_token, mask=(run_starts + 1 < end) & is_k, other=0.0),
        tl.load(ptr + 2 * stride_token, mask=(run_starts + 2 < end) & is_k, other=0.0),
        tl.load(ptr + 3 * stride_token, mask=(run_starts + 3 < end) & is_k, other=0.0),
    )


@device_function
def decay_before(gates, tokens, end, rate, bias):
    """Logarithms to base two of the decays of tokens; 0 for tokens past the end."""
    if rate is not None:
        rate = tl.where(tokens < end, rate, 0.0)
    return decay_log2(gates.to(tl.float32), rate, bias)


@device_function
def scaled(rows, scale, IS_NORMALIZED: tl.constexpr):
    """Rows of [M, N] times a factor, in float32; scaled to length one first if IS_NORMALIZED."""
    rows = rows.to(tl.float32)
    if IS_NORMALIZED:
        return rows * (scale * unit_factors(rows))[:, None]
    else:
        return rows * scale


@device_function
def interleaved(rows):
    """Interleave four [runs, K], one for each token of a run, to [T, K]."""
    RUNS: tl.constexpr = rows[0].shape[0]
    BLOCK_K: tl.constexpr = rows[0].shape[1]
    in_run = tl.arange(0, RUN_TOKENS)[None, :, None]
    tile = tl.broadcast_to(tl.reshape(rows[0], [RUNS, 1, BLOCK_K]), [RUNS, RUN_TOKENS, BLOCK_K])
    for t in tl.static_range(1, RUN_TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
        # A thread holds whole runs, so this selects registers and costs nothing.
        tile = tl.where(in_run == t, tl.reshape(rows[t], [RUNS, 1, BLOCK_K]), tile)
    return tl.reshape(tile, [RUNS * RUN_TOKENS, BLOCK_K])


@device_function
def each_token(first, second, third, fourth):
    """Interleave four [runs], one for each token of a run, to [T, 1]."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # [runs, 2, 2]
    return tl.reshape(pairs, [first.shape[0] * RUN_TOKENS])[:, None]


@device_function
def products(queries, keys, dtype: tl.constexpr):
    """Products of queries, and of keys, with all keys, [T, T] each, from four [runs, K] each."""
    BLOCK_T: tl.constexpr = keys[0].shape[0] * RUN_TOKENS
    q = ()
    k = ()
    for t in tl.static_range(RUN_TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
        q += (rounded(queries[t], dtype),)
        k += (rounded(keys[t], dtype),)
    of_queries = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    of_keys = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    k = interleaved(k)
    left = interleaved(q)
    # A left operand that a loop carries is in shared memory. Each other one would take the
    # registers of a tile.
    for _ in range(2):
        of_queries = of_keys
        of_keys = matmul(left, tl.trans(k))
        left = k
    return of_queries, of_keys


@device_function
def of_neighbours(values, WIDTH: tl.constexpr):
    """Exchange the two halves of each group of 2 * WIDTH rows of f32[M, N]."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    PAIRS: tl.constexpr = ROWS // (2 * WIDTH)
    pairs = tl.reshape(values, [PAIRS, 2, WIDTH, COLUMNS])
    if INTERPRETED:
        is_first = tl.arange(0, 2)[None, :, None, None] == 0
        first = tl.sum(tl.where(is_first, pairs, 0.0), 1, keep_dims=True)
        second = tl.sum(tl.where(is_first, 0.0, pairs), 1, keep_dims=True)
        pairs = tl.where(is_first, second, first)
    else:
        bits = pairs.to(tl.int32, bitcast=True)
        pairs = (bits ^ tl.xor_sum(bits, 1, keep_dims=True)).to(tl.float32, bitcast=True)
    return tl.reshape(pairs, [ROWS, COLUMNS])


@device_function
def products_of_runs(scores, lower, q, since_k, until_k, whole, dtype: tl.constexpr):
    """Extend products within each run to those of all runs; also sum `whole` over runs.

    The sums are over the runs before each, over those after it, and over all. Queries include the
    decay from their run's start. Keys are given with that decay, and with the one until its end.
    """
    BLOCK_T: tl.constexpr = scores.shape[0]
    runs = tl.arange(0, BLOCK_T // RUN_TOKENS)[:, None]
    # Tokens i and j are in neighbouring blocks as wide as the greatest power of two in i ^ j.
    apart = tl.arange(0, BLOCK_T)[:, None] ^ tl.arange(0, BLOCK_T)[None, :]
    # Logarithms of the decay of each block of runs, and within the block, of the runs before and
    # after each run. All are sums of numbers of one sign, so none is cancelled by another.
    before = tl.zeros_like(whole)
    after = tl.zeros_like(whole)
    for doubling in tl.static_range(2, 6):  # pyright: ignore[reportGeneralTypeIssues]
        if (1 << doubling) < BLOCK_T:
            is_later = (runs >> (doubling - 2)) % 2 == 1
            later = is_later.to(tl.float32)
            decay = tl.exp2(tl.where(is_later, before, after))  # 1 for neighbouring runs
            queries = ()
            keys = ()
            for t in tl.static_range(RUN_TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
                queries += (q[t] * decay,)
                keys += (tl.where(is_later, since_k[t], until_k[t]) * decay,)
            of_queries, of_keys = products(queries, keys, dtype)
            is_pair = apart >> doubling != 0
            scores = tl.where(is_pair, of_queries, scores)
            lower = tl.where(is_pair, of_keys, lower)
            other = of_neighbours(whole, 1 << (doubling - 2))
            before += other * later
            after += other * (1.0 - later)
            whole += other
    return scores, lower, before, after, whole


class ChannelsTiles(NamedTuple):
    """Tiles and flags for which `delta_chunks_channels_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    IS_NORMALIZED: bool
    PRECISION: str
    BLOCK_T: int
    BLOCK_K: int
    IS_OVERLAPPED: bool


# Counts differ from step to step and must not cause another compilation.
@with_groups(chunks=Chunks, inputs=ChunkInputs, tiles=ChannelsTiles)
@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def delta_chunks_channels_kernel(
    # Outputs
    chunks,
    # Inputs
    inputs,
    query_starts_ptr,  # i32[num_requests + 1]
    state_slots_ptr,  # i32[num_requests]
    checkpoint_starts_ptr,  # i32[num_requests + 1]
    checkpoint_after_ptr,  # i32[num_checkpoints]
    # Scalars
    scale,
    # Sizes
    num_requests,
    num_tokens,
    # Strides, in elements
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_gates_token: tl.int64,
    stride_gates_head: tl.int64,
    stride_betas_token: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Prepare chunk b of head h for the scan over chunks, in program (h, b)."""
    PRECISION: tl.constexpr = tiles.PRECISION
    k_ptr = inputs.k_ptr
    dt_bias_ptr = inputs.dt_bias_ptr
    let_next_begin(tiles.IS_OVERLAPPED)
    head = tl.program_id(0).to(tl.int64)
    request, first, end = find_chunk(
        query_starts_ptr,
        checkpoint_starts_ptr,
        checkpoint_after_ptr,
        num_requests,
        tl.program_id(1),
        tiles.BLOCK_T,
    )
    if first >= end:
        return
    if tl.load(state_slots_ptr + request * stride_slots) <= 0:
        return
    tile = tl.arange(0, tiles.BLOCK_T)
    runs = tl.arange(0, tiles.BLOCK_T // RUN_TOKENS)[:, None]
    ks = tl.arange(0, tiles.BLOCK_K)[None, :]
    is_k = ks < tiles.HEAD_K_DIM
    group = head // tiles.HEADS_PER_GROUP
    dtype = k_ptr.dtype.element_ty

    rate = None
    bias = None
    if inputs.A_log_ptr is not None:
        rate = rate_log2(tl.load(inputs.A_log_ptr + head).to(tl.float32))
        if dt_bias_ptr is not None:
            dt_bias_ptr += head * stride_dt_bias_head + ks
            bias = tl.load(dt_bias_ptr, mask=is_k, other=0.0).to(tl.float32)  # [1, K]
    run_starts = first + runs * RUN_TOKENS  # [runs, 1]
    # The start of the chunk is one number. Offsets of results within it are constants, which take
    # no registers of a thread.
    first = first.to(tl.int64)
    gates_ptr = inputs.gates_ptr + (first * stride_gates_token + head * stride_gates_head + ks)
    gates_ptr += runs * (RUN_TOKENS * stride_gates_token)
    q_ptr = inputs.q_ptr + (first * stride_q_token + group * stride_q_head + ks)
    q_ptr += runs * (RUN_TOKENS * stride_q_token)
    k_ptr += first * stride_k_token + group * stride_k_head + ks
    k_ptr += runs * (RUN_TOKENS * stride_k_token)
    gates = load_run(gates_ptr, stride_gates_token, run_starts, end, is_k)
    q = load_run(q_ptr, stride_q_token, run_starts, end, is_k)
    k = load_run(k_ptr, stride_k_token, run_starts, end, is_k)
    logs = (
        decay_before(gates[0], run_starts, end, rate, bias),
        decay_before(gates[1], run_starts + 1, end, rate, bias),
        decay_before(gates[2], run_starts + 2, end, rate, bias),
        decay_before(gates[3], run_starts + 3, end, rate, bias),
    )
    decays = (tl.exp2(logs[0]), tl.exp2(logs[1]), tl.exp2(logs[2]), tl.exp2(logs[3]))
    q = (
        scaled(q[0], scale, tiles.IS_NORMALIZED),
        scaled(q[1], scale, tiles.IS_NORMALIZED),
        scaled(q[2], scale, tiles.IS_NORMALIZED),
        scaled(q[3], scale, tiles.IS_NORMALIZED),
    )
    k = (
        scaled(k[0], 1.0, tiles.IS_NORMALIZED),
        scaled(k[1], 1.0, tiles.IS_NORMALIZED),
        scaled(k[2], 1.0, tiles.IS_NORMALIZED),
        scaled(k[3], 1.0, tiles.IS_NORMALIZED),
    )

    # Products of queries and keys with the keys of earlier tokens, pair of blocks by pair of
    # blocks. Either factor includes the decay between its token and the boundary of the two blocks.
    # That is at most 1, so nothing overflows, however strong the decay.
    # First, all pairs of a run, except the fourth token with the third, whose boundary differs.
    last_two = decays[2] * decays[3]
    scores, lower = products(
        (q[0], q[1], q[2] * decays[2], q[3] * last_two),
        (k[0] * decays[1], k[1], k[2] * decays[2], k[3] * last_two),
        dtype,
    )
    diagonal = each_token(
        row_sums(q[0] * k[0]), row_sums(q[1] * k[1]), row_sums(q[2] * k[2]), row_sums(q[3] * k[3])
    )
    third = k[2] * decays[3]
    beside_q = row_sums(q[3] * third)  # [runs]
    beside_k = row_sums(k[3] * third)

    # From here on, a run is one block, with the decay from its start or until its end.
    first_two = decays[0] * decays[1]
    first_three = first_two * decays[2]
    last_three = decays[1] * last_two
    q = (q[0] * decays[0], q[1] * first_two, q[2] * first_three, q[3] * (first_two * last_two))
    since_k = (
        k[0] * decays[0],
        k[1] * first_two,
        k[2] * first_three,
        k[3] * (first_two * last_two),
    )
    until_k = (k[0] * last_three, k[1] * last_two, k[2] * decays[3], k[3])

    whole = (logs[0] + logs[1]) + (logs[2] + logs[3])  # [runs, K]
    scores, lower, before, after, whole = products_of_runs(
        scores, lower, q, since_k, until_k, whole, dtype
    )

    in_head = head * num_tokens + first
    in_tile = runs * (RUN_TOKENS * tiles.BLOCK_K) + ks
    queries_ptr = chunks.queries_ptr + in_head * tiles.BLOCK_K
    keys_ptr = chunks.keys_ptr + in_head * tiles.BLOCK_K
    kept_keys_ptr = chunks.kept_keys_ptr + in_head * tiles.BLOCK_K
    since_start = tl.exp2(before)
    until_end = tl.exp2(after)
    for t in tl.static_range(RUN_TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
        live = run_starts + t < end
        at = in_tile + t * tiles.BLOCK_K
        tl.store(queries_ptr + at, rounded(q[t] * since_start, dtype), mask=live)
        tl.store(keys_ptr + at, rounded(since_k[t] * since_start, dtype), mask=live)
        tl.store(kept_keys_ptr + at, rounded(until_k[t] * until_end, dtype), mask=live)
    # All runs have the same decay.
    decay_ptr = (
        chunks.decays_ptr + (head * tl.num_programs(1) + tl.program_id(1)) * tiles.BLOCK_K + ks
    )
    tl.store(decay_ptr + runs * 0, tl.exp2(whole), mask=runs == 0)

    live = tile < end - first
    betas_ptr = inputs.betas_ptr + (first * stride_betas_token + head)
    betas = tl.load(betas_ptr + tile * stride_betas_token, mask=live, other=0.0).to(tl.float32)
    if inputs.A_log_ptr is not None:
        betas = sigmoid(betas)
    in_square = tile[:, None] * tiles.BLOCK_T + tile[None, :]
    scores = tl.where(tile[:, None] > tile[None, :], scores, 0.0)
    scores = tl.where(tile[:, None] == tile[None, :], diagonal, scores)
    is_beside = (tile[:, None] % RUN_TOKENS == RUN_TOKENS - 1) & (
        tile[:, None] == tile[None, :] + 1
    )
    beside = each_token(beside_q, beside_q, beside_q, beside_q)
    scores = tl.where(is_beside, beside, scores)
    beside = each_token(beside_k, beside_k, beside_k, beside_k)
    lower = tl.where(is_beside, beside, lower)
    tl.store(
        chunks.scores_ptr + in_head * tiles.BLOCK_T + in_square,
        rounded(scores, dtype),
        mask=live[:, None],
    )
    lower = tl.where(tile[:, None] > tile[None, :], lower * betas[:, None], 0.0)
    solution = unit_triangular_inverse(lower, tiles.BLOCK_T, PRECISION) * betas[None, :]
    solution_ptr = chunks.solution_ptr + in_head * tiles.BLOCK_T
    tl.store(solution_ptr + in_square, rounded(solution, dtype), mask=live[:, None])
