"""What kernels of recurrent layers share: activations, step sizes, sums, stretches of a prompt."""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, reciprocal, rounded
from jenga_kernels.triton.lib.matmul import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
"""exp(x) is exp2(x * LOG2E)."""

# The interpreter knows this combination and sums at once; `tl.sum` costs it ten times as much.
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

    Elements of a thread are one row to it, so that a sum of products is a chain of multiply-adds.
    """
    rows = tl.permute(values, (1, 0, 2))
    return row_sums(tl.reshape(rows, [values.shape[1], values.shape[0] * values.shape[2]]))


@device_function
def gated(x, gates):
    """X times its gates, rounded to the dtype of x."""
    return rounded(x.to(tl.float32) * gates.to(tl.float32), x.dtype)


@device_function
def mask_if(condition, mask):
    """A mask where a scalar condition holds, and nothing of it elsewhere.

    Triton 3.9's interpreter makes 32-bit numbers of a condition that meets a mask, and then takes
    no such mask.
    """
    if INTERPRETED:
        return tl.where(condition, mask, False)
    else:
        return mask & condition


@device_function
def softplus(v):
    """log(1 + exp(v)), also right where exp(v) is far below 1."""
    u = tl.exp2(tl.abs(v) * -LOG2E)
    # log(1 + u) is twice the area hyperbolic tangent of u / (2 + u), which is at most 1 / 3: a
    # polynomial is as right there as float32 is, and shorter than a logarithm.
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
    """Step sizes from projected ones: bias added, made positive, limited.

    Without limits they are from 0 on, where a softplus is anyway.
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
    """First of a request's checkpoints, and the end; both 0 where there are none."""
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

    The tokens are cut where a state is to be kept: at each checkpoint, numbered up to `end`, and
    after the last token, which is stretch `end` itself.
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

    The taps of a channel are loaded at once.
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

    In a ring the input of token t is in column t % NUM_COLUMNS; without one NUM_COLUMNS is None.

    Args:
        columns: Which of the width - 1 inputs.
        num_before: Tokens of the request before that token.
        stride_column: Elements between columns.
        WIDTH: Taps.
        NUM_COLUMNS: Of a ring.
    """
    if NUM_COLUMNS is None:
        return columns * stride_column
    else:
        return (num_before + columns + 1 - WIDTH + NUM_COLUMNS) % NUM_COLUMNS * stride_column


@device_function
def has_input(columns, num_before, mask, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Of a mask what a convolution's inputs before a token are in: a ring has none before all."""
    if NUM_COLUMNS is None:
        return mask
    else:
        return mask_if(num_before + columns >= WIDTH - 1, mask)
