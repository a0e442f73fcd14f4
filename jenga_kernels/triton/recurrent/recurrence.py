"""Shared functions of kernels of recurrent layers: activations, step sizes, sums, stretches."""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, reciprocal, rounded
from jenga_kernels.triton.lib.matmul import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
"""Factor in exp(x) = exp2(x * LOG2E)."""

# The interpreter recognises this function and sums at once. `tl.sum` takes ten times as long there.
_add = tl.standard._sum_combine


@device_function
def row_sums(values):
    """Sums over the last dimension of [M, N]."""
    return tl.reduce(values, 1, _add)


@device_function
def column_sums(values):
    """Sums over the first dimension of [M, N]."""
    return tl.reduce(values, 0, _add)


@device_function
def line_sums(values):
    """Sums over all lines of each of M rows of [lines, M, N].

    All elements that a thread has of a row are one row here, so that a sum of products is a chain
    of fused multiply-adds.
    """
    rows = tl.permute(values, (1, 0, 2))
    return row_sums(tl.reshape(rows, [values.shape[1], values.shape[0] * values.shape[2]]))


@device_function
def gated(x, gates):
    """X times its gates, rounded to the dtype of x."""
    return rounded(x.to(tl.float32) * gates.to(tl.float32), x.dtype)


@device_function
def mask_if(condition, mask):
    """Mask where a scalar condition holds, and all False elsewhere.

    Triton 3.9's interpreter combines a condition and a mask to 32-bit numbers, and does not take
    these as a mask.
    """
    if INTERPRETED:
        return tl.where(condition, mask, False)
    else:
        return mask & condition


@device_function
def softplus(v):
    """log(1 + exp(v)), also accurate where exp(v) is far below 1."""
    u = tl.exp2(tl.abs(v) * -LOG2E)
    # log(1 + u) is twice the area hyperbolic tangent of u / (2 + u), which is at most 1 / 3. There,
    # a polynomial is as accurate as float32, and shorter than a logarithm.
    s = u * reciprocal(2.0 + u)
    z = s * s
    series = 0.28178326 * z + 0.27960605
    series = (series * z + 0.4002491) * z + 0.66666315
    return tl.maximum(v, 0.0) + s * (series * z + 2.0)


@device_function
def silu(v):
    """V times its sigmoid."""
    return v * reciprocal(1.0 + tl.exp2(v * -LOG2E))


@device_function
def step_sizes(dt, dt_bias, dt_min, dt_max, IS_SOFTPLUS: tl.constexpr, HAS_LIMITS: tl.constexpr):
    """Compute step sizes from projected ones: add a bias, make them positive, limit them.

    Without HAS_LIMITS they are at least 0, as a softplus always is.
    """
    if dt_bias is not None:
        dt += dt_bias
    if IS_SOFTPLUS:
        dt = softplus(dt)
    if HAS_LIMITS or not IS_SOFTPLUS:
        dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    return dt


@device_function
def checkpoint_range(checkpoint_starts_ptr, request):
    """First of a request's checkpoints, and their end; both 0 if there are none."""
    if checkpoint_starts_ptr is None:
        return 0, 0
    else:
        first = tl.load(checkpoint_starts_ptr + request)
        return first, tl.load(checkpoint_starts_ptr + request + 1)


@device_function
def stretch_end(
    stretch,
    end,
    checkpoint_after_ptr,  # i32[num_checkpoints] or None
    checkpoint_slots_ptr,  # i32[num_checkpoints] or None
    num_tokens,
    state_slot,
):
    """Tokens of a request after which a stretch ends, and the slot for the state there.

    A request is cut into stretches where a state is kept. They end at each checkpoint, numbered up
    to `end`, and after the last token, which ends stretch `end` itself.
    """
    after = num_tokens
    slot = state_slot
    if checkpoint_after_ptr is not None and stretch < end:
        after = tl.load(checkpoint_after_ptr + stretch)
        slot = tl.load(checkpoint_slots_ptr + stretch)
    return after, slot


@device_function
def conv_weights(
    weight_ptr,  # [dim, width]
    dims,
    is_dim,
    stride_dim: tl.constexpr,
    stride_column: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weights of channels as four vectors f32[BLOCK_D], a token's own last; missing taps are zero.

    All taps of a channel are loaded at once.
    """
    columns = tl.arange(0, 4)[None, :] - (4 - WIDTH)
    weights = weight_ptr + dims[:, None] * stride_dim + columns.to(tl.int64) * stride_column
    weights = tl.load(weights, mask=is_dim[:, None] & (columns >= 0), other=0.0)  # [D, 4]
    even, odd = tl.split(tl.reshape(weights.to(tl.float32), [BLOCK_D, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@device_function
def column_offsets(
    columns, num_before, stride_column, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr
):
    """Offset of a convolution's inputs before a token, the oldest first.

    In a ring, the input of token t is in column t % NUM_COLUMNS. Without a ring, NUM_COLUMNS is
    None.

    Args:
        columns: Indices among the width - 1 inputs.
        num_before: Number of tokens of the request before that token.
        stride_column: Elements between columns.
        WIDTH: Number of taps.
        NUM_COLUMNS: Columns of a ring, or None.
    """
    if NUM_COLUMNS is None:
        return columns * stride_column
    else:
        return (num_before + columns + 1 - WIDTH + NUM_COLUMNS) % NUM_COLUMNS * stride_column


@device_function
def has_input(columns, num_before, mask, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Restrict a mask to inputs that exist before a token: in a ring, none precede the first."""
    if NUM_COLUMNS is None:
        return mask
    else:
        return mask_if(num_before + columns >= WIDTH - 1, mask)
