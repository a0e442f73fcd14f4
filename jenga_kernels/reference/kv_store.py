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
    k_slot_scales: torch.Tensor | None = None,
    v_slot_scales: torch.Tensor | None = None,
) -> None:
    """Copy each token's key and value into its slot; see the operation for the arguments."""
    page_tokens = k_pages.shape[1]
    sides = ((k, k_pages, k_scale, k_slot_scales), (v, v_pages, v_scale, v_slot_scales))
    for new, pages, scale, slot_scales in sides:
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            place = (slot // page_tokens, slot % page_tokens)
            if slot_scales is None:
                pages[place] = stored(new[token], pages, scale)
            else:
                pages[place], slot_scales[place] = quantised(new[token], pages.dtype)


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


def quantised(row: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's heads in `dtype`, and what each must be multiplied with, f32[num_kv_heads]."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    values = row.float()
    greatest = values.abs().amax(-1)
    is_scaled = (greatest >= 2.0**-100) & greatest.isfinite()
    # Not a number by a tensor: torch would multiply with the reciprocal.
    factor = torch.full_like(greatest, most) / greatest.where(is_scaled, 1.0)
    values = values.where(is_scaled[:, None], 0.0) * factor[:, None]
    values = values.round() if dtype == torch.int8 else values.clamp(-most, most)
    return values.to(dtype), (greatest / most).where(greatest.isfinite(), torch.nan)
