"""Kernels of `jenga_kernels.page_copy` and `jenga_kernels.page_clear`."""

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import ceil_div


# Ids are often a row of a matrix, aligned in one call and unaligned in the next.
@triton.jit(do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr"])
def page_copy_kernel(
    words_ptr,  # i32[num_pages, num_words], read and written
    source_ids_ptr,  # i64[num_copies]
    target_ids_ptr,  # i64[num_copies]
    num_words,
    stride_page: tl.int64,
    BLOCK_WORDS: tl.constexpr,
):
    """Copy pages: programs from c * blocks on copy the blocks of words of copy c."""
    blocks = ceil_div(num_words, BLOCK_WORDS)
    copy = tl.program_id(0) // blocks
    source = tl.load(source_ids_ptr + copy)
    target = tl.load(target_ids_ptr + copy)
    if (source >= 0) & (target >= 0):
        words = tl.program_id(0) % blocks * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        mask = words < num_words
        values = tl.load(words_ptr + page_offsets(source, stride_page) + words, mask=mask)
        tl.store(words_ptr + page_offsets(target, stride_page) + words, values, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["page_ids_ptr"])
def page_clear_kernel(
    words_ptr,  # i32[num_pages, num_words], written
    page_ids_ptr,  # i64[num_cleared]
    num_words,
    stride_page: tl.int64,
    BLOCK_WORDS: tl.constexpr,
):
    """Clear pages: programs from c * blocks on clear the blocks of words of page c of the list."""
    blocks = ceil_div(num_words, BLOCK_WORDS)
    page = tl.load(page_ids_ptr + tl.program_id(0) // blocks)
    if page >= 0:
        words = tl.program_id(0) % blocks * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        zeros = tl.full([BLOCK_WORDS], 0, tl.int32)
        tl.store(words_ptr + page_offsets(page, stride_page) + words, zeros, mask=words < num_words)
