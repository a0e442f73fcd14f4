"""A matrix product whose elements are rounded in the same way on every processor.

Triton's interpreter computes `tl.dot` by numpy's product, hence by a BLAS. Under some kernels of
OpenBLAS the last bits of a row depend on how many rows there are. On a GPU they do not.
"""

import numpy as np

BLOCK = 32
"""How many products of each element are held at once: 64 MiB for 1,024 by 512 in float32."""


def product(a: np.ndarray, b: np.ndarray, *, dtype: np.dtype) -> np.ndarray:
    """Multiply matrices, or batches of them, so that no row, column or batch changes another.

    Each element of the result is a sum in pairs. The order of a sum depends on K alone, and numpy
    multiplies and adds arrays element by element, with one rounding for each operation.

    Args:
        a: [..., M, K].
        b: [..., K, N], where K is a power of two, as in every dot of Triton.
        dtype: Of the result, of the products and of the sums. Numpy has no BLAS for integers and
            float16, and multiplies those itself.

    Returns:
        [..., M, N].

    Raises:
        ValueError: If K is not a power of two.
    """
    if np.dtype(dtype) not in (np.float32, np.float64):
        return np.matmul(a, b, dtype=dtype)
    k = a.shape[-1]
    if k != b.shape[-2] or k.bit_count() != 1:
        msg = f"a and b must share a power of two as K, got {a.shape} and {b.shape}"
        raise ValueError(msg)
    columns = np.moveaxis(a.astype(dtype, copy=False), -1, 0)[..., None]
    rows = np.moveaxis(b.astype(dtype, copy=False), -2, 0)[..., None, :]
    return _sum_of_outer_products(columns, rows)


def _sum_of_outer_products(columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Multiply columns [K, ..., M, 1] by rows [K, ..., 1, N] and add the products in pairs."""
    half = len(columns) // 2
    if len(columns) > BLOCK:
        first = _sum_of_outer_products(columns[:half], rows[:half])
        return first + _sum_of_outer_products(columns[half:], rows[half:])
    terms = columns * rows
    while len(terms) > 1:
        half = len(terms) // 2
        terms = terms[:half] + terms[half:]
    return terms[0]
