"""Calls of operations as an engine makes them, described for another process.

The layout of tensors in memory decides how a kernel is compiled and launched, and their contents do
not. So an engine describes the calls of its layers, and a trial makes them with numbers of its own;
see `trial_runs`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

FAR_ELEMENTS = 2**31
"""Number of elements from which offsets need more than 32 bits."""


FEW_TOKENS = 2
"""Rows of a tensor that is made to be described. With one row, torch forgets the stride of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Layout of a tensor in memory.

    Attributes:
        dtype: Name of its element type in torch, such as `bfloat16`.
        shape: Elements in each dimension.
        strides: Distance from one element to the next in each dimension, in elements.
        offset_bytes: Bytes from the start of its memory to its first element.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """Describe a tensor, which may be on torch's meta device."""
        return cls(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset_bytes=tensor.storage_offset() * tensor.element_size(),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the tensor."""
        return getattr(torch, self.dtype)

    @property
    def num_elements(self) -> int:
        """Number of elements from the first to the last, gaps between its own included."""
        if not all(self.shape):
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)

    @property
    def end_bytes(self) -> int:
        """Bytes from the start of its memory to its end."""
        return self.offset_bytes + self.num_elements * self.torch_dtype.itemsize

    def with_rows(self, num_rows: int) -> "View":
        """Return this layout with another number of rows, its first dimension."""
        return replace(self, shape=(num_rows, *self.shape[1:]))

    def within(self, num_bytes: int) -> "View":
        """Return this layout with only the rows that end within the first `num_bytes` of memory."""
        behind_bytes = num_bytes - self.with_rows(1).end_bytes
        row_bytes = self.strides[0] * self.torch_dtype.itemsize
        return self.with_rows(min(self.shape[0], max(0, behind_bytes // row_bytes + 1)))

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Make a tensor with this layout in memory, u8[num_bytes]."""
        offset = self.offset_bytes // self.torch_dtype.itemsize
        tensor = torch.empty(0, dtype=self.torch_dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), offset, self.shape, self.strides)

    def meta(self) -> torch.Tensor:
        """Make a tensor with this layout without memory."""
        shape, strides = self.shape, self.strides
        return torch.empty_strided(shape, strides, dtype=self.torch_dtype, device="meta")


PAGED = {
    "paged_attention": ("k_pages", "v_pages"),
    "latent_attention": ("pages",),
    "state_scan": ("states",),
    "delta_scan": ("states",),
}
"""Operations with kernels of their own for a GPU, and their tensors that are parts of an arena."""

BY_TOKEN = {
    "paged_attention": ("q",),
    "latent_attention": ("q",),
    "state_scan": ("x", "dt", "B", "C"),
    "delta_scan": ("q", "k", "v", "gates", "betas"),
}
"""Tensors with a row for each token, by operation."""

Argument = View | float | bool | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an operation, without the contents of its tensors.

    Attributes:
        operation: Operation with kernels of its own for a GPU.
        arguments: Layouts of tensors, and other values, by argument name. The number of rows of
            tensors with a row for each token has no meaning.
    """

    operation: str
    arguments: Mapping[str, Argument]

    def __post_init__(self) -> None:
        """Check the operation.

        Raises:
            ValueError: If it has no kernels of its own for a GPU.
        """
        check_operation(self.operation)

    @classmethod
    def of(cls, operation: str, **arguments: torch.Tensor | float | bool | str | None) -> "Call":
        """Describe a call by its arguments. Tensors are described, and not kept."""
        return cls(
            operation=operation,
            arguments={
                name: View.of(value) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            },
        )

    @classmethod
    def from_json(cls, text: str) -> "Call":
        """Read a call that `to_json` wrote.

        Raises:
            ValueError: If the text is something else.
        """
        try:
            said = json.loads(text)
            return cls(
                operation=said["operation"],
                arguments={name: _argument(value) for name, value in said["arguments"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            msg = f"expected a call of an operation, got {text[:100]!r}"
            raise ValueError(msg) from error

    def to_json(self) -> str:
        """Write the call as one line."""
        return json.dumps(asdict(self), sort_keys=True)

    def view(self, name: str) -> View | None:
        """Get the layout of a tensor; None if the call has no tensor of this name."""
        found = self.arguments.get(name)
        return found if isinstance(found, View) else None

    @property
    def pages(self) -> list[View]:
        """Layouts of its tensors that are parts of an arena."""
        return [view for name in PAGED[self.operation] if (view := self.view(name)) is not None]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena up to the end of its last page."""
        return max(view.end_bytes for view in self.pages)

    @property
    def key(self) -> str:
        """Key shared by calls that launch the same kernels in the same way.

        The offset of a layer's pages in the arena and their number do not count. It does count
        whether pages extend past the reach of 32-bit offsets.
        """
        uncounted = (*PAGED[self.operation], *BY_TOKEN[self.operation])
        said: dict[str, object] = {
            "is_far": any(view.num_elements > FAR_ELEMENTS for view in self.pages)
        }
        for name, value in self.arguments.items():
            if isinstance(value, View):
                shape = value.shape[1:] if name in uncounted else value.shape
                said[name] = (value.dtype, shape, value.strides)
            else:
                said[name] = value
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        return f"{self.operation}-{digest[:16]}"


def check_operation(operation: str) -> None:
    """Check that an operation has kernels of its own for a GPU.

    Raises:
        ValueError: If it has none.
    """
    if operation not in PAGED:
        msg = f"operation must be one of {', '.join(PAGED)}, got {operation!r}"
        raise ValueError(msg)


def _argument(said: Any) -> Argument:  # noqa: ANN401 - of JSON
    """Make an argument from its form in JSON."""
    if not isinstance(said, dict):
        return said
    return View(**said | {name: tuple(said[name]) for name in ("shape", "strides")})
