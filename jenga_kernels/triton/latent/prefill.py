"""Latent attention of requests with many query tokens: a tile of rows loops over all its keys."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.attention.groups import Requests, Results, RowWork
from jenga_kernels.triton.attention.tile import end_visible
from jenga_kernels.triton.latent.tile import attend_latents
from jenga_kernels.triton.lib.device import ceil_div
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.rows import store_rows


class PrefillTiles(NamedTuple):
    """Tiles and flags for which `latent_prefill_kernel` is compiled."""

    NUM_GROUPS: int
    GROUP: int
    LATENT_DIM: int
    ROTARY_DIM: int
    PAGE_TOKENS: int
    IS_CAUSAL: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_LATENT: int
    BLOCK_ROTARY: int


@with_groups(results=Results, requests=Requests, row_work=RowWork, tiles=PrefillTiles)
@triton.jit
def latent_prefill_kernel(
    # Outputs
    results,
    # Inputs
    q_ptr,  # [num_tokens, num_heads, latent_dim + rotary_dim]
    pages_ptr,  # [num_pages, page_tokens, latent_dim + rotary_dim]
    requests,
    row_work,
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
    tiles: tl.constexpr,
):
    """Compute row tile p // NUM_GROUPS of the list for head group p % NUM_GROUPS in program p.

    Groups of the same tokens follow each other, because they read the same latents.
    """
    NUM_HEADS: tl.constexpr = tiles.NUM_GROUPS * tiles.GROUP
    row_tile = tl.program_id(0) // tiles.NUM_GROUPS
    group = tl.program_id(0) % tiles.NUM_GROUPS
    request = tl.load(row_work.row_tile_requests_ptr + row_tile)
    if request < 0:
        return
    row_start = tl.load(row_work.row_tile_indices_ptr + row_tile) * tiles.BLOCK_M
    query_start = tl.load(requests.query_starts_ptr + request)
    query_len = tl.load(requests.query_starts_ptr + request + 1) - query_start
    seq_len = tl.load(requests.seq_lens_ptr + request)

    rows = row_start + tl.arange(0, tiles.BLOCK_M)
    live = rows < query_len * tiles.GROUP
    # Rows past the end repeat the last one, so that they widen no range of keys.
    tokens_in_request = tl.minimum(rows // tiles.GROUP, query_len - 1)
    heads = group * tiles.GROUP + rows % tiles.GROUP  # i32[BLOCK_M]
    tokens = query_start + tokens_in_request  # i32[BLOCK_M]
    row_ends = end_visible(seq_len - query_len + tokens_in_request, seq_len, tiles.IS_CAUSAL)
    keys_end = tl.maximum(tl.max(row_ends, 0), 0)
    out, lse = attend_latents(
        q_ptr,
        pages_ptr,
        requests.page_table_ptr + request.to(tl.int64) * stride_table_request,
        latent_scale_ptr,
        tokens,
        heads,
        live,
        row_ends,
        0,
        ceil_div(keys_end, tiles.BLOCK_N),
        keys_end,
        scale,
        stride_q_token,
        stride_q_head,
        stride_pages_page,
        stride_pages_slot,
        tiles.LATENT_DIM,
        tiles.ROTARY_DIM,
        tiles.PAGE_TOKENS,
        tiles.BLOCK_M,
        tiles.BLOCK_N,
        tiles.BLOCK_LATENT,
        tiles.BLOCK_ROTARY,
    )
    # The loop needs all registers, so the indices of the rows are computed again.
    rows = tl.load(
        row_work.row_tile_indices_ptr + row_tile, volatile=True
    ) * tiles.BLOCK_M + tl.arange(0, tiles.BLOCK_M)
    live = rows < query_len * tiles.GROUP
    tokens = query_start + tl.minimum(rows // tiles.GROUP, query_len - 1)
    heads = group * tiles.GROUP + rows % tiles.GROUP  # i32[BLOCK_M]
    # Indices of result rows fit into 32 bits; offsets of their elements do not.
    out_rows = tokens * NUM_HEADS + heads
    offsets = out_rows.to(tl.int64) * tiles.LATENT_DIM
    store_rows(results.out_ptr, offsets, out, live, tiles.LATENT_DIM, tiles.BLOCK_LATENT)
    if results.lse_ptr is not None:
        tl.store(results.lse_ptr + out_rows, lse, mask=live)
