"""Latent attention of requests with many query tokens: a tile of rows loops over all its keys."""

import triton
import triton.language as tl

from jenga_kernels.triton.attention.tile import end_visible
from jenga_kernels.triton.latent.tile import attend_latents
from jenga_kernels.triton.lib.device import ceil_div
from jenga_kernels.triton.lib.rows import store_rows


@triton.jit
def latent_prefill_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, latent_dim], contiguous
    lse_ptr,  # f32[num_tokens, num_heads] or None
    # Inputs
    q_ptr,  # [num_tokens, num_heads, latent_dim + rotary_dim]
    pages_ptr,  # [num_pages, page_tokens, latent_dim + rotary_dim]
    page_table_ptr,  # i32[num_requests, max_pages]
    query_starts_ptr,  # i32[num_requests + 1]
    seq_lens_ptr,  # i32[num_requests]
    row_tile_requests_ptr,  # i32[max_row_tiles]
    row_tile_indices_ptr,  # i32[max_row_tiles]
    latent_scale_ptr,  # f32[1] or None
    # Scalars
    scale,
    # Strides, in elements
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_table_request: tl.int64,
    # Tiles and flags
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
):
    """Compute row tile p // NUM_GROUPS of the list for head group p % NUM_GROUPS in program p.

    Groups of the same tokens follow each other, because they read the same latents.
    """
    NUM_HEADS: tl.constexpr = NUM_GROUPS * GROUP
    row_tile = tl.program_id(0) // NUM_GROUPS
    group = tl.program_id(0) % NUM_GROUPS
    request = tl.load(row_tile_requests_ptr + row_tile)
    if request < 0:
        return
    row_start = tl.load(row_tile_indices_ptr + row_tile) * BLOCK_M
    query_start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)

    rows = row_start + tl.arange(0, BLOCK_M)
    live = rows < query_len * GROUP
    # Rows past the end repeat the last one, so that they widen no range of keys.
    tokens_in_request = tl.minimum(rows // GROUP, query_len - 1)
    heads = group * GROUP + rows % GROUP  # i32[BLOCK_M]
    tokens = query_start + tokens_in_request  # i32[BLOCK_M]
    row_ends = end_visible(seq_len - query_len + tokens_in_request, seq_len, IS_CAUSAL)
    keys_end = tl.maximum(tl.max(row_ends, 0), 0)
    out, lse = attend_latents(
        q_ptr,
        pages_ptr,
        page_table_ptr + request.to(tl.int64) * stride_table_request,
        latent_scale_ptr,
        tokens,
        heads,
        live,
        row_ends,
        0,
        ceil_div(keys_end, BLOCK_N),
        keys_end,
        scale,
        stride_q_token,
        stride_q_head,
        stride_pages_page,
        stride_pages_slot,
        LATENT_DIM,
        ROTARY_DIM,
        PAGE_TOKENS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_LATENT,
        BLOCK_ROTARY,
    )
    # The loop needs all registers, so the indices of the rows are computed again.
    rows = tl.load(row_tile_indices_ptr + row_tile, volatile=True) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < query_len * GROUP
    tokens = query_start + tl.minimum(rows // GROUP, query_len - 1)
    heads = group * GROUP + rows % GROUP  # i32[BLOCK_M]
    # Indices of result rows fit into 32 bits; offsets of their elements do not.
    out_rows = tokens * NUM_HEADS + heads
    offsets = out_rows.to(tl.int64) * LATENT_DIM
    store_rows(out_ptr, offsets, out, live, LATENT_DIM, BLOCK_LATENT)
    if lse_ptr is not None:
        tl.store(lse_ptr + out_rows, lse, mask=live)
