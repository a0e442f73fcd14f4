"""Tensor maps: descriptions of tensors for the copy engine, and the layout of copied boxes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from perf.emulator.errors import EmulationError
from perf.emulator.memory.global_memory import GARBAGE, Addresses, Bytes

CHUNK_BYTES = 16
"""Bytes that stay together when rows are swizzled. Strides are multiples of this."""

SWIZZLES = {0: 16, 1: 32, 2: 64, 3: 128}
"""Code in CUDA's `CUtensorMapSwizzle` -> bytes of a row whose chunks change places; 16 for none."""

MAX_DIMS = 5
MAX_BOX = 256
"""Largest number of elements of a box in each dimension."""

BOX_ALIGNMENT_BYTES = 128
"""Alignment of a box in shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A tensor from which boxes are copied. The innermost dimension comes first.

    Attributes:
        base: Tensor that begins where the described one does.
        element_bytes: Bytes of an element.
        shape: Number of elements in each dimension.
        stride_bytes: Bytes from one element to the next in each dimension.
        box: Number of elements of a box in each dimension.
        swizzle_bytes: Bytes of a row whose chunks change places; 16 for none.
        fill: Value of every byte of a box that is outside of the tensor.
    """

    base: torch.Tensor
    element_bytes: int
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int
    fill: int = 0

    @classmethod
    def of(cls, descriptor: Any, layout: dict[str, Any]) -> "TensorMap":  # noqa: ANN401
        """Make a tensor map from Triton's descriptor and the compiler's layout of the boxes."""
        element_bytes = layout["elem_size"]
        if layout["fp4_padded"] or getattr(descriptor, "round_f32_to_tf32", False):
            msg = "a tensor descriptor of 4-bit or tf32 elements"
            raise EmulationError(msg)
        return cls(
            base=descriptor.base,
            element_bytes=element_bytes,
            shape=tuple(map(int, reversed(descriptor.shape))),
            stride_bytes=tuple(element_bytes * int(each) for each in reversed(descriptor.strides)),
            box=tuple(map(int, reversed(layout["block_size"]))),
            swizzle_bytes=SWIZZLES[layout["swizzle"]],
            fill=GARBAGE if descriptor.padding == "nan" else 0,
        )

    def __post_init__(self) -> None:
        """Check the rules that a GPU's driver checks."""
        num_dims, row_bytes = len(self.shape), self.box[0] * self.element_bytes
        rules = {
            f"1 to {MAX_DIMS} dimensions": 0 < num_dims <= MAX_DIMS,
            "as many strides and sides of a box": len(self.stride_bytes)
            == len(self.box)
            == num_dims,
            "a base that is a multiple of 16 bytes": self.base.data_ptr() % CHUNK_BYTES == 0,
            "strides that are multiples of 16 bytes": not any(
                each % CHUNK_BYTES or not 0 <= each < 1 << 40 for each in self.stride_bytes[1:]
            ),
            "neighbours in its innermost dimension": self.stride_bytes[0] == self.element_bytes,
            "elements in every dimension": all(0 < each <= 1 << 32 for each in self.shape),
            f"boxes of at most {MAX_BOX} elements a side": all(0 < x <= MAX_BOX for x in self.box),
            "rows of a box of 16, 32, ... bytes": row_bytes % CHUNK_BYTES == 0,
            "rows of a box no longer than the swizzle": (
                self.swizzle_bytes == SWIZZLES[0] or row_bytes <= self.swizzle_bytes
            ),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            msg = f"a tensor map must have {', '.join(broken)}: {self.shape}, {self.stride_bytes} "
            msg += f"bytes, boxes of {self.box}, swizzled by {self.swizzle_bytes} bytes"
            raise EmulationError(msg)

    @property
    def box_bytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.element_bytes

    def places(self, start: int) -> Addresses:
        """Return the addresses of the chunks of a box that begins at `start` of shared memory.

        Raises:
            EmulationError: A box may not begin there.
        """
        if start % BOX_ALIGNMENT_BYTES:
            msg = f"a box at {start}, no multiple of {BOX_ALIGNMENT_BYTES}"
            raise EmulationError(msg)
        places = start + np.arange(0, self.box_bytes, CHUNK_BYTES)
        return places ^ (((places >> 7) & (self.swizzle_bytes // CHUNK_BYTES - 1)) << 4)

    def fetch(self, first: list[int], read: Callable[[Addresses, int], Bytes]) -> Bytes:
        """Return the chunks u8[chunks, CHUNK_BYTES] of the box whose first element is at `first`.

        Args:
            first: Coordinates of the first element. They may lie outside of the tensor.
            read: Function that reads a number of bytes at each of some addresses.
        """
        inner, *outer = self.box
        rows = np.full(1, self.base.data_ptr(), dtype=np.int64)
        is_inside = np.ones(1, dtype=bool)
        dims = zip(outer, first[1:], self.shape[1:], self.stride_bytes[1:], strict=True)
        for count, start, end, stride_bytes in dims:
            places = start + np.arange(count)
            rows = (places[:, None] * stride_bytes + rows).reshape(-1)
            is_inside = ((places >= 0) & (places < end))[:, None] & is_inside
            is_inside = is_inside.reshape(-1)
        data = np.full((len(rows), inner * self.element_bytes), self.fill, dtype=np.uint8)
        columns = first[0] + np.arange(inner)
        taken = (columns >= 0) & (columns < self.shape[0])
        each = self.element_bytes
        if taken.all() and first[0] * each % CHUNK_BYTES == 0:
            # Read whole chunks instead of elements: the result is the same, and it is faster.
            each = CHUNK_BYTES
            columns = first[0] * self.element_bytes // each + np.arange(data.shape[1] // each)
            taken = np.ones(len(columns), dtype=bool)
        if is_inside.any() and taken.any():
            addresses = rows[is_inside][:, None] + columns[taken] * each
            found = read(addresses.reshape(-1), each).reshape(*addresses.shape, each)
            parts = data.reshape(len(rows), -1, each)
            parts[np.ix_(is_inside, taken)] = found
        return data.reshape(-1, CHUNK_BYTES)
