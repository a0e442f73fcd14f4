"""Reference of `jenga_kernels.kv_store`."""

import torch

from jenga_kernels.checks.tensors import INT4_DTYPE, SCALED_DTYPES


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
            elif pages.dtype == INT4_DTYPE:
                pages[place], slot_scales[place] = quantised_int4(new[token])
            else:
                pages[place], slot_scales[place] = quantised(new[token], pages.dtype)


def stored(row: torch.Tensor, pages: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A token's heads as they are kept, [num_kv_heads, head_dim]."""
    if pages.dtype not in SCALED_DTYPES:
        return row
    values = row.float()
    if scale is not None:
        values = values / scale[:, None]
    limit = torch.finfo(pages.dtype).max
    # What is not a number loses its sign, as on a GPU.
    values = values.clamp(-limit, limit).where(~values.isnan(), torch.nan)
    return values.to(pages.dtype)


def quantised(row: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's heads in `dtype`, and what each must be multiplied with, f32[num_kv_heads]."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    values = row.float()
    greatest = values.abs().amax(-1)
    is_scaled = (greatest >= 2.0**-100) & greatest.isfinite()
    # By tensors, not by numbers: torch would multiply with the reciprocal.
    mosts = torch.full_like(greatest, most)
    factor = mosts / greatest.where(is_scaled, 1.0)
    values = values.where(is_scaled[:, None], 0.0) * factor[:, None]
    values = values.round() if dtype == torch.int8 else values.clamp(-most, most)
    return values.to(dtype), (greatest / mosts).where(greatest.isfinite(), torch.nan)


def quantised_int4(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's heads in four bits, u8[num_kv_heads, head_dim // 2], and bf16[num_kv_heads, 2]."""
    values = row.float()
    is_finite = values.isfinite().all(-1)
    values = values.where(is_finite[:, None], 0.0)
    least = values.amin(-1).bfloat16() + 0.0  # one zero only
    extent = values.amax(-1) - least.float()
    is_finite &= extent.isfinite()
    is_scaled = is_finite & (extent >= 2.0**-100)
    most = torch.full_like(extent, 15.0)
    step = (extent / most).bfloat16().where(is_scaled, 0.0)
    factor = torch.ones_like(extent) / step.float().where(is_scaled, 1.0)
    values = (values - least.float()[:, None]).where(is_scaled[:, None], 0.0)
    elements = (values * factor[:, None]).clamp(0.0, 15.0).round().to(torch.uint8)
    step = step.where(is_finite, torch.nan)
    return elements[:, ::2] | (elements[:, 1::2] << 4), torch.stack([step, least], -1)
