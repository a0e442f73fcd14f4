"""Copies of whole pages within an arena."""

import torch
import triton

from jenga_kernels.checks.tensors import (
    ALIGNMENT_BYTES,
    check_apart,
    check_contiguous,
    check_dtype,
    check_no_gradients,
    check_rows,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import launch, with_reference
from jenga_kernels.reference.pages import page_copy as reference
from jenga_kernels.triton.lib.tiles import machine_of, page_tiles
from jenga_kernels.triton.pages.page_copy import page_copy_kernel

NO_PAGE = -1
"""Page id that marks an entry to skip."""


@with_reference(reference.page_copy)
def page_copy(pages: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy the bytes of some pages to others.

    Pages are copied in any order, so no target may be a source or another target. Entries with a
    negative id on either side (`NO_PAGE`) are skipped.

    Args:
        pages: Pages, written in place, [num_pages, page_elements] of any dtype; a view of an arena.
            Pages begin at multiples of 16 bytes and hold multiples of 16 bytes.
        source_ids: Pages to read, i64[num_copies].
        target_ids: Pages to write, i64[num_copies].

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    words = check_whole_pages(pages)
    check_shape("source_ids", source_ids, (None,))
    check_shape("target_ids", target_ids, source_ids.shape)
    for name, page_ids in (("source_ids", source_ids), ("target_ids", target_ids)):
        check_dtype(name, page_ids, (torch.int64,))
        check_contiguous(name, page_ids)
    check_same_device(pages=pages, source_ids=source_ids, target_ids=target_ids)
    num_copies = source_ids.numel()
    if num_copies == 0 or words.shape[1] == 0:
        return
    tiles = page_tiles(machine_of(pages.device))
    launch(
        page_copy_kernel,
        (triton.cdiv(words.shape[1], tiles.block_rows) * num_copies,),
        pages.device,
        words_ptr=words,
        source_ids_ptr=source_ids,
        target_ids_ptr=target_ids,
        num_words=words.shape[1],
        stride_page=words.stride(0),
        BLOCK_WORDS=tiles.block_rows,
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
    )


def check_whole_pages(pages: torch.Tensor) -> torch.Tensor:
    """Check pages that are handled as bytes; return them as i32[num_pages, num_words].

    Raises:
        ValueError: If shape, stride or alignment does not fit.
    """
    check_shape("pages", pages, (None, None))
    check_rows("pages", pages)
    page_bytes = pages.shape[1] * pages.element_size()
    if page_bytes % ALIGNMENT_BYTES:
        msg = f"pages must hold multiples of {ALIGNMENT_BYTES} bytes, got {page_bytes}"
        raise ValueError(msg)
    check_apart("pages", pages)
    check_no_gradients(pages=pages)
    # A single page may have any stride, even one that is not a multiple of a word.
    return pages[0].view(torch.int32)[None] if pages.shape[0] == 1 else pages.view(torch.int32)
