"""Launches of kernels, and a cache of checked calls for each operation.

Every launch passes through this module. On a CPU no kernel runs unless Triton interprets it. There,
launches are skipped, and `with_reference` has the operation's reference compute the results.

The same few calls come back in every layer and every step, with tensors at other addresses. A
call's signature alone decides the checks on the host and the variant that Triton compiles. So both
are done for the first call of a signature, and later calls only launch.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton

from jenga_kernels.checks.tensors import ALIGNMENT_BYTES
from jenga_kernels.triton.lib.groups import Group, groups_of
from jenga_kernels.triton.lib.tiles import has_kernels

P = ParamSpec("P")
R = TypeVar("R")

MAX_CALLS = 256
"""Most signatures in a table of calls, some KB each. A step has only a few."""

OPTIONS = frozenset({"enable_fp_fusion", "maxnreg", "num_warps", "num_stages", "launch_pdl"})
"""Options of launches, which are not arguments of a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel launch that serves all calls of one signature.

    Attributes:
        kernel: The kernel.
        grid: Numbers of programs, in up to three dimensions.
        constants: Arguments that follow from the signature, and options. A group of which all
            fields are constants is added to them.
        descriptors: Pairs of names: a TMA descriptor among the constants, and the argument of the
            tensor that it describes.
    """

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    constants: dict[str, object]
    descriptors: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Fill the groups of constants once, and not in each call."""
        filled = {
            name: group(*[self.constants[field] for field in group._fields])
            for name, group in groups_of(self.kernel).items()
            if all(field in self.constants for field in group._fields)
        }
        object.__setattr__(self, "constants", self.constants | filled)

    def arguments(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, object]:
        """Combine the constants with these tensors. The kernel may not take all of them."""
        arguments: dict[str, object] = {**self.constants, **tensors}
        for name, tensor_name in self.descriptors:
            arguments[name] = rebased(arguments[name], tensors[tensor_name])
        return arguments

    def compile(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Compile the kernel ahead of time, so that its launch does not wait for the compiler."""
        given = taken_by(self.kernel, self.arguments(tensors))
        self.kernel.run(**given, grid=self.grid, warmup=True)


_Getter = Callable[[Mapping[str, Any]], object]


class _Known(NamedTuple):
    """A launch whose kernel has been compiled and loaded.

    Attributes:
        compiled: The kernel.
        getters: Functions that take the kernel's first parameters from the arguments of a call.
        constants: The parameters after these, which are the same in all calls.
        takes_constants: Whether the first parameters have constants too.
    """

    compiled: Any
    getters: Sequence[_Getter]
    constants: Sequence[object]
    takes_constants: bool


class Call:
    """State shared by the calls of an operation that have the same signature.

    Args:
        has_kernels: Whether kernels run where the tensors are.

    Attributes:
        launches: Launches that serve the calls. None until the first call has passed its checks.
        facts: Results that the operation derived from the first call, for its own use.
    """

    __slots__ = ("_has_kernels", "_known", "facts", "launches")

    def __init__(self, *, has_kernels: bool = True) -> None:
        self.facts: Any = None
        self.launches: list[Launch] | None = None
        self._has_kernels = has_kernels
        self._known: dict[int, _Known] = {}

    def run(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Launch all kernels with these tensors. Arguments that a kernel lacks are left out."""
        if not self._has_kernels:
            return
        for index, launch in enumerate(self.launches or ()):
            known = self._known.get(index)
            if known is None:
                self._first_launch(index, launch, tensors)
                continue
            arguments = launch.arguments(tensors) if known.takes_constants else tensors
            given = [getter(arguments) for getter in known.getters]
            known.compiled[(*launch.grid, 1, 1)](*given, *known.constants)

    def _first_launch(
        self, index: int, launch: Launch, tensors: Mapping[str, torch.Tensor | None]
    ) -> None:
        kernel = launch.kernel
        given = taken_by(kernel, launch.arguments(tensors))
        compiled = kernel[launch.grid](**given)
        # Only a loaded kernel can be launched again. The interpreter compiles nothing.
        if getattr(compiled, "module", None) is None or any(
            name not in given for name in kernel.arg_names
        ):
            return
        names = list(kernel.arg_names)
        fixed = launch.constants.keys() - tensors.keys() - {name for name, _ in launch.descriptors}
        constants: list[object] = []
        while names and names[-1] in fixed:
            constants.insert(0, given[names.pop()])
        groups = groups_of(kernel)
        fields = [
            groups[name]._fields if name in groups and name not in fixed else (name,)
            for name in names
        ]
        self._known[index] = _Known(
            compiled=compiled,
            getters=[
                itemgetter(name) if of == (name,) else _group_getter(of)
                for name, of in zip(names, fields, strict=True)
            ],
            constants=constants,
            takes_constants=bool(launch.descriptors)
            or any(not fixed.isdisjoint(of) for of in fields),
        )


Calls = dict[tuple[object, ...], Call]
"""Calls of an operation by their signatures."""


def call_like(calls: Calls, *arguments: object) -> Call:
    """Find the entry for calls of an operation that have the signature of this one.

    The signature of a tensor is everything except its address and its contents: shape, strides,
    dtype, device, whether it is aligned, and whether it requires a gradient. The signature of any
    other argument is its value and its type.

    Args:
        calls: Calls of the operation.
        arguments: All arguments of the operation, in a fixed order: tensors, or hashable values.
    """
    parts: list[object] = [torch.is_grad_enabled()]
    device = -1
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            device = argument.get_device()
            parts += (
                argument.shape,
                argument.stride(),
                argument.dtype,
                device,
                argument.data_ptr() % ALIGNMENT_BYTES,
                argument.requires_grad,
            )
        else:
            # 1, 1.0 and True are equal, but Triton compiles different variants for them.
            parts += (argument, type(argument))
    if device >= 0:
        parts.append(torch.cuda.current_device())
    signature = tuple(parts)
    call = calls.get(signature)
    if call is None:
        if len(calls) >= MAX_CALLS:
            calls.clear()
        is_served = device >= 0 or has_kernels(torch.device("cpu"))
        call = calls[signature] = Call(has_kernels=is_served)
    return call


def with_reference(reference: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a reference compute an operation's results where no kernel runs: on a CPU.

    The operation still runs first. It checks its arguments and launches nothing there. With
    `TRITON_INTERPRET=1` kernels run on a CPU too, and the reference is not called.

    Args:
        reference: Plain PyTorch version of the operation, with the same arguments.
    """

    def decorate(operation: Callable[P, R]) -> Callable[P, R]:
        first_name = next(iter(inspect.signature(operation).parameters))

        @functools.wraps(operation)
        def serve(*args: P.args, **kwargs: P.kwargs) -> R:
            result = operation(*args, **kwargs)
            tensor: Any = args[0] if args else kwargs[first_name]
            return result if has_kernels(tensor.device) else reference(*args, **kwargs)

        return serve

    return decorate


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, ...],
    device: torch.device,
    **arguments: object,
) -> None:
    """Launch a kernel, if kernels run on `device`.

    Args:
        kernel: The kernel.
        grid: Numbers of programs, in up to three dimensions.
        device: Device of the tensors.
        arguments: Arguments of the kernel, and options.
    """
    if has_kernels(device):
        kernel[grid](**taken_by(kernel, arguments))


def rebased(descriptor: Any, tensor: torch.Tensor | None) -> Any:  # noqa: ANN401 - Gluon's, or None
    """Return a copy of a TMA descriptor that describes another tensor.

    A stored descriptor has None as its tensor, because it would keep the tensor's memory alive.
    """
    if descriptor is None:
        return None
    other = copy.copy(descriptor)  # does not repeat the checks of the constructor
    other.base = tensor
    return other


def _group_getter(fields: tuple[str, ...]) -> _Getter:
    """Make a function that takes the fields of a group from arguments."""
    if len(fields) == 1:
        return lambda arguments: (arguments[fields[0]],)
    return itemgetter(*fields)


def pointer_names(kind: Group) -> tuple[str, ...]:
    """List the names that kernels give to the arguments of an operation: `x_ptr` for `x`.

    Args:
        kind: Class of named tuples of the operation's arguments. Kernels take only their tensors.
    """
    return tuple([f"{name}_ptr" for name in kind._fields])


def taken_by(kernel: triton.JITFunction, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that a kernel takes, put into its groups, and the options of launches.

    Raises:
        KeyError: If a field of a group is not among the arguments.
    """
    names = {*kernel.arg_names, *OPTIONS}
    given = {name: value for name, value in arguments.items() if name in names}
    for name, group in groups_of(kernel).items():
        if name not in given:
            given[name] = group(*[arguments[field] for field in group._fields])
    return given
