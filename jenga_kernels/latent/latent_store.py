"""Writing of latents and rotary keys into a paged cache."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.latents import check_latent_pages, check_latent_scale
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_apart,
    check_dtype,
    check_no_gradients,
    check_rows,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.latent import latent_store as reference
from jenga_kernels.triton.latent.store import latent_store_kernel
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import LOAD_BYTES, copy_tiles, machine_of, power_of_two

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `latent_store`, in the same order."""

    latents: torch.Tensor
    rotary_keys: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    latent_scale: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.latent_store)
def latent_store(
    latents: torch.Tensor,
    rotary_keys: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    latent_scale: torch.Tensor | None = None,
) -> None:
    """Copy each token's latent and rotary key, one behind the other, into its slot.

    A cache of bfloat16 or float16 gets elements of another dtype rounded to nearest; elements out
    of range become infinite. A cache of float8_e4m3fn gets elements divided by latent_scale,
    rounded and saturated. Slots must lie in the cache and differ from each other. Neither is
    checked, because slots are on the device.

    Args:
        latents: Latents, normalised, [num_tokens, latent_dim], bfloat16, float16 or float32.
        rotary_keys: Rotary parts of the keys, rotated, [num_tokens, rotary_dim], dtype of latents.
        pages: Cache, written in place, [num_pages, page_tokens, latent_dim + rotary_dim], dtype of
            latents, bfloat16, float16 or float8_e4m3fn. Strides may be any multiples of 16 bytes;
            the last dimension is contiguous, and no two elements share memory.
        slots: Slot of each token, i64[num_tokens]. Slot s is token s % page_tokens of page
            s // page_tokens. Tokens with a negative slot (`kv_store.NO_SLOT`) are skipped.
        latent_scale: Factor that restores a stored row, f32[1]; only with a float8_e4m3fn cache,
            where None means 1.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    given = (latents, rotary_keys, pages, slots, latent_scale)
    call = call_like(_calls, *given)
    if call.launches is None:
        call.launches = _launches(_Arguments(*given))
    call.run(dict(zip(_POINTERS, given, strict=True)))


def _launches(given: _Arguments) -> list[Launch]:
    """Check everything that follows from the signature of a call, and list its launches.

    Raises:
        ValueError: If something does not fit.
    """
    check_shape("latents", given.latents, (None, None))
    num_tokens, latent_dim = given.latents.shape
    check_dtype("latents", given.latents, FLOAT_DTYPES)
    page_tokens, rotary_dim = check_latent_pages(given.pages, latent_dim, given.latents.dtype)
    check_shape("rotary_keys", given.rotary_keys, (num_tokens, rotary_dim))
    check_dtype("rotary_keys", given.rotary_keys, (given.latents.dtype,))
    check_shape("slots", given.slots, (num_tokens,))
    check_dtype("slots", given.slots, (torch.int64,))
    if given.slots.numel() > 1 and given.slots.stride(0) != 1:
        msg = f"slots must be contiguous, got stride {given.slots.stride(0)}"
        raise ValueError(msg)
    check_rows("latents", given.latents)
    check_rows("rotary_keys", given.rotary_keys)
    check_apart("pages", given.pages)
    check_latent_scale(given.pages, given.latent_scale)
    check_no_gradients(latents=given.latents, rotary_keys=given.rotary_keys, pages=given.pages)
    check_same_device(**given._asdict())
    if num_tokens == 0:
        return []
    tiles = copy_tiles(machine_of(given.latents.device), latent_dim)
    stride_page, stride_slot, _ = strides(given.pages)
    constants = {
        "num_tokens": num_tokens,
        "stride_pages_page": stride_page,
        "stride_pages_slot": stride_slot,
        "stride_latents_token": given.latents.stride(0),
        "stride_rotary_keys_token": given.rotary_keys.stride(0),
        "LATENT_DIM": latent_dim,
        "ROTARY_DIM": rotary_dim,
        "PAGE_TOKENS": page_tokens,
        "BLOCK_ROWS": tiles.block_rows,
        "BLOCK_LATENT": power_of_two(latent_dim),
        "BLOCK_ROTARY": power_of_two(rotary_dim),
        "THREAD_ELEMENTS": LOAD_BYTES // given.latents.element_size(),
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
    }
    num_programs = triton.cdiv(num_tokens, tiles.block_rows)
    return [Launch(kernel=latent_store_kernel, grid=(num_programs,), constants=constants)]
