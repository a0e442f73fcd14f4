"""What kernels share that read a state and what the tokens since then brought in."""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, rounded, widened
from jenga_kernels.triton.lib.matmul import INTERPRETED, matmul_add
from jenga_kernels.triton.recurrent.recurrence import mask_if

_UPPER_BITS = tl.constexpr(0xFFFFE000)
"""Of a float32, those that tensor cores take of it."""


_MOST_COLUMNS = tl.constexpr(128)
"""Of a state, that are written at once."""


@device_function
def add_state_products(S, rows, products):
    """Add what columns of a state, [V, K], hold under rows of as many, [L, K], to f32[V, L].

    Elements of 16 bits go to the tensor cores as they are, and so do rows beside a state in
    float32: that is the sum of two parts of 11 bits.
    """
    if S.dtype == rows.dtype:
        return matmul_add(S, tl.trans(rows), products)
    elif INTERPRETED or rows.dtype == tl.float32:
        return matmul_add(S.to(tl.float32), tl.trans(rows.to(tl.float32)), products)
    else:
        S = S.to(tl.float32)
        columns = tl.trans(rows.to(tl.float32))
        upper = (S.to(tl.uint32, bitcast=True) & _UPPER_BITS).to(tl.float32, bitcast=True)
        products = tl.dot(S - upper, columns, products, input_precision="tf32")
        return tl.dot(upper, columns, products, input_precision="tf32")


@device_function
def decays_between(next_logs, ages):
    """What a token's part weighs after a later one, [later, L], 1 of itself and of what is later.

    Each is a sum of what lies between the two, not a difference of sums from the start, which would
    be as wrong as these are large.

    Args:
        next_logs: Logarithms to base two of the next token's decay, f32[L].
        ages: Numbers of the tokens, [L].
    """
    between = tl.where(ages[None, :] < ages[:, None], next_logs[None, :], 0.0)
    return tl.exp2(tl.cumsum(between, 1, reverse=True))


@device_function
def decays_until(logs, next_logs, ages, last):
    """What a state and each token's part weigh after token `last`: a scalar, and f32[L].

    Parts of later tokens weigh nothing.

    Args:
        logs: Logarithms to base two of each token's decay, f32[L].
        next_logs: And of the next one's.
        ages: Numbers of the tokens, [L].
        last: One of these, or -1.
    """
    weights = tl.cumsum(tl.where(ages < last, next_logs, 0.0), 0, reverse=True)
    weights = tl.where(ages <= last, tl.exp2(weights), 0.0)
    return tl.exp2(tl.sum(tl.where(ages <= last, logs, 0.0), 0)), weights


@device_function
def rows_of_call(ptr, tokens, is_new, ks, past, HEAD_K_DIM: tl.constexpr, stride_token):
    """Columns `ks` of a call's tokens, in the rows of a tile that are theirs; elsewhere `past`."""
    rows = ptr + tokens[:, None] * stride_token + ks[None, :]
    return tl.load(rows, mask=is_new[:, None] & (ks < HEAD_K_DIM)[None, :], other=past)


@device_function
def rows_of_history(ptr, rows, is_past, ks, HEAD_K_DIM: tl.constexpr, STRIDE: tl.constexpr):
    """Columns `ks` of the rows of a history, [L, K]; elsewhere 0."""
    past = ptr + rows[:, None] * STRIDE + ks[None, :]
    return tl.load(past, mask=is_past[:, None] & (ks < HEAD_K_DIM)[None, :], other=0.0)


@device_function
def write_changes(ptrs, mask, is_begun, decay, changes, keys, PRECISION: tl.constexpr):
    """Let a state decay, add what tokens changed in it, and write it.

    It is read again, so that until then it need not lie in registers as the product has it.

    Args:
        ptrs: Where it is, [V, K].
        mask: What of that there is.
        is_begun: Whether it is anything but zero.
        decay: Its factor, a scalar or [1, K].
        changes: What tokens changed, f32[V, L].
        keys: Under which keys, f32[L, K].
        PRECISION: Of the product.
    """
    S = widened(tl.load(ptrs, mask=mask_if(is_begun, mask), other=0.0)) * decay
    S = tl.dot(changes, keys, S, input_precision=PRECISION)
    tl.store(ptrs, rounded(S, ptrs.dtype.element_ty), mask=mask)


@device_function
def halves(rows):
    """The first and the second half of the columns of [M, N]."""
    HALF: tl.constexpr = rows.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(rows, [rows.shape[0], 2, HALF]), (0, 2, 1)))


@device_function
def write_rows(
    ptrs, is_row, is_begun, decay, changes, keys, NUM_COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):
    """`write_changes` of whole rows; half of the columns at a time where they are many.

    Args:
        ptrs: Where rows begin, [V, 1].
        is_row: Which there are, [V, 1].
        is_begun: Whether the state is anything but zero.
        decay: Its factor, a scalar, or [1, K] of at most 128 columns.
        changes: What tokens changed, f32[V, L].
        keys: Under which keys, f32[L, K].
        NUM_COLUMNS: Of a row, at most K.
        PRECISION: Of the product.
    """
    WIDTH: tl.constexpr = keys.shape[1]
    if WIDTH > _MOST_COLUMNS:
        near_keys, far_keys = halves(keys)
        columns = tl.arange(0, WIDTH // 2)[None, :]
        mask = is_row & (columns < NUM_COLUMNS)
        write_changes(ptrs + columns, mask, is_begun, decay, changes, near_keys, PRECISION)
        columns += WIDTH // 2
        mask = is_row & (columns < NUM_COLUMNS)
        write_changes(ptrs + columns, mask, is_begun, decay, changes, far_keys, PRECISION)
    else:
        columns = tl.arange(0, WIDTH)[None, :]
        mask = is_row & (columns < NUM_COLUMNS)
        write_changes(ptrs + columns, mask, is_begun, decay, changes, keys, PRECISION)
