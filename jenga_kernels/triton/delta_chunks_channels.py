"""First kernel of `jenga_kernels.delta_scan` where every key channel decays on its own."""

import triton
import triton.language as tl

from jenga_kernels.triton.delta_rule import (
    decay_log2,
    find_chunk,
    rounded,
    sigmoid,
    unit_factors,
    unit_triangular_inverse,
)
from jenga_kernels.triton.device import device_function
from jenga_kernels.triton.matmul import matmul
from jenga_kernels.triton.recurrence import LOG2E, row_sums


@device_function
def neighbour_products(q, k, decays, width, dtype: tl.constexpr, BLOCK_T: tl.constexpr):
    """Products of q and k in odd blocks of `width` rows with k in the even blocks before them.

    Each channel decays from row to row; `decays` has the logarithms of that up to each row. Either
    factor has the decay between its row and the boundary of the two blocks, which is never above 1,
    so that nothing overflows however strong the decay.
    """
    row = tl.arange(0, BLOCK_T)[:, None]
    column = tl.arange(0, BLOCK_T)[None, :]
    is_pair = (row // (2 * width) == column // (2 * width)) & (row // width > column // width)
    boundary = row // (2 * width) * (2 * width) + width - 1
    boundary = tl.broadcast_to(boundary, decays.shape)
    since = (decays - tl.gather(decays, boundary, 0)).to(tl.float32)
    earlier = tl.trans(rounded(k * tl.exp2(tl.minimum(-since, 0.0)), dtype))
    since = tl.exp2(tl.minimum(since, 0.0))
    of_queries = tl.where(is_pair, matmul(rounded(q * since, dtype), earlier), 0.0)
    of_keys = tl.where(is_pair, matmul(rounded(k * since, dtype), earlier), 0.0)
    return of_queries, of_keys


# Counts differ from step to step and must not compile anew.
@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def delta_chunks_channels_kernel(
    # Outputs
    queries_ptr,  # [num_v_heads, num_tokens, BLOCK_K]
    keys_ptr,  # [num_v_heads, num_tokens, BLOCK_K]
    kept_keys_ptr,  # [num_v_heads, num_tokens, BLOCK_K]
    scores_ptr,  # [num_v_heads, num_tokens, BLOCK_T]
    solution_ptr,  # [num_v_heads, num_tokens, BLOCK_T]
    since_start_ptr,  # None  # noqa: ARG001 - the parameters of the kernel for heads
    until_end_ptr,  # None  # noqa: ARG001 - the parameters of the kernel for heads
    decays_ptr,  # f32[num_v_heads, num_chunks, BLOCK_K]
    # Inputs
    q_ptr,  # [num_tokens, num_qk_heads, head_k_dim]
    k_ptr,  # [num_tokens, num_qk_heads, head_k_dim]
    gates_ptr,  # [num_tokens, num_v_heads, head_k_dim]
    betas_ptr,  # [num_tokens, num_v_heads]
    A_log_ptr,  # [num_v_heads]
    dt_bias_ptr,  # [num_v_heads, head_k_dim]
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
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_K_DIM: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (h, b) prepares chunk b of head h for the walk over chunks."""
    head = tl.program_id(0).to(tl.int64)
    request, first, end = find_chunk(
        query_starts_ptr,
        checkpoint_starts_ptr,
        checkpoint_after_ptr,
        num_requests,
        tl.program_id(1),
        BLOCK_T,
    )
    if first >= end:
        return
    if tl.load(state_slots_ptr + request * stride_slots) <= 0:
        return
    tile = tl.arange(0, BLOCK_T)
    ks = tl.arange(0, BLOCK_K)[None, :]
    tokens = (first + tile).to(tl.int64)
    live = tokens < end
    rows = live[:, None]
    is_k = ks < HEAD_K_DIM
    group = head // HEADS_PER_GROUP
    dtype = k_ptr.dtype.element_ty

    rate = None
    bias = None
    if A_log_ptr is not None:
        rate = tl.exp2(tl.load(A_log_ptr + head).to(tl.float32) * LOG2E)
        if dt_bias_ptr is not None:
            dt_bias_ptr += head * stride_dt_bias_head + ks
            bias = tl.load(dt_bias_ptr, mask=is_k, other=0.0).to(tl.float32)  # [1, K]
    betas = tl.load(betas_ptr + tokens * stride_betas_token + head, mask=live, other=0.0)
    betas = betas.to(tl.float32)
    if A_log_ptr is not None:
        betas = sigmoid(betas)
    # Logarithms to base two of the decay from the chunk's start through each token.
    in_rows = rows & is_k
    gates_ptr += head * stride_gates_head + ks
    gates = tl.load(gates_ptr + tokens[:, None] * stride_gates_token, mask=in_rows, other=0.0)
    decays = tl.where(in_rows, decay_log2(gates.to(tl.float32), rate, bias), 0.0)
    decays = tl.cumsum(decays.to(tl.float64) if dtype == tl.float32 else decays, 0)  # [T, K]
    total = tl.sum(tl.where(tile[:, None] == BLOCK_T - 1, decays, 0.0), 0)[None, :]

    q_ptr += group * stride_q_head + ks
    k_ptr += group * stride_k_head + ks
    q = tl.load(q_ptr + tokens[:, None] * stride_q_token, mask=in_rows, other=0.0)
    k = tl.load(k_ptr + tokens[:, None] * stride_k_token, mask=in_rows, other=0.0)
    q = q.to(tl.float32)  # [T, K]
    k = k.to(tl.float32)  # [T, K]
    if IS_NORMALIZED:
        scale *= unit_factors(q)[:, None]  # [T, 1]
        k *= unit_factors(k)[:, None]
    q *= scale

    in_head = head * num_tokens + tokens
    in_keys = in_head[:, None] * BLOCK_K + ks
    since_start = tl.exp2(decays.to(tl.float32))
    tl.store(queries_ptr + in_keys, rounded(q * since_start, dtype), mask=rows)
    tl.store(keys_ptr + in_keys, rounded(k * since_start, dtype), mask=rows)
    until_end = tl.exp2((total - decays).to(tl.float32))
    tl.store(kept_keys_ptr + in_keys, rounded(k * until_end, dtype), mask=rows)
    decay_ptr = decays_ptr + (head * tl.num_programs(1) + tl.program_id(1)) * BLOCK_K
    tl.store(decay_ptr + ks, tl.exp2(total.to(tl.float32)))

    # How queries and keys meet the keys of earlier tokens, pair of blocks by pair of blocks.
    column = tile[None, :]
    scores = tl.where(tile[:, None] == column, row_sums(q * k)[:, None], 0.0)  # [T, T]
    lower = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    width = 1
    while width < BLOCK_T:
        of_queries, of_keys = neighbour_products(q, k, decays, width, dtype, BLOCK_T)
        scores += of_queries
        lower += of_keys
        width *= 2

    columns = in_head[:, None] * BLOCK_T + column
    tl.store(scores_ptr + columns, rounded(scores, dtype), mask=rows)
    lower *= betas[:, None]
    solution = unit_triangular_inverse(lower, BLOCK_T, PRECISION) * betas[None, :]
    tl.store(solution_ptr + columns, rounded(solution, dtype), mask=rows)
