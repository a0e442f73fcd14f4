"""Loads and stores of rows: contiguous runs of elements at scattered offsets.

The interpreter takes about 40 ns for each element it loads or stores. There, whole rows are copied.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


@triton.jit
def _load_rows(ptr, offsets, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)[None, :]
    pointers = ptr + offsets[:, None] + dims
    if live is None:
        if BLOCK_D == HEAD_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    elif BLOCK_D == HEAD_DIM:
        return tl.load(pointers, mask=live[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=live[:, None] & (dims < HEAD_DIM), other=0.0)


def _load_rows_interpreted(
    ptr: tl.tensor, offsets: tl.tensor, live: tl.tensor | None, HEAD_DIM: int, BLOCK_D: int
) -> tl.tensor:
    """Do what `_load_rows` does, with one copy a row."""
    element = ptr.dtype.element_ty
    element_bytes = element.primitive_bitwidth // 8
    num_rows = offsets.handle.data.size
    rows = np.zeros((num_rows, BLOCK_D), ELEMENTS[element_bytes])
    for outside, inside in _row_addresses(ptr, offsets, live, rows):
        ctypes.memmove(inside, outside, HEAD_DIM * element_bytes)
    if element.is_fp32():
        rows = rows.view(np.float32)
    elif element.is_fp16():
        rows = rows.view(np.float16)
    elif element.is_int8():
        rows = rows.view(np.int8)
    return tl.tensor(TensorHandle(rows, element), tl.block_type(element, [num_rows, BLOCK_D]))


@triton.jit
def _store_rows(
    ptr,
    offsets,
    rows,
    live,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    THREAD_ELEMENTS: tl.constexpr = None,
):
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = live[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)
    pointers = ptr + offsets[:, None] + dims
    if THREAD_ELEMENTS is not None:
        pointers = tl.max_contiguous(pointers, [1, THREAD_ELEMENTS])
    tl.store(pointers, rows.to(ptr.dtype.element_ty), mask=mask)


def _store_rows_interpreted(
    ptr: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    HEAD_DIM: int,
    BLOCK_D: int,  # noqa: ARG001 - the signature of `_store_rows`
    THREAD_ELEMENTS: int | None = None,  # noqa: ARG001 - the signature of `_store_rows`
) -> None:
    """Do what `_store_rows` does, with one copy a row."""
    element = ptr.dtype.element_ty
    data = np.ascontiguousarray(rows.to(element).handle.data)
    for outside, inside in _row_addresses(ptr, offsets, live, data):
        ctypes.memmove(outside, inside, HEAD_DIM * element.primitive_bitwidth // 8)


def _row_addresses(
    ptr: tl.tensor, offsets: tl.tensor, live: tl.tensor | None, rows: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yield the addresses of each live row in memory and in the tile."""
    outside = offsets.handle.data * rows.itemsize + int(ptr.handle.data[0])
    inside = np.arange(len(rows)) * rows.strides[0] + rows.ctypes.data
    if live is not None:
        outside, inside = outside[live.handle.data], inside[live.handle.data]
    return zip(outside.tolist(), inside.tolist(), strict=True)


ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Types in which the interpreter holds elements that numpy has no type for, by bytes."""

load_rows = _load_rows_interpreted if triton.knobs.runtime.interpret else _load_rows
"""Load rows of HEAD_DIM elements at i64 `offsets` from `ptr`, [N, BLOCK_D].

Rows are zero, and nothing is read, where `live` is false and past HEAD_DIM. `live` may be None.
"""

store_rows = _store_rows_interpreted if triton.knobs.runtime.interpret else _store_rows
"""Store `rows` [N, BLOCK_D], rounded to the element type of `ptr`, at i64 `offsets` from it.

Nothing is written where `live` is false and past HEAD_DIM. A thread stores at most THREAD_ELEMENTS
at a time. If it stored more than it loads at once, its loads of neighbouring elements would follow
each other, and each sector would be loaded several times.
"""
