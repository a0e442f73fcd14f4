"""Kernel of `jenga_kernels.pack_slots`."""

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import slot_offsets
from jenga_kernels.triton.lib.device import device_function
from jenga_kernels.triton.lib.rows import load_rows, store_rows


@device_function
def _arena_slots(page_table_ptr, slots, live, PAGE_TOKENS: tl.constexpr):
    """Slots of the arena of a request's slots, i64[BLOCK_ROWS]."""
    page_ids = tl.load(page_table_ptr + slots // PAGE_TOKENS, mask=live, other=0)
    return page_ids.to(tl.int64) * PAGE_TOKENS + slots % PAGE_TOKENS


# Counts differ from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["max_kept"])
def pack_slots_kernel(
    # Outputs
    k_pages_ptr,  # [num_pages, page_tokens, num_kv_heads, head_dim]
    v_pages_ptr,  # [num_pages, page_tokens, num_kv_heads, value_dim]
    # Inputs
    page_table_ptr,  # i32[num_requests, max_pages]
    sources_ptr,  # i32[num_requests, num_kv_heads, max_kept], contiguous
    num_kept_ptr,  # i32[num_requests]
    seq_lens_ptr,  # i32[num_requests]
    # Sizes
    max_kept,
    # Strides, in elements
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_pages_head: tl.int64,
    stride_table_request: tl.int64,
    # Tiles and flags
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (h, r) moves the tokens that KV head h of request r keeps, the last ones first."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    num_kept = tl.load(num_kept_ptr + request)
    first_target = tl.load(seq_lens_ptr + request) - num_kept
    table_ptr = page_table_ptr + request * stride_table_request
    own_sources_ptr = sources_ptr + (request * NUM_KV_HEADS + head) * max_kept
    num_tiles = tl.cdiv(num_kept, BLOCK_ROWS)
    for number in range(num_tiles):
        rows = (num_tiles - 1 - number) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = rows < num_kept
        sources = tl.load(own_sources_ptr + rows, mask=live, other=0)
        targets = first_target + rows
        live &= sources != targets
        from_slots = _arena_slots(table_ptr, sources, live, PAGE_TOKENS)
        to_slots = _arena_slots(table_ptr, targets, live, PAGE_TOKENS)
        in_head = head * stride_pages_head
        from_slots = slot_offsets(from_slots, stride_pages_page, stride_pages_slot, PAGE_TOKENS)
        to_slots = slot_offsets(to_slots, stride_pages_page, stride_pages_slot, PAGE_TOKENS)
        k = load_rows(k_pages_ptr, from_slots + in_head, live, HEAD_DIM, BLOCK_D)
        v = load_rows(v_pages_ptr, from_slots + in_head, live, VALUE_DIM, BLOCK_V)
        # A slot may be the source of one token and the target of another in the same tile. Tiles
        # that follow read only slots before the targets of this one.
        tl.debug_barrier()
        store_rows(k_pages_ptr, to_slots + in_head, k, live, HEAD_DIM, BLOCK_D)
        store_rows(v_pages_ptr, to_slots + in_head, v, live, VALUE_DIM, BLOCK_V)
