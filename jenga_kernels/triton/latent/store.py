"""Kernel of `jenga_kernels.latent_store`."""

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import slot_offsets
from jenga_kernels.triton.lib.device import device_function, in_float, quotient, widened
from jenga_kernels.triton.lib.fp8 import to_fp8
from jenga_kernels.triton.lib.rows import load_rows, store_rows


@device_function
def _stored(rows, latent_scale_ptr, dtype: tl.constexpr):
    """Rows as they are stored: in another float type, or scaled and saturated."""
    if not dtype.is_fp8():
        return in_float(rows, dtype)
    else:
        values = widened(rows)
        if latent_scale_ptr is not None:
            values = quotient(values, tl.broadcast_to(tl.load(latent_scale_ptr), [1, 1]))
        return to_fp8(values, tl.float8e4nv, True)


# Counts differ from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def latent_store_kernel(
    # Outputs
    pages_ptr,  # [num_pages, page_tokens, latent_dim + rotary_dim]
    # Inputs
    latents_ptr,  # [num_tokens, latent_dim]
    rotary_keys_ptr,  # [num_tokens, rotary_dim]
    slots_ptr,  # i64[num_tokens]
    latent_scale_ptr,  # f32[1] or None
    # Sizes
    num_tokens,
    # Strides, in elements
    stride_pages_page: tl.int64,
    stride_pages_slot: tl.int64,
    stride_latents_token: tl.int64,
    stride_rotary_keys_token: tl.int64,
    # Tiles and flags
    LATENT_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
    THREAD_ELEMENTS: tl.constexpr,
):
    """Store tokens from p * BLOCK_ROWS on in program p."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)  # i64[BLOCK_ROWS]
    live = slots >= 0
    latents = load_rows(
        latents_ptr, tokens * stride_latents_token, live, LATENT_DIM, BLOCK_LATENT
    )  # [BLOCK_ROWS, BLOCK_LATENT]
    rotary_keys = load_rows(
        rotary_keys_ptr, tokens * stride_rotary_keys_token, live, ROTARY_DIM, BLOCK_ROTARY
    )  # [BLOCK_ROWS, BLOCK_ROTARY]

    slots = tl.where(live, slots, 0)
    offsets = slot_offsets(slots, stride_pages_page, stride_pages_slot, PAGE_TOKENS)
    latents = _stored(latents, latent_scale_ptr, pages_ptr.dtype.element_ty)
    rotary_keys = _stored(rotary_keys, latent_scale_ptr, pages_ptr.dtype.element_ty)
    store_rows(pages_ptr, offsets, latents, live, LATENT_DIM, BLOCK_LATENT, THREAD_ELEMENTS)
    rotary_ptr = pages_ptr + LATENT_DIM
    store_rows(rotary_ptr, offsets, rotary_keys, live, ROTARY_DIM, BLOCK_ROTARY, THREAD_ELEMENTS)
