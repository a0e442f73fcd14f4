"""Reference of `jenga_kernels.attention_merge`."""

import torch


def attention_merge(
    first_out: torch.Tensor,
    first_lse: torch.Tensor,
    second_out: torch.Tensor,
    second_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join the results of the same queries over two sets of keys; see the operation."""
    out = torch.empty_like(first_out) if out is None else out
    joined = torch.logaddexp(first_lse, second_lse)
    first_weight = torch.exp(first_lse - joined).nan_to_num(0.0)[:, :, None]
    second_weight = torch.exp(second_lse - joined).nan_to_num(0.0)[:, :, None]
    dtype = torch.promote_types(first_out.dtype, torch.float32)
    out.copy_(first_out.to(dtype) * first_weight + second_out.to(dtype) * second_weight)
    if lse is not None:
        lse.copy_(joined)
    return out
