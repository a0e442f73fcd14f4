"""Merge of attention over two sets of keys."""

import torch
import triton

from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_contiguous,
    check_dtype,
    check_no_gradients,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import launch, with_reference
from jenga_kernels.reference.attention import attention_merge as reference
from jenga_kernels.triton.attention.merge import attention_merge_kernel
from jenga_kernels.triton.lib.tiles import copy_tiles, machine_of, power_of_two


@with_reference(reference.attention_merge)
def attention_merge(
    first_out: torch.Tensor,
    first_lse: torch.Tensor,
    second_out: torch.Tensor,
    second_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge the results of the same queries over two disjoint sets of keys.

    This serves a prefix that several requests share and read once, or keys on different ranks. A
    sink must count in only one of the two.

    Args:
        first_out: Results over the first keys, [num_tokens, num_heads, head_dim], contiguous.
        first_lse: Natural log-sum-exp of these results, f32[num_tokens, num_heads]. -inf means no
            keys; the result may then hold anything.
        second_out: Results over the second keys, shape and dtype of first_out, contiguous.
        second_lse: Log-sum-exp of these results, f32[num_tokens, num_heads].
        out: Merged results, written in place and returned, as first_out; may be first_out. None
            allocates them.
        lse: Log-sum-exp over all keys, written in place, f32[num_tokens, num_heads]; may be
            first_lse or second_lse.

    Returns:
        The results over all keys; zeros where there are none.

    Raises:
        ValueError: If a shape, dtype, stride or device does not fit, or a gradient is required.

    Source:
        FlashInfer (arXiv 2501.01005), section 2.2.
    """
    check_shape("first_out", first_out, (None, None, None))
    num_tokens, num_heads, head_dim = first_out.shape
    out = torch.empty_like(first_out) if out is None else out
    outs = {"first_out": first_out, "second_out": second_out, "out": out}
    lses = {"first_lse": first_lse, "second_lse": second_lse, "lse": lse}
    check_dtype("first_out", first_out, FLOAT_DTYPES)
    for name, tensor in outs.items():
        check_shape(name, tensor, first_out.shape)
        check_dtype(name, tensor, (first_out.dtype,))
        check_contiguous(name, tensor)
    for name, tensor in lses.items():
        if tensor is not None:
            check_shape(name, tensor, (num_tokens, num_heads))
            check_dtype(name, tensor, (torch.float32,))
            check_contiguous(name, tensor)
    check_same_device(**outs, **lses)
    check_no_gradients(**outs, **lses)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out
    tiles = copy_tiles(machine_of(out.device), head_dim)
    launch(
        attention_merge_kernel,
        (triton.cdiv(num_rows, tiles.block_rows),),
        out.device,
        out_ptr=out,
        lse_ptr=lse,
        first_out_ptr=first_out,
        first_lse_ptr=first_lse,
        second_out_ptr=second_out,
        second_lse_ptr=second_lse,
        num_rows=num_rows,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_D=power_of_two(head_dim),
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
    )
    return out
