"""Online softmax in base 2.

Each row carries its greatest score so far, the sum of weights relative to it, and anything that the
caller accumulates with these weights. A row that has seen no key has maximum -inf and sum 0.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1.
"""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, reciprocal


@device_function
def softmax_step(scores, scale, row_max, row_sum):
    """Add one tile of scores to a running softmax.

    Args:
        scores: f32[M, N]; -inf where a key is not visible.
        scale: Positive factor that converts scores to base 2.
        row_max: Greatest scaled score so far, f32[M].
        row_sum: Sum of the weights so far, relative to 2**row_max, f32[M]. It may also be
            f32[M, N], not yet summed over the columns of tiles. Warps that share rows would have to
            do that together.

    Returns:
        The weights of this tile, the factor for accumulated results, the new maximum and sum.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # Before a row's first visible key its maximum is -inf, and -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    if len(row_sum.shape) == 2:  # noqa: PLR2004 - one sum for each column
        row_sum = row_sum * rescale[:, None] + weights
    else:
        row_sum = row_sum * rescale + tl.sum(weights, 1)
    return weights, rescale, new_max, row_sum


@device_function
def soft_capped(scores, scale, soft_cap):
    """soft_cap * tanh(scores * scale / soft_cap), through exp2."""
    power = tl.exp2(scores * (2.8853900817779268 * scale / soft_cap))  # e ** (2 x / cap)
    return soft_cap - 2 * soft_cap * reciprocal(power + 1)
