"""Loading the rows of a cache: contiguous runs of elements at scattered offsets."""

import ctypes

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
    """`_load_rows` by one copy a row; the interpreter's load spends 40 ns on each element."""
    element = ptr.dtype.element_ty
    element_bytes = element.primitive_bitwidth // 8
    num_rows = offsets.handle.data.size
    rows = np.zeros((num_rows, BLOCK_D), ELEMENTS[element_bytes])
    sources = offsets.handle.data * element_bytes + int(ptr.handle.data[0])
    targets = np.arange(num_rows) * rows.strides[0] + rows.ctypes.data
    if live is not None:
        sources, targets = sources[live.handle.data], targets[live.handle.data]
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, HEAD_DIM * element_bytes)
    if element.is_fp32():
        rows = rows.view(np.float32)
    elif element.is_fp16():
        rows = rows.view(np.float16)
    return tl.tensor(TensorHandle(rows, element), tl.block_type(element, [num_rows, BLOCK_D]))


ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Bytes of an element -> how the interpreter holds elements numpy has no type for."""

load_rows = _load_rows_interpreted if triton.knobs.runtime.interpret else _load_rows
"""Rows of HEAD_DIM elements at i64 `offsets` from `ptr`, [N, BLOCK_D].

Zero where `live` is false, nothing being read there, and past HEAD_DIM; `live` may be None.
"""
