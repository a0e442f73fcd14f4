"""Kernel of `jenga_kernels.token_scores`."""

import triton
import triton.language as tl

from jenga_kernels.triton.attention.tile import LOG2_E, row_offsets
from jenga_kernels.triton.lib.addressing import key_offsets
from jenga_kernels.triton.lib.matmul import matmul
from jenga_kernels.triton.lib.rows import load_rows
from jenga_kernels.triton.lib.softmax import soft_capped


# Counts differ from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["max_tokens"])
def token_scores_kernel(
    # Outputs
    out_ptr,  # f32[num_requests, num_kv_heads, max_tokens], contiguous
    # Inputs
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_pages_ptr,  # [num_pages, page_tokens, num_kv_heads, head_dim]
    page_table_ptr,  # i32[num_requests, max_pages]
    query_ends_ptr,  # i32[num_requests]
    seq_lens_ptr,  # i32[num_requests]
    num_queries_ptr,  # i32[num_requests]
    lse_ptr,  # f32[num_tokens, num_heads], contiguous
    # Scalars
    scale,
    soft_cap,  # or None
    # Sizes
    max_tokens,
    # Strides, in elements
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_pages_head: tl.int64,
    stride_table_request: tl.int64,
    # Tiles and flags
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (t, h, r) sums the weights of tile t of the keys of request r in KV head h."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_N], dtype=tl.float32)
    if tile * BLOCK_N < seq_len:
        in_pages, _ = key_offsets(
            page_table_ptr + request * stride_table_request,
            0,
            tile,
            seq_len,
            stride_pages_page,
            stride_pages_slot,
            PAGE_TOKENS,
            BLOCK_N,
            STARTS_PAGE=True,
            KEEPS_OFFSETS=False,
        )
        in_pages += head * stride_pages_head
        k = load_rows(k_pages_ptr, in_pages, keys < seq_len, HEAD_DIM, BLOCK_D)  # [N, D]
        num_queries = tl.load(num_queries_ptr + request)
        first_token = tl.load(query_ends_ptr + request) - num_queries
        for first_row in range(0, num_queries * GROUP, BLOCK_M):
            rows = first_row + tl.arange(0, BLOCK_M)
            live = rows < num_queries * GROUP
            queries = rows // GROUP
            heads = head * GROUP + rows % GROUP
            offsets = row_offsets(first_token + queries, heads, stride_q_token, stride_q_head)
            q = load_rows(q_ptr, offsets, live, HEAD_DIM, BLOCK_D)  # [M, D]
            in_lse = row_offsets(first_token + queries, heads, NUM_KV_HEADS * GROUP, 1)
            lse = tl.load(lse_ptr + in_lse, mask=live, other=0.0)  # f32[M]
            scores = matmul(q, tl.trans(k))  # f32[M, N]
            scores = scores * scale if soft_cap is None else soft_capped(scores, scale, soft_cap)
            weights = tl.exp2((scores - lse[:, None]) * LOG2_E)
            # A row reads the keys up to its own position.
            is_read = keys[None, :] <= (seq_len - num_queries + queries)[:, None]
            sums += tl.sum(tl.where(is_read & live[:, None], weights, 0.0), 0)
    in_out = (request * NUM_KV_HEADS + head) * max_tokens + keys
    tl.store(out_ptr + in_out, sums, mask=keys < max_tokens)
