"""Reference of `jenga_kernels.page_copy`."""

import torch


def page_copy(pages: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy the bytes of some pages to others; see the operation for the arguments."""
    for source, target in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        if source >= 0 and target >= 0:
            pages[target] = pages[source]
