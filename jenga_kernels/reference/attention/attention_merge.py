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
    """Merge the results of the same queries over two sets of keys; see the operation."""
    out = torch.empty_like(first_out) if out is None else out
    joined = torch.logaddexp(first_lse, second_lse)
    dtype = torch.promote_types(first_out.dtype, torch.float32)
    total = torch.zeros_like(first_out, dtype=dtype)
    for part, part_lse in ((first_out, first_lse), (second_out, second_lse)):
        weight = torch.exp(part_lse - joined)[:, :, None]
        # Rows without keys may hold anything.
        total += torch.where(part_lse[:, :, None].isneginf(), 0.0, part.to(dtype) * weight)
    out.copy_(total)
    if lse is not None:
        lse.copy_(joined)
    return out
