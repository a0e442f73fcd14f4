"""Reference of `jenga_kernels.page_clear`."""

import torch


def page_clear(pages: torch.Tensor, page_ids: torch.Tensor) -> None:
    """Set every byte of some pages to zero; see the operation for the arguments."""
    for page_id in page_ids.tolist():
        if page_id >= 0:
            pages[page_id] = 0
