"""Shared functions of kernels of the gated delta rule: gates, unit lengths, chunks, inverses."""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, reciprocal
from jenga_kernels.triton.lib.matmul import matmul
from jenga_kernels.triton.recurrent.recurrence import LOG2E, row_sums, softplus

NORM_EPSILON = tl.constexpr(1e-6)
"""Number added to a squared length before its root, as in the models that train with it."""

LOG2_LOG2E = tl.constexpr(0.5287663729448977)
"""Logarithm to base two of LOG2E, which converts a rate from powers of e to powers of two."""

LEAST_LOG2 = tl.constexpr(-126.0)
"""Least decay of a token, in powers of two. With less, the state before it would not matter."""


@device_function
def inverse_length(squares):
    """Factor that scales a vector to length one, from its squared length."""
    return tl.rsqrt(squares + NORM_EPSILON)


@device_function
def sigmoid(v):
    """1 / (1 + exp(-v)); 0 if that exponential is infinite."""
    return reciprocal(1.0 + tl.exp2(v * -LOG2E))


@device_function
def rate_log2(A_log):
    """Rate of decay in powers of two, from its natural logarithm."""
    return tl.exp2(A_log * LOG2E + LOG2_LOG2E)


@device_function
def decay_log2(gates, rate, bias):
    """Logarithms to base two of the decays of tokens, from gates in float32.

    Without a `rate`, gates are natural logarithms. With one, which is that of `rate_log2`, the
    result is minus the rate times the softplus of gate and bias.
    """
    if rate is not None:
        if bias is not None:
            gates += bias
        return tl.maximum(-rate * softplus(gates), LEAST_LOG2)
    else:
        return tl.maximum(gates * LOG2E, LEAST_LOG2)


@device_function
def unit_factors(rows):
    """Factors that scale each row of [M, N] to length one."""
    rows = rows.to(tl.float32)
    return inverse_length(row_sums(rows * rows))


SMALL = tl.constexpr(16)
"""Rows and columns of blocks that a warp multiplies on its own, without a barrier."""


@device_function
def join_blocks(lower, inverse, rows, columns, doubling: tl.constexpr, PRECISION: tl.constexpr):
    """Join inverses of diagonal blocks, which are two to the power of `doubling` wide, in pairs.

    In the products, only the blocks beside two diagonal blocks are right. No other diagonal block
    enters them. The rest of the products is discarded.
    """
    if PRECISION == "float16":
        blocks = inverse.to(tl.float16)
        joined = matmul(blocks, matmul(lower.to(tl.float16), blocks).to(tl.float16))
    else:
        joined = tl.dot(lower, inverse, input_precision=PRECISION)
        joined = tl.dot(inverse, joined, input_precision=PRECISION)
    return tl.where(rows >> doubling == columns >> doubling ^ 1, -joined, inverse)


@device_function
def unit_triangular_inverse(lower, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of the identity plus the part of `lower`, f32[BLOCK_T, BLOCK_T], below its diagonal.

    `lower` must be 0 above its diagonal; its diagonal is ignored.

    Inverses of diagonal blocks are joined to those of blocks twice as wide. Powers of `lower` would
    need fewer products, but they lose all precision if keys are alike, because they grow.

    With PRECISION "float16", factors are rounded to it, which keeps as many bits as "tf32" in half
    the space. No element may then exceed 65504. For keys of length one and betas of at most 2, no
    element exceeds the betas.
    """
    rows = tl.arange(0, BLOCK_T)[:, None]
    columns = tl.arange(0, BLOCK_T)[None, :]
    if PRECISION == "float16":
        # Small blocks on their own, one below the other. Whole products would be mostly zeros.
        NUM_SMALL: tl.constexpr = BLOCK_T // SMALL
        is_small = rows // SMALL == columns // SMALL
        small = tl.where(is_small, lower, 0.0)
        small = tl.sum(tl.reshape(small, [NUM_SMALL, SMALL, NUM_SMALL, SMALL]), 2)
        in_rows = tl.arange(0, SMALL)[None, :, None]
        in_columns = tl.arange(0, SMALL)[None, None, :]
        inverse = tl.where(in_rows == in_columns ^ 1, -small, 0.0)
        inverse = tl.where(in_rows == in_columns, 1.0, inverse)
        for doubling in tl.static_range(1, 4):  # pyright: ignore[reportGeneralTypeIssues]
            inverse = join_blocks(small, inverse, in_rows, in_columns, doubling, PRECISION)
        inverse = tl.broadcast_to(inverse[:, :, None, :], [NUM_SMALL, SMALL, NUM_SMALL, SMALL])
        inverse = tl.where(is_small, tl.reshape(inverse, [BLOCK_T, BLOCK_T]), 0.0)
    else:
        inverse = tl.where(rows == columns ^ 1, -lower, 0.0)
        inverse = tl.where(rows == columns, 1.0, inverse)
        for doubling in tl.static_range(1, 4):  # pyright: ignore[reportGeneralTypeIssues]
            inverse = join_blocks(lower, inverse, rows, columns, doubling, PRECISION)
    for doubling in tl.static_range(4, 6):  # pyright: ignore[reportGeneralTypeIssues]
        if (2 << doubling) <= BLOCK_T:
            inverse = join_blocks(lower, inverse, rows, columns, doubling, PRECISION)
    return inverse


@device_function
def find_chunk(
    query_starts_ptr,  # i32[num_requests + 1]
    checkpoint_starts_ptr,  # i32[num_requests + 1] or None
    checkpoint_after_ptr,  # i32[num_checkpoints] or None
    num_requests,
    block,
    BLOCK_T: tl.constexpr,
):
    """Find a chunk's request, its first token among all, and the end of its stretch.

    Stretches are the parts that checkpoints cut requests into. Stretch s of all, which begins at
    token t, has the blocks from t // BLOCK_T + s on. Not all of them have tokens.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(query_starts_ptr + middle) // BLOCK_T + middle
        if checkpoint_starts_ptr is not None:
            begin += tl.load(checkpoint_starts_ptr + middle)
        if begin <= block:
            low = middle
        else:
            high = middle
    request = low
    start = tl.load(query_starts_ptr + request)
    end = tl.load(query_starts_ptr + request + 1)
    stretch = request
    if checkpoint_starts_ptr is not None:
        query_start = start
        checkpoint = tl.load(checkpoint_starts_ptr + request)
        checkpoint_end = tl.load(checkpoint_starts_ptr + request + 1)
        # Count the request's checkpoints before the chunk.
        low = checkpoint
        high = checkpoint_end
        while low < high:
            middle = (low + high) // 2
            after = query_start + tl.load(checkpoint_after_ptr + middle)
            if after // BLOCK_T + request + middle + 1 <= block:
                low = middle + 1
            else:
                high = middle
        if low > checkpoint:
            start = query_start + tl.load(checkpoint_after_ptr + low - 1)
        if low < checkpoint_end:
            end = query_start + tl.load(checkpoint_after_ptr + low)
        stretch = request + low
    return request, start + (block - (start // BLOCK_T + stretch)) * BLOCK_T, end
