"""First kernel of `jenga_kernels.delta_scan` with one decay for each head: chunks, in parallel."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta.groups import ChunkInputs, Chunks
from jenga_kernels.triton.delta.rule import (
    decay_log2,
    find_chunk,
    rate_log2,
    sigmoid,
    unit_factors,
    unit_triangular_inverse,
)
from jenga_kernels.triton.lib.device import let_next_begin, rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import matmul


class HeadsTiles(NamedTuple):
    """Tiles and flags for which `delta_chunks_heads_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    IS_NORMALIZED: bool
    PRECISION: str
    BLOCK_T: int
    BLOCK_K: int
    IS_OVERLAPPED: bool


# Counts differ from step to step and must not cause another compilation.
@with_groups(chunks=Chunks, inputs=ChunkInputs, tiles=HeadsTiles)
@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def delta_chunks_heads_kernel(
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
    stride_gates_head: tl.int64,  # noqa: ARG001 - 1
    stride_betas_token: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Prepare chunk b of head h for the scan over chunks, in program (h, b)."""
    PRECISION: tl.constexpr = tiles.PRECISION
    k_ptr = inputs.k_ptr
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
    ks = tl.arange(0, tiles.BLOCK_K)[None, :]
    live = tile < end - first
    rows = live[:, None]
    group = head // tiles.HEADS_PER_GROUP
    dtype = k_ptr.dtype.element_ty
    # The start of the chunk is one number. Offsets within it have constant strides, which take no
    # registers of a thread.
    first = first.to(tl.int64)
    in_head = head * num_tokens + first
    in_group = group * num_tokens + first

    rate = None
    bias = None
    if inputs.A_log_ptr is not None:
        rate = rate_log2(tl.load(inputs.A_log_ptr + head).to(tl.float32))
        if inputs.dt_bias_ptr is not None:
            bias = tl.load(inputs.dt_bias_ptr + head * stride_dt_bias_head).to(tl.float32)
    gates_ptr = inputs.gates_ptr + (first * stride_gates_token + head)
    betas_ptr = inputs.betas_ptr + (first * stride_betas_token + head)
    gates = tl.load(gates_ptr + tile * stride_gates_token, mask=live, other=0.0)
    betas = tl.load(betas_ptr + tile * stride_betas_token, mask=live, other=0.0).to(tl.float32)
    if inputs.A_log_ptr is not None:
        betas = sigmoid(betas)
    # Logarithms to base two of the decay from the chunk's start through each token. Their
    # differences must be accurate after any amount of decay.
    decays = tl.where(live, decay_log2(gates.to(tl.float32), rate, bias), 0.0)
    decays = tl.cumsum(decays.to(tl.float64) if dtype == tl.float32 else decays, 0)
    # With a condition on sums over tokens, betas are loaded once, and passed to the threads that
    # need them. Otherwise, each thread would load and compute those of all its columns, and keep
    # them.
    betas = tl.where(decays <= 0.0, betas, 0.0)
    total = tl.sum(tl.where(tile == tiles.BLOCK_T - 1, decays, 0.0), 0)
    left = total - decays
    tl.store(chunks.since_start_ptr + in_head + tile, tl.exp2(decays.to(tl.float32)), mask=live)
    tl.store(chunks.until_end_ptr + in_head + tile, tl.exp2(left.to(tl.float32)), mask=live)
    decay_ptr = chunks.decays_ptr + head * tl.num_programs(1) + tl.program_id(1)
    tl.store(decay_ptr, tl.exp2(total.to(tl.float32)))

    in_rows = rows & (ks < tiles.HEAD_K_DIM)
    q_ptr = inputs.q_ptr + (first * stride_q_token + group * stride_q_head + ks)
    k_ptr += first * stride_k_token + group * stride_k_head + ks
    q = tl.load(q_ptr + tile[:, None] * stride_q_token, mask=in_rows, other=0.0)  # [T, K]
    k = tl.load(k_ptr + tile[:, None] * stride_k_token, mask=in_rows, other=0.0)  # [T, K]
    if tiles.IS_NORMALIZED:
        scale *= unit_factors(q)[:, None]  # [T, 1]
        k = rounded(k.to(tl.float32) * unit_factors(k)[:, None], dtype)
    q = rounded(q.to(tl.float32) * scale, dtype)
    if head % tiles.HEADS_PER_GROUP == 0:
        in_tile = tile[:, None] * tiles.BLOCK_K + ks
        tl.store(chunks.queries_ptr + in_group * tiles.BLOCK_K + in_tile, q, mask=rows)
        tl.store(chunks.keys_ptr + in_group * tiles.BLOCK_K + in_tile, k, mask=rows)

    is_past = tile[:, None] >= tile[None, :]
    exponent = (decays[:, None] - decays[None, :]).to(tl.float32)
    between = tl.exp2(tl.where(is_past, exponent, float("-inf")))  # [T, T]
    in_square = tile[:, None] * tiles.BLOCK_T + tile[None, :]
    scores = matmul(q, tl.trans(k)) * between
    tl.store(
        chunks.scores_ptr + in_head * tiles.BLOCK_T + in_square, rounded(scores, dtype), mask=rows
    )

    # Each token's change of the state subtracts the parts that earlier changes of the chunk hold
    # under its key. This is a unit triangular system for all changes at once.
    lower = matmul(k, tl.trans(k)) * between * betas[:, None]
    solution = unit_triangular_inverse(lower, tiles.BLOCK_T, PRECISION) * betas[None, :]
    tl.store(
        chunks.solution_ptr + in_head * tiles.BLOCK_T + in_square,
        rounded(solution, dtype),
        mask=rows,
    )
