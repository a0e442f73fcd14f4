"""Checks of operations on a paged cache of latents.

Multi-head latent attention stores one row for each token. The row begins with a latent, from which
all heads get their keys and values. The rotary part of the key, which all heads share, follows.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

import torch

from jenga_kernels.checks.pages import check_cached_dtype
from jenga_kernels.checks.tensors import FP8_DTYPE, check_dtype, check_rows, check_shape
from jenga_kernels.triton.lib.tiles import machine_of

MAX_LATENT_DIM = 512
"""Widest latent whose results fit into the registers of one program."""

LATENT_DIM_STEP = 16
"""Divisor of a latent's elements. It aligns rotary keys to 16 bytes in rows of any dtype."""

MAX_ROTARY_DIM = 64
"""Widest rotary key for which the tiles leave shared memory."""


def check_latent_pages(pages: torch.Tensor, latent_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Check the pages of a cache; return page_tokens and rotary_dim.

    Raises:
        ValueError: If shape, dtype, strides or alignment do not fit.
    """
    check_shape("pages", pages, (None, None, None))
    _, page_tokens, width = pages.shape
    if latent_dim not in range(LATENT_DIM_STEP, MAX_LATENT_DIM + 1, LATENT_DIM_STEP):
        msg = (
            f"latent_dim must be a multiple of {LATENT_DIM_STEP} up to {MAX_LATENT_DIM}, got "
            f"{latent_dim}"
        )
        raise ValueError(msg)
    if not 1 <= width - latent_dim <= MAX_ROTARY_DIM:
        msg = (
            f"pages must have rows of {latent_dim + 1} to {latent_dim + MAX_ROTARY_DIM} elements, "
            f"got {width}"
        )
        raise ValueError(msg)
    check_cached_dtype("pages", pages, dtype, (FP8_DTYPE,))
    if pages.dtype == FP8_DTYPE and not machine_of(pages.device).has_fp8:
        msg = f"pages must not be {FP8_DTYPE} on a GPU without it, before compute capability 8.9"
        raise ValueError(msg)
    check_rows("pages", pages)
    if page_tokens == 0:
        msg = f"pages must have at least one token per page, got shape {tuple(pages.shape)}"
        raise ValueError(msg)
    return page_tokens, width - latent_dim


def check_latent_scale(pages: torch.Tensor, latent_scale: torch.Tensor | None) -> None:
    """Check the scale of a quantised cache.

    Raises:
        ValueError: If the cache is not quantised, or shape or dtype do not fit.
    """
    if latent_scale is None:
        return
    if pages.dtype != FP8_DTYPE:
        msg = f"latent_scale needs pages of {FP8_DTYPE}, got {pages.dtype}"
        raise ValueError(msg)
    check_shape("latent_scale", latent_scale, (1,))
    check_dtype("latent_scale", latent_scale, (torch.float32,))
