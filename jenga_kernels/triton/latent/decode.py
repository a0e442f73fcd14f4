"""Latent attention of requests with few query tokens: their keys are split over programs."""

import triton
import triton.language as tl

from jenga_kernels.triton.attention.plan import next_run
from jenga_kernels.triton.attention.tile import end_visible
from jenga_kernels.triton.latent.tile import attend_latents
from jenga_kernels.triton.lib.device import ceil_div, let_next_begin
from jenga_kernels.triton.lib.rows import store_rows


# Counts differ from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["num_requests"])
def latent_decode_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_heads, latent_dim], contiguous
    lse_ptr,  # f32[num_tokens, num_heads] or None
    partial_out_ptr,  # f32[num_partials, QUERY_TOKENS * GROUP, latent_dim]
    partial_lse_ptr,  # f32[num_partials, QUERY_TOKENS * GROUP]
    # Inputs
    q_ptr,  # [num_tokens, num_heads, latent_dim + rotary_dim]
    pages_ptr,  # [num_pages, page_tokens, latent_dim + rotary_dim]
    page_table_ptr,  # i32[num_requests, max_pages]
    query_starts_ptr,  # i32[num_requests + 1]
    seq_lens_ptr,  # i32[num_requests]
    unit_starts_ptr,  # i32[num_requests + 1]
    units_per_program_ptr,  # i32[1]
    first_requests_ptr,  # i32[num_programs]
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
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):
    """Do units from p * units_per_program on of all (request, head group) pairs in program p.

    Units and partial results are those of `attention.decode`. SLOT_STRIDE is stride_pages_slot if
    the kernel is compiled for it, else None.
    """
    NUM_HEADS: tl.constexpr = NUM_GROUPS * GROUP
    PARTIAL_ROWS: tl.constexpr = QUERY_TOKENS * GROUP
    stride_slot = stride_pages_slot
    if SLOT_STRIDE is not None:
        stride_slot = SLOT_STRIDE
    let_next_begin(IS_OVERLAPPED)
    program = tl.program_id(0)
    units_per_program = tl.load(units_per_program_ptr)
    unit = program * units_per_program
    program_end = tl.minimum(
        unit + units_per_program, tl.load(unit_starts_ptr + num_requests) * NUM_GROUPS
    )
    request = tl.load(first_requests_ptr + program)
    while unit < program_end:
        request, group, tile_start, tile_end, units_done, num_units, partial = next_run(
            program,
            unit,
            program_end,
            units_per_program,
            request,
            query_starts_ptr,
            seq_lens_ptr,
            unit_starts_ptr,
            None,
            None,
            NUM_GROUPS,
            PAGE_TOKENS,
            IS_INVARIANT,
            BLOCK_N,
        )
        unit += units_done
        is_whole = units_done == num_units
        query_start = tl.load(query_starts_ptr + request)
        query_len = tl.load(query_starts_ptr + request + 1) - query_start
        seq_len = tl.load(seq_lens_ptr + request)
        rows = tl.arange(0, BLOCK_M)
        live = rows < query_len * GROUP
        row_tokens = rows // GROUP
        heads = rows - row_tokens * GROUP + group * GROUP  # i32[BLOCK_M]
        tokens = row_tokens + query_start  # i32[BLOCK_M]
        row_ends = end_visible(row_tokens + (seq_len - query_len), seq_len, IS_CAUSAL)
        out, lse = attend_latents(
            q_ptr,
            pages_ptr,
            page_table_ptr + request.to(tl.int64) * stride_table_request,
            latent_scale_ptr,
            tokens,
            heads,
            live,
            row_ends,
            tile_start,
            # A request without keys also has one unit, which reads no page.
            tl.minimum(tile_end, ceil_div(seq_len, BLOCK_N)),
            seq_len,
            scale,
            stride_q_token,
            stride_q_head,
            stride_pages_page,
            stride_slot,
            LATENT_DIM,
            ROTARY_DIM,
            PAGE_TOKENS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_LATENT,
            BLOCK_ROTARY,
        )
        # Indices of result rows fit into 32 bits; offsets of their elements do not.
        if is_whole:
            out_rows = tokens * NUM_HEADS + heads
            offsets = out_rows.to(tl.int64) * LATENT_DIM
            store_rows(out_ptr, offsets, out, live, LATENT_DIM, BLOCK_LATENT)
            if lse_ptr is not None:
                tl.store(lse_ptr + out_rows, lse, mask=live)
        else:
            partial_rows = partial * PARTIAL_ROWS + rows
            offsets = partial_rows.to(tl.int64) * LATENT_DIM
            store_rows(partial_out_ptr, offsets, out, live, LATENT_DIM, BLOCK_LATENT)
            tl.store(partial_lse_ptr + partial_rows, lse, mask=live)
