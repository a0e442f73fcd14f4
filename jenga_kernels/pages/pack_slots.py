"""Moving the kept tokens of a request to its last slots."""

import torch

from jenga_kernels.checks.pages import check_pages
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_apart,
    check_contiguous,
    check_dtype,
    check_no_gradients,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import launch, with_reference
from jenga_kernels.plans.attention_plan import check_page_table
from jenga_kernels.reference.pages import pack_slots as reference
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import copy_tiles, machine_of, power_of_two
from jenga_kernels.triton.pages.pack_slots import pack_slots_kernel


@with_reference(reference.pack_slots)
def pack_slots(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    sources: torch.Tensor,
    num_kept: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Move the keys and values of each request's kept tokens to its last slots, in their order.

    Every KV head keeps tokens of its own. Kept token j of n goes to slot seq_len - n + j of the
    request. No token moves to an earlier slot, so the move is done in place. Slots before
    seq_len - n may hold anything afterwards.

    The contents of the tensors of integers are not checked, because they are on the device. Pages
    of different requests must differ.

    Args:
        k_pages: Keys, written in place, [num_pages, page_tokens, num_kv_heads, head_dim], bfloat16,
            float16 or float32. Strides may be any multiples of 16 bytes; the last dimension is
            contiguous, and no two elements share memory.
        v_pages: Values, written in place, as k_pages with value_dim elements, dtype and strides of
            k_pages; must not overlap it.
        page_table: Page tables of the requests, i32[num_requests, max_pages].
        sources: Slots of each request's kept tokens, ascending, i32[num_requests, num_kv_heads,
            max_kept], contiguous. Entries past num_kept are not read.
        num_kept: Number of tokens that every head of a request keeps, i32[num_requests].
        seq_lens: Number of tokens of each request, i32[num_requests].

    Raises:
        ValueError: If a shape, dtype, stride or device does not fit, or a gradient is required.
    """
    check_shape("k_pages", k_pages, (None, None, None, None))
    check_shape("v_pages", v_pages, (None, None, None, None))
    check_dtype("k_pages", k_pages, FLOAT_DTYPES)
    num_kv_heads, head_dim = k_pages.shape[2:]
    value_dim = v_pages.shape[3]
    page_tokens = check_pages(
        k_pages, v_pages, num_kv_heads, head_dim, k_pages.dtype, value_dim=value_dim
    )
    check_apart("k_pages", k_pages)
    check_apart("v_pages", v_pages)
    num_requests = check_page_table(page_table)
    check_shape("sources", sources, (num_requests, num_kv_heads, None))
    for name, tensor in (("num_kept", num_kept), ("seq_lens", seq_lens)):
        check_shape(name, tensor, (num_requests,))
    for name, tensor in (("sources", sources), ("num_kept", num_kept), ("seq_lens", seq_lens)):
        check_dtype(name, tensor, (torch.int32,))
        check_contiguous(name, tensor)
    check_same_device(
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        sources=sources,
        num_kept=num_kept,
        seq_lens=seq_lens,
    )
    check_no_gradients(k_pages=k_pages, v_pages=v_pages)
    if sources.numel() == 0:
        return
    widest = max(head_dim, value_dim)
    tiles = copy_tiles(machine_of(k_pages.device), widest)
    stride_page, stride_slot, stride_head, _ = strides(k_pages)
    launch(
        pack_slots_kernel,
        (num_kv_heads, num_requests),
        k_pages.device,
        k_pages_ptr=k_pages,
        v_pages_ptr=v_pages,
        page_table_ptr=page_table,
        sources_ptr=sources,
        num_kept_ptr=num_kept,
        seq_lens_ptr=seq_lens,
        max_kept=sources.shape[2],
        stride_pages_page=stride_page,
        stride_pages_slot=stride_slot,
        stride_pages_head=stride_head,
        stride_table_request=page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        PAGE_TOKENS=page_tokens,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_D=power_of_two(head_dim),
        BLOCK_V=power_of_two(value_dim),
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
    )
