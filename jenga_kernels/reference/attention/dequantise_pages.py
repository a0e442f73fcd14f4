"""Reference of `jenga_kernels.dequantise_pages`."""

import torch

from jenga_kernels.reference.attention.paged_attention import gathered


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
    """Restore each run of tokens into its page; see the operation for the arguments.

    Elements are scaled in float32 and rounded once.
    """
    sides = ((k_pages, k_out, k_scale, k_slot_scales), (v_pages, v_out, v_scale, v_slot_scales))
    for page, (request, start, end) in enumerate(page_runs.tolist()):
        if request < 0 or start >= end:
            continue
        tokens = torch.arange(start, end, device=k_pages.device)
        for pages, out, scale, slot_scales in sides:
            rows = gathered(
                pages,
                page_table[request],
                tokens,
                scale,
                torch.float32,
                slot_scales=slot_scales,
            )
            out[page, tokens % out.shape[1]] = rows.to(out.dtype)
