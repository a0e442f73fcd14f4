"""Restoring the tokens of quantised pages to 16 bits, in other pages."""

import math
from typing import NamedTuple

import torch

from jenga_kernels.checks.pages import (
    NO_SCALES,
    SlotScales,
    check_pages,
    check_scales,
    check_slot_scales,
)
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    QUANTISED_DTYPES,
    check_apart,
    check_contiguous,
    check_dtype,
    check_no_gradients,
    check_rows,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.plans.attention_plan import check_page_table
from jenga_kernels.reference.attention import dequantise_pages as reference
from jenga_kernels.triton.attention.dequantise_pages import RUN_FIELDS, dequantise_pages_kernel
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import copy_tiles, machine_of, power_of_two

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `dequantise_pages`, in the same order."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    page_runs: torch.Tensor
    k_out: torch.Tensor
    v_out: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_slot_scales: torch.Tensor | None
    v_slot_scales: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.dequantise_pages)
def dequantise_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    page_runs: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_slot_scales: torch.Tensor | None = None,
    v_slot_scales: torch.Tensor | None = None,
) -> None:
    """Restore keys and values of quantised pages, and write them to pages of another element type.

    Each output page gets a run of tokens of one request. Token t of the request goes to slot
    t % out_page_tokens. Other slots are not written, and no other token is read. Elements are
    scaled in float32 and rounded once.

    The contents of page_table and page_runs are on the device and are not checked. A run must lie
    within one output page, and page_table must name pages of the cache for all its tokens. Outputs
    must not overlap the cache.

    Args:
        k_pages: Keys, [num_pages, page_tokens, num_kv_heads, head_dim], float8_e4m3fn, float8_e5m2
            or int8. With uint8 the shape is [.., head_dim // 2], and each item holds two elements
            of four bits. Strides may be any multiples of 16 bytes; the last dimension is
            contiguous.
        v_pages: Values, as k_pages with value_dim elements, dtype and strides of k_pages.
        page_table: Page tables of the requests, i32[num_requests, max_pages].
        page_runs: Run of tokens of each of the first output pages, i32[num_runs, 3], contiguous:
            the request, the first token, and one past the last. A request below 0, or an end that
            is not after the first token, means that nothing is written to the page.
        k_out: Restored keys, written in place, [num_out_pages, out_page_tokens, num_kv_heads,
            head_dim], bfloat16, float16 or float32, with at least num_runs pages. Strides may be
            any multiples of 16 bytes; the last dimension is contiguous, and no two elements share
            memory.
        v_out: Restored values, written in place, as k_out with value_dim elements, dtype and
            strides of k_out; must not overlap it.
        k_scale: Factor of the stored keys, f32[1] or f32[num_kv_heads]; only with float8 pages.
        v_scale: Factor of the stored values, as k_scale.
        k_slot_scales: Factor of the key of each slot and head, as in `paged_attention`.
        v_slot_scales: As k_slot_scales, for values; strides of k_slot_scales.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit, or a gradient is
            required.
    """
    given = (
        k_pages,
        v_pages,
        page_table,
        page_runs,
        k_out,
        v_out,
        k_scale,
        v_scale,
        k_slot_scales,
        v_slot_scales,
    )
    call = call_like(_calls, *given)
    is_first = call.launches is None
    if is_first:
        _check(_Arguments(*given))
    if k_out.data_ptr() == v_out.data_ptr() and k_out.numel():
        msg = "v_out must not be k_out"
        raise ValueError(msg)
    slot_scales = NO_SCALES
    if k_slot_scales is not None:
        slot_scales = check_slot_scales(k_pages, k_slot_scales, v_slot_scales, k_scale, v_scale)
    if is_first:
        call.launches = _launches(_Arguments(*given), slot_scales)
    tensors = dict(zip(_POINTERS, given, strict=True))
    tensors |= {"k_slot_scales_ptr": slot_scales.k, "v_slot_scales_ptr": slot_scales.v}
    call.run(tensors)


def _check(given: _Arguments) -> None:
    """Check everything that follows from the signature of a call.

    Raises:
        ValueError: If something does not fit.
    """
    check_shape("k_out", given.k_out, (None, None, None, None))
    num_kv_heads, head_dim = given.k_out.shape[2:]
    check_shape("v_out", given.v_out, (*given.k_out.shape[:3], None))
    check_dtype("k_out", given.k_out, FLOAT_DTYPES)
    check_dtype("v_out", given.v_out, (given.k_out.dtype,))
    for name, out in (("k_out", given.k_out), ("v_out", given.v_out)):
        check_rows(name, out)
        check_apart(name, out)
    if strides(given.k_out)[:3] != strides(given.v_out)[:3]:
        msg = (
            f"v_out must have the strides of k_out, {given.k_out.stride()}, got "
            f"{given.v_out.stride()}"
        )
        raise ValueError(msg)
    check_shape("k_pages", given.k_pages, (None, None, None, None))
    check_dtype("k_pages", given.k_pages, QUANTISED_DTYPES)
    check_pages(
        given.k_pages,
        given.v_pages,
        num_kv_heads,
        head_dim,
        given.k_out.dtype,
        value_dim=given.v_out.shape[3],
    )
    check_scales(given.k_pages, given.k_scale, given.v_scale, num_kv_heads)
    check_slot_scales(
        given.k_pages, given.k_slot_scales, given.v_slot_scales, given.k_scale, given.v_scale
    )
    check_page_table(given.page_table)
    check_shape("page_runs", given.page_runs, (None, RUN_FIELDS))
    check_dtype("page_runs", given.page_runs, (torch.int32,))
    check_contiguous("page_runs", given.page_runs)
    if given.page_runs.shape[0] > given.k_out.shape[0]:
        msg = (
            f"page_runs must have at most {given.k_out.shape[0]} rows, the pages of k_out, "
            f"got {given.page_runs.shape[0]}"
        )
        raise ValueError(msg)
    check_same_device(**given._asdict())
    check_no_gradients(
        k_pages=given.k_pages, v_pages=given.v_pages, k_out=given.k_out, v_out=given.v_out
    )


def _launches(given: _Arguments, slot_scales: SlotScales) -> list[Launch]:
    """List the launches that restore the runs of a call."""
    num_runs = given.page_runs.shape[0]
    if (
        num_runs == 0
        or given.k_out.numel() + given.v_out.numel() == 0
        or given.page_table.numel() == 0
    ):
        return []
    _, out_page_tokens, num_kv_heads, head_dim = given.k_out.shape
    value_dim = given.v_out.shape[3]
    tiles = copy_tiles(machine_of(given.k_out.device), max(head_dim, value_dim))
    # Tiles do not straddle output pages.
    block_tokens = math.gcd(out_page_tokens, tiles.block_rows)
    stride_out_page, stride_out_slot, stride_out_head, _ = strides(given.k_out)
    stride_page, stride_slot, stride_head, _ = strides(given.k_pages)
    constants = {
        "stride_out_page": stride_out_page,
        "stride_out_slot": stride_out_slot,
        "stride_out_head": stride_out_head,
        "stride_pages_page": stride_page,
        "stride_pages_slot": stride_slot,
        "stride_pages_head": stride_head,
        "stride_scales_page": slot_scales.strides[0],
        "stride_scales_slot": slot_scales.strides[1],
        "stride_scales_head": slot_scales.strides[2],
        "stride_table_request": given.page_table.stride(0),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "PAGE_TOKENS": given.k_pages.shape[1],
        "OUT_PAGE_TOKENS": out_page_tokens,
        "IS_PER_HEAD_K": given.k_scale is not None and given.k_scale.numel() > 1,
        "IS_PER_HEAD_V": given.v_scale is not None and given.v_scale.numel() > 1,
        "BLOCK_T": block_tokens,
        "BLOCK_D": power_of_two(head_dim),
        "BLOCK_V": power_of_two(value_dim),
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
    }
    grid = (num_runs * (out_page_tokens // block_tokens), num_kv_heads)
    return [Launch(kernel=dequantise_pages_kernel, grid=grid, constants=constants)]
