"""Calls of operations as an engine makes them, described for another process.

A kernel is compiled and launched by how tensors lie in memory, and not by what they hold. So an
engine describes the calls of its layers, and a trial makes them on numbers of its own: see
`trial_runs`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

FAR_ELEMENTS = 2**31
"""Elements beyond which an offset has more than 32 bits."""


FEW_TOKENS = 2
"""Rows of a tensor that is made to be described; of one row torch forgets how far the next is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a tensor lies in memory.

    Attributes:
        dtype: Its name in torch, such as `bfloat16`.
        shape: Elements in each dimension.
        strides: From one to the next in each dimension, in elements.
        offset_bytes: From the start of the memory that it is a part of.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """Look at a tensor, which may be on torch's meta device."""
        return cls(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset_bytes=tensor.storage_offset() * tensor.element_size(),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its element type."""
        return getattr(torch, self.dtype)

    @property
    def num_elements(self) -> int:
        """Elements from its first one to its last one, those between that are not its own too."""
        if not all(self.shape):
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)

    @property
    def end_bytes(self) -> int:
        """Where it ends, from the start of the memory that it is a part of."""
        return self.offset_bytes + self.num_elements * self.torch_dtype.itemsize

    def with_rows(self, num_rows: int) -> "View":
        """The same with another number of rows, its first dimension."""
        return replace(self, shape=(num_rows, *self.shape[1:]))

    def within(self, num_bytes: int) -> "View":
        """The part of its rows that ends within so many bytes of memory."""
        behind_bytes = num_bytes - self.with_rows(1).end_bytes
        row_bytes = self.strides[0] * self.torch_dtype.itemsize
        return self.with_rows(min(self.shape[0], max(0, behind_bytes // row_bytes + 1)))

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Make such a tensor in memory, u8[num_bytes]."""
        offset = self.offset_bytes // self.torch_dtype.itemsize
        tensor = torch.empty(0, dtype=self.torch_dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), offset, self.shape, self.strides)

    def meta(self) -> torch.Tensor:
        """Make such a tensor without memory."""
        shape, strides = self.shape, self.strides
        return torch.empty_strided(shape, strides, dtype=self.torch_dtype, device="meta")


PAGED = {
    "paged_attention": ("k_pages", "v_pages"),
    "latent_attention": ("pages",),
    "state_scan": ("states",),
    "delta_scan": ("states",),
}
"""Operation with kernels of its own for a GPU -> its tensors that are parts of an arena."""

BY_TOKEN = {
    "paged_attention": ("q",),
    "latent_attention": ("q",),
    "state_scan": ("x", "dt", "B", "C"),
    "delta_scan": ("q", "k", "v", "gates", "betas"),
}
"""Operation -> its tensors that have a row for each token."""

Argument = View | float | bool | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an operation, without what its tensors hold.

    Attributes:
        operation: One with kernels of its own for a GPU.
        arguments: Name -> how a tensor lies in memory, or another value. How many rows tensors have
            that have one for each token says nothing.
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
        """Describe a call by its arguments; tensors are looked at, and not kept."""
        return cls(
            operation=operation,
            arguments={
                name: View.of(value) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            },
        )

    @classmethod
    def from_json(cls, text: str) -> "Call":
        """Read what `to_json` wrote.

        Raises:
            ValueError: If it is something else.
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
        """Write it as one line."""
        return json.dumps(asdict(self), sort_keys=True)

    def view(self, name: str) -> View | None:
        """How a tensor lies in memory; None where the call has none of this name."""
        found = self.arguments.get(name)
        return found if isinstance(found, View) else None

    @property
    def pages(self) -> list[View]:
        """Its tensors that are parts of an arena."""
        return [view for name in PAGED[self.operation] if (view := self.view(name)) is not None]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena up to its last page."""
        return max(view.end_bytes for view in self.pages)

    @property
    def key(self) -> str:
        """A name that calls share which launch the same kernels in the same way.

        Where in an arena the pages of a layer begin, and how many there are, is no part of it; that
        some lie past what 32 bits count is.
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
    """An argument, from what JSON has in its place."""
    if not isinstance(said, dict):
        return said
    return View(**said | {name: tuple(said[name]) for name in ("shape", "strides")})
