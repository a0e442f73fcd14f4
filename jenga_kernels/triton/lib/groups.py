"""Groups of kernel parameters: named tuples that a launch fills by the names of their fields.

A launch names each argument, such as `q_ptr` or `BLOCK_N`. A kernel that declares a group has one
parameter for all arguments of the group, and reads `inputs.q_ptr` or `tiles.BLOCK_N`. The compiler
takes the fields apart again, so the machine code is that of a kernel with a parameter for each.

Fields of a group that is annotated with `tl.constexpr` are known when the kernel is compiled. They
must be numbers, bools, strings or None, because Triton gives them as JSON to hooks that watch
compilation. A dataclass would fail there. Other groups hold pointers and scalars. Triton chooses
the type of an integer in a group by its value. So strides, which are always `tl.int64`, are
parameters of their own.

Triton 3.6 and 3.7 want some fields of a `tl.constexpr` group to be named first, as in
`PARTS: tl.constexpr = tiles.PARTS`: strings, bounds of `tl.static_range`, values of
`tl.max_contiguous`, and what a list passes to a compiled function, such as `tl.zeros`, or a tuple
to `gl.warp_specialize`. Pointers of a group that a loop moves are named before all else, so that
the loop carries them in the order of parameters. A group must not be named `options`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Kernel = TypeVar("Kernel")

Pointer = Any
"""A tensor or None where a group is filled, a pointer or None in a kernel."""

Group = type[Any]
"""A class of named tuples, whose fields are names of arguments."""


def with_groups(**groups: Group) -> Callable[[Kernel], Kernel]:
    """Declare which parameters of a kernel are groups.

    Args:
        groups: Name of a parameter -> class of its group.
    """

    def declare(kernel: Kernel) -> Kernel:
        unknown = groups.keys() - kernel.arg_names
        if unknown:
            msg = f"groups must be parameters of the kernel, {kernel.arg_names}, got {unknown}"
            raise ValueError(msg)
        kernel.groups = groups
        return kernel

    return declare


def groups_of(kernel: object) -> Mapping[str, Group]:
    """Get the declared groups of a kernel: name of a parameter -> class of its group."""
    return getattr(kernel, "groups", {})
