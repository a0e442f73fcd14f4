"""Clearing of whole pages of an arena."""

import torch
import triton

from jenga_kernels.checks.tensors import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import launch, with_reference
from jenga_kernels.pages.page_copy import check_whole_pages
from jenga_kernels.reference.pages import page_clear as reference
from jenga_kernels.triton.lib.tiles import machine_of, page_tiles
from jenga_kernels.triton.pages.page_copy import page_clear_kernel


@with_reference(reference.page_clear)
def page_clear(pages: torch.Tensor, page_ids: torch.Tensor) -> None:
    """Set every byte of some pages to zero.

    Args:
        pages: Pages, written in place, [num_pages, page_elements] of any dtype; a view of an arena.
            Pages begin at multiples of 16 bytes and hold multiples of 16 bytes.
        page_ids: Pages to clear, i64[num_cleared]; negative entries are skipped.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    words = check_whole_pages(pages)
    check_shape("page_ids", page_ids, (None,))
    check_dtype("page_ids", page_ids, (torch.int64,))
    check_contiguous("page_ids", page_ids)
    check_same_device(pages=pages, page_ids=page_ids)
    if page_ids.numel() == 0 or words.shape[1] == 0:
        return
    tiles = page_tiles(machine_of(pages.device))
    launch(
        page_clear_kernel,
        (triton.cdiv(words.shape[1], tiles.block_rows) * page_ids.numel(),),
        pages.device,
        words_ptr=words,
        page_ids_ptr=page_ids,
        num_words=words.shape[1],
        stride_page=words.stride(0),
        BLOCK_WORDS=tiles.block_rows,
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
    )
