"""What kernels of the gated delta rule share: gates, rows of length one, chunks, their inverses."""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, reciprocal
from jenga_kernels.triton.lib.matmul import matmul
from jenga_kernels.triton.recurrent.recurrence import LOG2E, row_sums, softplus

NORM_EPSILON = tl.constexpr(1e-6)
"""Added to a squared length before its root, as in the models that train with it."""

LOG2_LOG2E = tl.constexpr(0.5287663729448977)
"""Logarithm to base two of LOG2E: what takes a rate from powers of e to those of two."""

LEAST_LOG2 = tl.constexpr(-126.0)
"""Decay of a token, in powers of two, below which the state before it counts for nothing."""


@device_function
def inverse_length(squares):
    """What to multiply a vector with for length one, from its squared length."""
    return tl.rsqrt(squares + NORM_EPSILON)


@device_function
def sigmoid(v):
    """1 / (1 + exp(-v)), 0 where that exponential is infinite."""
    return reciprocal(1.0 + tl.exp2(v * -LOG2E))


@device_function
def rate_log2(A_log):
    """Rate of decay in powers of two, from its natural logarithm."""
    return tl.exp2(A_log * LOG2E + LOG2_LOG2E)


@device_function
def decay_log2(gates, rate, bias):
    """Logarithms to base two of the decays of tokens, from gates in float32.

    Gates are natural logarithms, or, where there is a `rate`, what its softplus makes into them;
    `rate` is that of `rate_log2`.
    """
    if rate is not None:
        if bias is not None:
            gates += bias
        return tl.maximum(-rate * softplus(gates), LEAST_LOG2)
    else:
        return tl.maximum(gates * LOG2E, LEAST_LOG2)


@device_function
def unit_factors(rows):
    """What to multiply each row of [M, N] with for length one."""
    rows = rows.to(tl.float32)
    return inverse_length(row_sums(rows * rows))


SMALL = tl.constexpr(16)
"""Rows and columns of blocks that a warp multiplies alone, without a barrier."""


@device_function
def join_blocks(lower, inverse, rows, columns, doubling: tl.constexpr, PRECISION: tl.constexpr):
    """Join inverses of blocks on the diagonal, as wide as two to the power of `doubling`, in pairs.

    Of the products those blocks are right that lie beside two on the diagonal, and what the others
    on it hold is in none of these.
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
    """Inverse of the identity plus what f32[BLOCK_T, BLOCK_T] has below its diagonal, above it 0.

    Inverses of blocks on the diagonal are joined to those of blocks twice as wide. Powers of
    `lower` would need fewer products, but where keys are alike they grow beyond all precision.

    With PRECISION "float16" factors are rounded to it, which keeps as many bits as "tf32" does in
    half the room. No element of any of them may exceed 65504: those of keys of length one and
    betas of at most 2 are no larger than the betas.
    """
    rows = tl.arange(0, BLOCK_T)[:, None]
    columns = tl.arange(0, BLOCK_T)[None, :]
    if PRECISION == "float16":
        # Small blocks by themselves, one below the other: most of whole products would be zeros.
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
    """Request of a chunk, its first token among all, and the end of the stretch it lies in.

    Stretches are what checkpoints cut requests into. Stretch s of all, which begins at token t, has
    the blocks from t // BLOCK_T + s on; not all of them have tokens.
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
        # How many of the request's checkpoints lie before the chunk.
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
