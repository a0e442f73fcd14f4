"""Latent attention of requests with few query tokens: their keys are split over programs."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.attention.groups import DecodeWork, Partials, Requests, Results
from jenga_kernels.triton.attention.plan import next_run
from jenga_kernels.triton.attention.tile import end_visible
from jenga_kernels.triton.latent.tile import attend_latents
from jenga_kernels.triton.lib.device import ceil_div, let_next_begin
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.rows import store_rows


class DecodeTiles(NamedTuple):
    """Tiles and flags for which `latent_decode_kernel` is compiled."""

    NUM_GROUPS: int
    GROUP: int
    LATENT_DIM: int
    ROTARY_DIM: int
    PAGE_TOKENS: int
    SLOT_STRIDE: int | None
    QUERY_TOKENS: int
    IS_CAUSAL: bool
    IS_INVARIANT: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_LATENT: int
    BLOCK_ROTARY: int
    IS_OVERLAPPED: bool


# Counts differ from step to step and must not cause another compilation.
@with_groups(
    results=Results, partials=Partials, requests=Requests, work=DecodeWork, tiles=DecodeTiles
)
@triton.jit(do_not_specialize=["num_requests"])
def latent_decode_kernel(
    # Outputs
    results,
    partials,
    # Inputs
    q_ptr,  # [num_tokens, num_heads, latent_dim + rotary_dim]
    pages_ptr,  # [num_pages, page_tokens, latent_dim + rotary_dim]
    requests,
    work,
    latent_scale_ptr,  # f32[1] or None
    # Scalars
    scale,
    # Sizes
    num_requests,
    # Strides, in elements
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_table_request: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Do units from p * units_per_program on of all (request, head group) pairs in program p.

    Units and partial results are those of `attention.decode`. SLOT_STRIDE is stride_pages_slot if
    the kernel is compiled for it, else None.
    """
    NUM_HEADS: tl.constexpr = tiles.NUM_GROUPS * tiles.GROUP
    PARTIAL_ROWS: tl.constexpr = tiles.QUERY_TOKENS * tiles.GROUP
    stride_slot = stride_pages_slot
    if tiles.SLOT_STRIDE is not None:
        stride_slot = tiles.SLOT_STRIDE
    let_next_begin(tiles.IS_OVERLAPPED)
    program = tl.program_id(0)
    units_per_program = tl.load(work.units_per_program_ptr)
    unit = program * units_per_program
    program_end = tl.minimum(
        unit + units_per_program, tl.load(work.unit_starts_ptr + num_requests) * tiles.NUM_GROUPS
    )
    request = tl.load(work.first_requests_ptr + program)
    while unit < program_end:
        request, group, tile_start, tile_end, units_done, num_units, partial = next_run(
            program,
            unit,
            program_end,
            units_per_program,
            request,
            requests.query_starts_ptr,
            requests.seq_lens_ptr,
            work.unit_starts_ptr,
            None,
            None,
            tiles.NUM_GROUPS,
            tiles.PAGE_TOKENS,
            tiles.IS_INVARIANT,
            tiles.BLOCK_N,
        )
        unit += units_done
        is_whole = units_done == num_units
        query_start = tl.load(requests.query_starts_ptr + request)
        query_len = tl.load(requests.query_starts_ptr + request + 1) - query_start
        seq_len = tl.load(requests.seq_lens_ptr + request)
        rows = tl.arange(0, tiles.BLOCK_M)
        live = rows < query_len * tiles.GROUP
        row_tokens = rows // tiles.GROUP
        heads = rows - row_tokens * tiles.GROUP + group * tiles.GROUP  # i32[BLOCK_M]
        tokens = row_tokens + query_start  # i32[BLOCK_M]
        row_ends = end_visible(row_tokens + (seq_len - query_len), seq_len, tiles.IS_CAUSAL)
        out, lse = attend_latents(
            q_ptr,
            pages_ptr,
            requests.page_table_ptr + request.to(tl.int64) * stride_table_request,
            latent_scale_ptr,
            tokens,
            heads,
            live,
            row_ends,
            tile_start,
            # A request without keys also has one unit, which reads no page.
            tl.minimum(tile_end, ceil_div(seq_len, tiles.BLOCK_N)),
            seq_len,
            scale,
            stride_q_token,
            stride_q_head,
            stride_pages_page,
            stride_slot,
            tiles.LATENT_DIM,
            tiles.ROTARY_DIM,
            tiles.PAGE_TOKENS,
            tiles.BLOCK_M,
            tiles.BLOCK_N,
            tiles.BLOCK_LATENT,
            tiles.BLOCK_ROTARY,
        )
        # Indices of result rows fit into 32 bits; offsets of their elements do not.
        if is_whole:
            out_rows = tokens * NUM_HEADS + heads
            offsets = out_rows.to(tl.int64) * tiles.LATENT_DIM
            store_rows(results.out_ptr, offsets, out, live, tiles.LATENT_DIM, tiles.BLOCK_LATENT)
            if results.lse_ptr is not None:
                tl.store(results.lse_ptr + out_rows, lse, mask=live)
        else:
            partial_rows = partial * PARTIAL_ROWS + rows
            offsets = partial_rows.to(tl.int64) * tiles.LATENT_DIM
            store_rows(
                partials.partial_out_ptr, offsets, out, live, tiles.LATENT_DIM, tiles.BLOCK_LATENT
            )
            tl.store(partials.partial_lse_ptr + partial_rows, lse, mask=live)
