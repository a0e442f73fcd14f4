"""Functions shared by kernels that read a state and a history of the tokens since then."""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function, rounded, widened
from jenga_kernels.triton.lib.matmul import INTERPRETED, matmul_add
from jenga_kernels.triton.recurrent.recurrence import mask_if

_UPPER_BITS = tl.constexpr(0xFFFFE000)
"""Bits of a float32 that tensor cores read."""


_MOST_COLUMNS = tl.constexpr(128)
"""Most columns of a state that are written at once."""


@device_function
def add_state_products(S, rows, products):
    """Add products of a state's columns, [V, K], with rows of as many, [L, K], to f32[V, L].

    Elements of 16 bits go to the tensor cores as they are. So do 16-bit rows if the state is in
    float32. The state is then split into a sum of two parts of 11 bits.
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
    """Decay of each token's part until each later one, [later, L]; 1 for the token and those after.

    Each is a sum of the logarithms between the two tokens. A difference of sums from the start
    would have an error as large as these sums.

    Args:
        next_logs: Logarithms to base two of the next token's decay, f32[L].
        ages: Indices of the tokens, [L].
    """
    between = tl.where(ages[None, :] < ages[:, None], next_logs[None, :], 0.0)
    return tl.exp2(tl.cumsum(between, 1, reverse=True))


@device_function
def decays_until(logs, next_logs, ages, last):
    """Decays until token `last`: of the state, a scalar, and of each token's part, f32[L].

    Parts of later tokens get 0.

    Args:
        logs: Logarithms to base two of each token's decay, f32[L].
        next_logs: Logarithms to base two of the next token's decay, f32[L].
        ages: Indices of the tokens, [L].
        last: One of these, or -1.
    """
    weights = tl.cumsum(tl.where(ages < last, next_logs, 0.0), 0, reverse=True)
    weights = tl.where(ages <= last, tl.exp2(weights), 0.0)
    return tl.exp2(tl.sum(tl.where(ages <= last, logs, 0.0), 0)), weights


@device_function
def rows_of_call(ptr, tokens, is_new, ks, past, HEAD_K_DIM: tl.constexpr, stride_token):
    """Load columns `ks` of a call's tokens into their rows of a tile; other rows are `past`."""
    rows = ptr + tokens[:, None] * stride_token + ks[None, :]
    return tl.load(rows, mask=is_new[:, None] & (ks < HEAD_K_DIM)[None, :], other=past)


@device_function
def rows_of_history(ptr, rows, is_past, ks, HEAD_K_DIM: tl.constexpr, STRIDE: tl.constexpr):
    """Load columns `ks` of the rows of a history, [L, K]; other rows are 0."""
    past = ptr + rows[:, None] * STRIDE + ks[None, :]
    return tl.load(past, mask=is_past[:, None] & (ks < HEAD_K_DIM)[None, :], other=0.0)


@device_function
def write_changes(ptrs, mask, is_begun, decay, changes, keys, PRECISION: tl.constexpr):
    """Decay a state, add the changes of tokens, and write it.

    It is read again here, so that it need not be in registers in the product's layout before.

    Args:
        ptrs: Pointers to the state's elements, [V, K].
        mask: Elements that exist.
        is_begun: Whether the state is not zero.
        decay: Factor of the state, a scalar or [1, K].
        changes: Changes of tokens, f32[V, L].
        keys: Keys of the changes, f32[L, K].
        PRECISION: Precision of the product.
    """
    S = widened(tl.load(ptrs, mask=mask_if(is_begun, mask), other=0.0)) * decay
    S = tl.dot(changes, keys, S, input_precision=PRECISION)
    tl.store(ptrs, rounded(S, ptrs.dtype.element_ty), mask=mask)


@device_function
def halves(rows):
    """Split [M, N] into the first and the second half of its columns."""
    HALF: tl.constexpr = rows.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(rows, [rows.shape[0], 2, HALF]), (0, 2, 1)))


@device_function
def write_rows(
    ptrs, is_row, is_begun, decay, changes, keys, NUM_COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):
    """Do `write_changes` for whole rows, half of the columns at a time if there are many.

    Args:
        ptrs: Pointers to the starts of rows, [V, 1].
        is_row: Rows that exist, [V, 1].
        is_begun: Whether the state is not zero.
        decay: Factor of the state, a scalar, or [1, K] of at most 128 columns.
        changes: Changes of tokens, f32[V, L].
        keys: Keys of the changes, f32[L, K].
        NUM_COLUMNS: Columns of a row, at most K.
        PRECISION: Precision of the product.
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
