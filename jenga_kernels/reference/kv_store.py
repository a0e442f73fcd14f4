"""Reference of `jenga_kernels.kv_store`."""

import torch

from jenga_kernels.checks import FP8_DTYPE


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Copy each token's key and value into its slot; see the operation for the arguments."""
    page_tokens = k_pages.shape[1]
    for new, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                pages[slot // page_tokens, slot % page_tokens] = stored(new[token], pages, scale)


def stored(row: torch.Tensor, pages: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A token's heads as they are kept, [num_kv_heads, head_dim]."""
    if pages.dtype != FP8_DTYPE:
        return row
    values = row.float()
    if scale is not None:
        values = values / scale[:, None]
    limit = torch.finfo(FP8_DTYPE).max
    # What is not a number loses its sign, as on a GPU.
    values = values.clamp(-limit, limit).where(~values.isnan(), torch.nan)
    return values.to(FP8_DTYPE)
