"""What a result may lose by instructions that a GPU does not round to nearest.

Plain PyTorch on a CPU has powers, logarithms and reciprocals to about half a unit in the last
place; a GPU's may be off by two and more (PTX ISA), and the average of that need not be zero. So a
kernel is granted what the exact result changes by if each function errs as far as it may.
"""

import os
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from tests.kernels.support import DEVICE

IS_COMPILED = DEVICE.type == "cuda" or bool(os.environ.get("EMULATED_GPU"))

UNIT = torch.finfo(torch.float32).eps
"""One unit in the last place of float32 is no more than this share of a number."""

POWER_UNITS = 2.5
RECIPROCAL_UNITS = 1.0
ROOT_UNITS = 1.0
"""Of `ex2`, `rcp` and `rsqrt`, rounding included."""

ROUNDING = 0.5
SERIES_ROUNDINGS = 6


def _power(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # A power of e is one of two, of a product that is rounded, with a constant that is.
    return y * (POWER_UNITS + 2 * ROUNDING * x.abs())


def _power_of_two(_: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y * POWER_UNITS


def _sigmoid(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    power = (1 - y) * (POWER_UNITS + 2 * ROUNDING * x.abs())
    return y * (power + ROUNDING + RECIPROCAL_UNITS)


def _silu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.abs() * _sigmoid(x, x.sigmoid()) + ROUNDING * y.abs()


def _softplus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # What is added to the greater of x and 0 is a series of a power's quotient.
    series = POWER_UNITS + 2 * ROUNDING * x.abs() + RECIPROCAL_UNITS + SERIES_ROUNDINGS * ROUNDING
    return (y - x.clamp(min=0)) * series + y * ROUNDING


def _root(_: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y * ROOT_UNITS


ERRORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "exp": _power,
    "exp2": _power_of_two,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "softplus": _softplus,
    "rsqrt": _root,
}
"""Function of PyTorch -> by how many units at most a kernel's own may be off, of x and y."""


class _Functions(TorchFunctionMode):
    """Notes which of these functions are called; one gives as much too much as it may."""

    def __init__(self, erring: str | None = None) -> None:
        super().__init__()
        self.erring = erring
        self.called: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ERRORS:
            return result
        self.called.add(name)
        return result + UNIT * ERRORS[name](args[0], result) if name == self.erring else result


Results = tuple[torch.Tensor, ...]


def exactly(compute: Callable[[], Results]) -> tuple[Results, list[float]]:
    """Get results, and what each may lose by functions that are not rounded to nearest.

    Nothing where kernels are interpreted: there, too, PyTorch's functions are taken.

    Args:
        compute: Gives results in float64, the same ones every time.
    """
    with _Functions() as functions:
        exact = compute()
    lost = tuple(torch.zeros_like(each) for each in exact)
    for name in sorted(functions.called) if IS_COMPILED else ():
        with _Functions(erring=name):
            erring = compute()
        # A slot that nobody wrote is NaN in both.
        changes = ((a - b).abs().nan_to_num(0.0) for a, b in zip(erring, exact, strict=True))
        lost = tuple(a + b for a, b in zip(lost, changes, strict=True))
    return exact, [each.max().item() if each.numel() else 0.0 for each in lost]
