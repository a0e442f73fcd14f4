"""Kernel of `jenga_kernels.attention_merge`."""

import triton
import triton.language as tl

from jenga_kernels.triton.attention.tile import LOG2_E, element_mask


# Counts differ from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["num_rows"])
def attention_merge_kernel(
    # Outputs
    out_ptr,  # [num_rows, head_dim], contiguous
    lse_ptr,  # f32[num_rows] or None
    # Inputs
    first_out_ptr,  # [num_rows, head_dim], contiguous
    first_lse_ptr,  # f32[num_rows]
    second_out_ptr,  # [num_rows, head_dim], contiguous
    second_lse_ptr,  # f32[num_rows]
    # Sizes
    num_rows,
    # Tiles and flags
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge rows from p * BLOCK_ROWS on in program p; a row is one head of one token."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < num_rows
    first_lse = tl.load(first_lse_ptr + rows, mask=live, other=0.0)  # f32[BLOCK_ROWS]
    second_lse = tl.load(second_lse_ptr + rows, mask=live, other=0.0)  # f32[BLOCK_ROWS]
    largest = tl.maximum(first_lse, second_lse)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    first_weight = tl.exp2((first_lse - shift) * LOG2_E)
    second_weight = tl.exp2((second_lse - shift) * LOG2_E)
    total = first_weight + second_weight
    divisor = tl.where(total == 0.0, 1.0, total)

    offsets = rows[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    mask = element_mask(live, HEAD_DIM, BLOCK_D)
    # Results over no keys may hold NaN, and 0 * NaN is NaN.
    has_first = element_mask(live & (first_lse != float("-inf")), HEAD_DIM, BLOCK_D)
    has_second = element_mask(live & (second_lse != float("-inf")), HEAD_DIM, BLOCK_D)
    first = tl.load(first_out_ptr + offsets, mask=has_first, other=0.0).to(tl.float32)
    second = tl.load(second_out_ptr + offsets, mask=has_second, other=0.0).to(tl.float32)
    out = first * (first_weight / divisor)[:, None] + second * (second_weight / divisor)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        # All warps must have read both inputs before one writes, because lse may be one of them.
        tl.debug_barrier()
        joined = tl.where(total == 0.0, float("-inf"), shift + tl.log(divisor))
        tl.store(lse_ptr + rows, joined, mask=live)
