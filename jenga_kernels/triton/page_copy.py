"""Kernels of `jenga_kernels.page_copy` and `jenga_kernels.page_clear`."""

import triton
import triton.language as tl

from jenga_kernels.triton.addressing import page_offsets


@triton.jit
def page_copy_kernel(
    words_ptr,  # i32[num_pages, num_words], read and written
    source_ids_ptr,  # i64[num_copies]
    target_ids_ptr,  # i64[num_copies]
    num_words,
    stride_page: tl.int64,
    BLOCK_WORDS: tl.constexpr,
):
    """Program (b, c) copies block b of words of copy c."""
    source = tl.load(source_ids_ptr + tl.program_id(1))
    target = tl.load(target_ids_ptr + tl.program_id(1))
    if (source >= 0) & (target >= 0):
        words = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        mask = words < num_words
        values = tl.load(words_ptr + page_offsets(source, stride_page) + words, mask=mask)
        tl.store(words_ptr + page_offsets(target, stride_page) + words, values, mask=mask)


@triton.jit
def page_clear_kernel(
    words_ptr,  # i32[num_pages, num_words], written
    page_ids_ptr,  # i64[num_cleared]
    num_words,
    stride_page: tl.int64,
    BLOCK_WORDS: tl.constexpr,
):
    """Program (b, c) zeroes block b of words of page c of the list."""
    page = tl.load(page_ids_ptr + tl.program_id(1))
    if page >= 0:
        words = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        zeros = tl.full([BLOCK_WORDS], 0, tl.int32)
        tl.store(words_ptr + page_offsets(page, stride_page) + words, zeros, mask=words < num_words)
