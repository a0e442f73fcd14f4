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
    is_kept = slots >= 0
    pages_and_slots = places(slots[is_kept], k_pages.shape[1])
    sides = ((k, k_pages, k_scale, k_slot_scales), (v, v_pages, v_scale, v_slot_scales))
    for new, pages, scale, slot_scales in sides:
        rows = new[is_kept]
        if slot_scales is None:
            kept = stored(rows, pages.dtype, scale)
        elif pages.dtype == INT4_DTYPE:
            kept, slot_scales[pages_and_slots] = quantised_int4(rows)
        else:
            kept, slot_scales[pages_and_slots] = quantised(rows, pages.dtype)
        as_bytes(pages)[pages_and_slots] = as_bytes(kept)


def places(slots: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page of each slot, and its index within the page."""
    return slots // page_tokens, slots % page_tokens


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View elements of one byte as bytes, because not every version of torch indexes float8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def stored(rows: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Tokens' heads as they are stored, [num_tokens, num_kv_heads, head_dim]."""
    if dtype not in SCALED_DTYPES:
        return rows.to(dtype)
    values = rows.float()
    if scale is not None:
        values = values / scale[:, None]
    limit = torch.finfo(dtype).max
    # NaN loses its sign, as on a GPU.
    values = values.clamp(-limit, limit).where(~values.isnan(), torch.nan)
    return values.to(dtype)


def quantised(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens' heads in `dtype`, and the scale of each, f32[num_tokens, num_kv_heads]."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    values = rows.float()
    greatest = values.abs().amax(-1)
    is_scaled = (greatest >= 2.0**-100) & greatest.isfinite()
    # Divide by tensors, because torch would multiply with the reciprocal of a number.
    mosts = torch.full_like(greatest, most)
    factor = mosts / greatest.where(is_scaled, 1.0)
    values = values.where(is_scaled[..., None], 0.0) * factor[..., None]
    values = values.round() if dtype == torch.int8 else values.clamp(-most, most)
    return values.to(dtype), (greatest / mosts).where(greatest.isfinite(), torch.nan)


def quantised_int4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens' heads in four bits, and the step and the least element of each.

    Returns:
        u8[num_tokens, num_kv_heads, head_dim // 2] and bf16[num_tokens, num_kv_heads, 2].
    """
    values = rows.float()
    is_finite = values.isfinite().all(-1)
    values = values.where(is_finite[..., None], 0.0)
    least = values.amin(-1).bfloat16() + 0.0  # turns -0 into 0
    extent = values.amax(-1) - least.float()
    is_finite &= extent.isfinite()
    is_scaled = is_finite & (extent >= 2.0**-100)
    most = torch.full_like(extent, 15.0)
    step = (extent / most).bfloat16().where(is_scaled, 0.0)
    factor = torch.ones_like(extent) / step.float().where(is_scaled, 1.0)
    values = (values - least.float()[..., None]).where(is_scaled[..., None], 0.0)
    elements = (values * factor[..., None]).clamp(0.0, 15.0).round().to(torch.uint8)
    step = step.where(is_finite, torch.nan)
    return elements[..., ::2] | (elements[..., 1::2] << 4), torch.stack([step, least], -1)
