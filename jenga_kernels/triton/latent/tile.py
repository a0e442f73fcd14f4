"""Loop of some rows over a range of key tiles, shared by the kernels of latent attention.

A row is one head of one query token, as in `attention.tile`.
"""

import triton.language as tl

from jenga_kernels.triton.attention.tile import LOG2_E, finish_rows, row_offsets
from jenga_kernels.triton.lib.addressing import repeated_key_offsets
from jenga_kernels.triton.lib.device import device_function
from jenga_kernels.triton.lib.fp8 import converted
from jenga_kernels.triton.lib.matmul import matmul, matmul_add
from jenga_kernels.triton.lib.rows import load_rows
from jenga_kernels.triton.lib.softmax import softmax_step
from jenga_kernels.triton.lib.tiles import WARPGROUP_ROWS

_WARPGROUP_ROWS = tl.constexpr(WARPGROUP_ROWS)


@device_function
def attend_latents(
    # Inputs
    q_ptr,  # [num_tokens, num_heads, latent_dim + rotary_dim]
    pages_ptr,  # [num_pages, page_tokens, latent_dim + rotary_dim]
    page_table_ptr,  # i32[max_pages], the request's row
    latent_scale_ptr,  # f32[1] or None
    # Rows
    tokens,  # i32[BLOCK_M], numbered over the batch
    heads,  # i32[BLOCK_M]
    live,  # i1[BLOCK_M]
    row_ends,  # i32[BLOCK_M], one past the last key each row reads
    # Keys
    tile_start,
    tile_end,
    keys_end,  # keys from here on are not read
    # Scalars
    scale,
    # Strides, in elements
    stride_q_token,
    stride_q_head,
    stride_pages_page,
    stride_pages_slot,
    # Tiles and flags
    LATENT_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
):
    """Results f32[BLOCK_M, BLOCK_LATENT] and log-sum-exps f32[BLOCK_M] over some tiles of keys."""
    q_offsets = row_offsets(tokens, heads, stride_q_token, stride_q_head)
    # A width of 576 is not a power of two, so rows come in two parts, here and in the loop.
    q_latent = load_rows(q_ptr, q_offsets, live, LATENT_DIM, BLOCK_LATENT)
    q_rotary = load_rows(q_ptr + LATENT_DIM, q_offsets, live, ROTARY_DIM, BLOCK_ROTARY)
    latent_scale = 1.0
    if latent_scale_ptr is not None:
        latent_scale = tl.load(latent_scale_ptr)
    to_base_2 = scale * latent_scale * LOG2_E

    acc = tl.full([BLOCK_M, BLOCK_LATENT], 0, tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.full([BLOCK_M], 0, tl.float32)
    # From version 3.8 on, Triton would keep the shared memory addresses of warpgroups' queries in
    # 72 registers, and spill results.
    for tile in tl.range(  # pyright: ignore[reportGeneralTypeIssues]
        tile_start, tile_end, disable_licm=BLOCK_M >= _WARPGROUP_ROWS
    ):
        first_key = tile * BLOCK_N
        offsets = repeated_key_offsets(
            page_table_ptr,
            first_key,
            keys_end - 1,
            stride_pages_page,
            stride_pages_slot,
            PAGE_TOKENS,
            BLOCK_N,
        )
        keys = first_key + tl.arange(0, BLOCK_N)
        latents = load_rows(pages_ptr, offsets, None, LATENT_DIM, BLOCK_LATENT)
        rotary = load_rows(pages_ptr + LATENT_DIM, offsets, None, ROTARY_DIM, BLOCK_ROTARY)
        # One copy of a latent in shared memory serves as key and as value. If it is converted, it
        # is loaded twice, because the compiler loads ahead only a tile that is converted once. The
        # mask keeps it from merging the two loads.
        values = latents
        if latents.dtype != q_latent.dtype:
            values = load_rows(pages_ptr, offsets, keys < keys_end, LATENT_DIM, BLOCK_LATENT)
        # The short product comes first. In the other order, a warpgroup runs out of registers.
        rotary = converted(rotary, q_rotary.dtype)  # [BLOCK_N, BLOCK_ROTARY]
        scores = matmul(q_rotary, tl.trans(rotary))  # f32[BLOCK_M, BLOCK_N]
        scores = matmul_add(q_latent, tl.trans(converted(latents, q_latent.dtype)), scores)
        scores = tl.where(keys[None, :] < row_ends[:, None], scores, float("-inf"))
        weights, rescale, row_max, row_sum = softmax_step(scores, to_base_2, row_max, row_sum)
        values = converted(values, q_latent.dtype)  # [BLOCK_N, BLOCK_LATENT]
        acc = matmul_add(weights.to(values.dtype), values, acc * rescale[:, None])

    out, lse = finish_rows(acc, row_max, row_sum, None)
    if latent_scale_ptr is not None:
        out *= latent_scale
    return out, lse
