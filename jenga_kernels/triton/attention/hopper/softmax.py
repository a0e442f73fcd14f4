# pyright: reportAssignmentType=false
# Pyright does not understand the layouts of Gluon.
"""Masks and softmax of a tile of scores in the prefill kernel for Hopper.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1. It is `attention.tile` and `softmax` in
Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jenga_kernels.triton.attention.hopper.work import end_visible, first_visible

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def softmax_step(
    scores,  # f32[GROUP_ROWS, BLOCK_N]
    row_max,
    row_sum,
    tile_start,
    positions,
    seq_len,
    span_starts,
    span_ends,
    slopes,
    scoring,
    is_edge,  # whether some row does not read all keys; a number if only known at run time
    IS_CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Get the weights of a tile, the factor for accumulated results, the new maxima and sums."""
    scale, soft_cap, window_tokens, chunk_tokens = scoring
    keys = tile_start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    to_base_2 = scale * LOG2_E
    if soft_cap is not None or slopes is not None:
        to_base_2 = LOG2_E
        scores = scores * scale if soft_cap is None else _soft_capped(scores, scale, soft_cap)
        if slopes is not None:
            scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(gl.float32)
    if is_edge:
        visible = keys[None, :] < end_visible(positions, seq_len, IS_CAUSAL)[:, None]
        if window_tokens is not None or chunk_tokens is not None:
            row_starts = first_visible(positions, window_tokens, chunk_tokens)
            visible = visible & (keys[None, :] >= row_starts[:, None])
        if span_starts is not None:
            in_span = (keys[None, :] >= span_starts[:, None]) & (keys[None, :] < span_ends[:, None])
            visible = visible | in_span
        scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * to_base_2)
    # Before a row's first visible key its maximum is -inf, and -inf - -inf is NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * to_base_2 - shift[:, None])
    rescale = gl.exp2(row_max - shift)
    return weights, rescale, new_max, row_sum * rescale + gl.sum(weights, 1)


@gluon.jit
def _soft_capped(scores, scale, soft_cap):
    """soft_cap * tanh(scores * scale / soft_cap).

    It takes one instruction, whose error is up to 2**-11 of its result. That is less than the
    rounding of queries and keys of 16 bits. The special function units limit the speed of prompts
    with soft caps.
    """
    shares = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;",
        "=f,f",
        [scores * (scale / soft_cap)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return soft_cap * shares


@gluon.jit
def reciprocal(values):
    """Do what `device.reciprocal` does, in one instruction."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2(values):
    """Do what `device.log2` does, in one instruction."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=gl.float32, is_pure=True, pack=1
    )
