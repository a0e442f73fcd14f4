"""Reference of `jenga_kernels.latent_store`."""

import torch

from jenga_kernels.checks.tensors import FP8_DTYPE
from jenga_kernels.reference.attention.kv_store import as_bytes, places


def latent_store(
    latents: torch.Tensor,
    rotary_keys: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    latent_scale: torch.Tensor | None = None,
) -> None:
    """Copy each token's latent and rotary key into its slot; see the operation."""
    rows = torch.cat([latents, rotary_keys], 1)
    if pages.dtype == FP8_DTYPE:
        values = rows.float() if latent_scale is None else rows.float() / latent_scale
        limit = torch.finfo(FP8_DTYPE).max
        # NaN loses its sign, as on a GPU.
        rows = values.clamp(-limit, limit).where(~values.isnan(), torch.nan).to(FP8_DTYPE)
    is_kept = slots >= 0
    pages_and_slots = places(slots[is_kept], pages.shape[1])
    as_bytes(pages)[pages_and_slots] = as_bytes(rows[is_kept].to(pages.dtype))
