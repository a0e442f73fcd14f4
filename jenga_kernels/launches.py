"""Launches of kernels, and what is remembered of the calls of an operation.

Every launch passes through this module. On a CPU, where no kernel runs unless Triton interprets it,
launches are left out, and `with_reference` has the operation's reference compute its results.

Layer by layer and step by step the same few calls come back, with tensors at other addresses. What
is checked on the host, and what Triton compiles a kernel for, depends on a call's signature alone:
so both are looked at for its first call, and the next ones are launched without.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import triton

from jenga_kernels.checks.tensors import ALIGNMENT_BYTES
from jenga_kernels.triton.lib.tiles import has_kernels

P = ParamSpec("P")
R = TypeVar("R")

MAX_CALLS = 256
"""Signatures that a table of calls has at most, of some KB each: a step has a few of its own."""

OPTIONS = frozenset({"enable_fp_fusion", "maxnreg", "num_warps", "num_stages", "launch_pdl"})
"""What launches take that is no argument of a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel that serves calls of one signature.

    Attributes:
        kernel: What is launched.
        grid: Numbers of programs, up to three.
        constants: Arguments that follow from the signature, and options.
        descriptors: Names of those among them that say what the copy engine needs to know of a
            tensor, and of the tensor's argument.
    """

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    constants: dict[str, object]
    descriptors: tuple[tuple[str, str], ...] = ()

    def arguments(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, object]:
        """What it is given, with these tensors; what the kernel does not take is among them."""
        arguments: dict[str, object] = {**self.constants, **tensors}
        for name, tensor_name in self.descriptors:
            arguments[name] = rebased(arguments[name], tensors[tensor_name])
        return arguments

    def compile(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Compile the kernel, which then is launched without waiting for that."""
        given = taken_by(self.kernel, self.arguments(tensors))
        self.kernel.run(**given, grid=self.grid, warmup=True)


class Call:
    """Calls of an operation that have the same signature.

    Args:
        has_kernels: Whether kernels run where the tensors are.

    Attributes:
        launches: What they launch; None before the first one has passed its checks.
        facts: What the operation has found out from the first one.
    """

    __slots__ = ("_compiled", "_has_kernels", "facts", "launches")

    def __init__(self, *, has_kernels: bool = True) -> None:
        self.facts: Any = None
        self.launches: list[Launch] | None = None
        self._has_kernels = has_kernels
        self._compiled: dict[int, tuple[Any, tuple[str, ...]]] = {}

    def run(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Launch all, with these tensors; what a kernel does not take is left out."""
        if not self._has_kernels:
            return
        for launch in self.launches or ():
            self._launch(launch.kernel, launch.grid, launch.arguments(tensors))

    def _launch(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], arguments: dict[str, object]
    ) -> None:
        known = self._compiled.get(id(kernel))
        if known is not None:
            compiled, names = known
            compiled[(*grid, 1, 1)](*[arguments[name] for name in names])
            return
        compiled = kernel[grid](**taken_by(kernel, arguments))
        names = tuple(kernel.arg_names)
        # Only what has been loaded can be launched: the interpreter compiles nothing.
        is_loaded = getattr(compiled, "module", None) is not None
        if is_loaded and all(name in arguments for name in names):
            self._compiled[id(kernel)] = (compiled, names)


Calls = dict[tuple[object, ...], Call]
"""Calls of an operation, by their signatures."""


def call_like(calls: Calls, *arguments: object) -> Call:
    """Find the calls of an operation that have the signature of this one.

    The signature says of tensors all but where they lie and what they hold: shape, strides, dtype,
    device, whether they are aligned and want a gradient. Of others it is the value.

    Args:
        calls: Those of the operation.
        arguments: All that the operation was given, in a fixed order; tensors, or hashable.
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
            # 1, 1.0 and True are equal, and not the same to Triton.
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
    """Have a reference serve an operation's tensors where no kernel runs: on a CPU.

    The operation goes first all the same. It checks its arguments, and launches nothing there.
    With `TRITON_INTERPRET=1` kernels run on a CPU too, and the reference is not called.

    Args:
        reference: Computes in plain PyTorch what the operation does; takes the same arguments.
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
        kernel: What is launched.
        grid: Numbers of programs, up to three.
        device: Of the tensors.
        arguments: What the kernel takes, and options.
    """
    if has_kernels(device):
        kernel[grid](**arguments)


def rebased(descriptor: Any, tensor: torch.Tensor | None) -> Any:  # noqa: ANN401 - Gluon's, or None
    """What the copy engine needs to know of a tensor, given what it does of one like it.

    What is kept has no tensor, whose memory it would keep too.
    """
    if descriptor is None:
        return None
    other = copy.copy(descriptor)  # checks nothing anew
    other.base = tensor
    return other


def taken_by(kernel: triton.JITFunction, arguments: Mapping[str, object]) -> dict[str, object]:
    """Arguments that a kernel has, and the options of launches."""
    names = {*kernel.arg_names, *OPTIONS}
    return {name: value for name, value in arguments.items() if name in names}
