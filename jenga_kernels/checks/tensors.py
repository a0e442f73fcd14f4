"""Checks that an operation makes before it launches anything; each raises `ValueError`."""

import functools
from collections.abc import Sequence
from numbers import Integral

import torch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Element types of activations."""

CACHED_FLOAT_DTYPES = (torch.bfloat16, torch.float16)
"""Element types that any cache may have, in addition to the element type of activations."""

FP8_DTYPE = torch.float8_e4m3fn
"""Element type of a quantised cache; GPUs convert it from compute capability 8.9 on."""

E5M2_DTYPE = torch.float8_e5m2
"""Element type of a quantised cache, the upper byte of half precision; works on every GPU."""

INT4_DTYPE = torch.uint8
"""Type of the bytes of a cache with elements of four bits: two each, the first in the low half."""

SCALED_DTYPES = (FP8_DTYPE, E5M2_DTYPE)
"""Element types of quantised caches that may have one scale for all slots, or one per head."""

SLOT_SCALED_DTYPES = (FP8_DTYPE, torch.int8, INT4_DTYPE)
"""Element types of quantised caches that may have a scale for each slot and head. Those of integers
must have one."""

QUANTISED_DTYPES = (FP8_DTYPE, E5M2_DTYPE, torch.int8, INT4_DTYPE)
"""Element types of quantised caches."""

ALIGNMENT_BYTES = 16
"""Bytes of the widest load of one thread. Rows must begin at multiples of it."""

LOOKS_AT_VALUES = True
"""Whether values of tensors on the CPU are checked. Off where calls on the CPU are timed like those
on a GPU."""


def shows_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are checked: on the CPU, where reading them waits for nothing."""
    return LOOKS_AT_VALUES and tensor.device.type == "cpu"


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | None]) -> None:
    """Check a tensor's shape.

    Args:
        name: The argument's name, for the message.
        tensor: The argument.
        expected: Its shape. None stands for any size.

    Raises:
        ValueError: If the number of dimensions or a size differs.
    """
    shape = tensor.shape
    if shape == expected:
        return
    if len(shape) == len(expected):
        # Every layer of every step runs this: a loop takes half as long as a generator.
        for size, want in zip(shape, expected, strict=True):
            if want is not None and size != want:
                break
        else:
            return
    wanted = ", ".join("any" if want is None else str(want) for want in expected)
    msg = f"{name} must have shape ({wanted}), got {tuple(shape)}"
    raise ValueError(msg)


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Check that a tensor's element type is one of `allowed`.

    Raises:
        ValueError: If it is not.
    """
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype) for dtype in allowed)
        msg = f"{name} must be {wanted}, got {tensor.dtype}"
        raise ValueError(msg)


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Check that all tensors are on the device of the first, the current one; None is skipped.

    Raises:
        ValueError: If one does not.
    """
    first_name, device = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first_name, device = name, tensor.device
            # Triton launches on the current device, not on that of the tensors.
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                msg = (
                    f"{name} must be on the current device, cuda:{torch.cuda.current_device()}, "
                    f"got {device}"
                )
                raise ValueError(msg)
        elif tensor.device != device:
            msg = f"{name} must be on the device of {first_name}, {device}, got {tensor.device}"
            raise ValueError(msg)


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's last dimension is contiguous and every row 16-byte aligned.

    The other dimensions may have any stride. Strides of dimensions of size one are not checked.

    Raises:
        ValueError: If a row is scattered or not aligned.
    """
    shape, stride = tensor.shape, tensor.stride()
    if shape[-1] > 1 and stride[-1] != 1:
        msg = f"{name} must be contiguous in its last dimension, got stride {stride[-1]}"
        raise ValueError(msg)
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        msg = f"{name} must begin at a multiple of {ALIGNMENT_BYTES} bytes"
        raise ValueError(msg)
    element_bytes = tensor.element_size()
    for dim in range(len(shape) - 1):
        if stride[dim] * element_bytes % ALIGNMENT_BYTES and shape[dim] > 1:
            msg = (
                f"{name} must have strides of multiples of {ALIGNMENT_BYTES} bytes, got "
                f"{stride[dim] * element_bytes} bytes in dimension {dim}"
            )
            raise ValueError(msg)


def check_no_gradients(**tensors: torch.Tensor | None) -> None:
    """Check that no tensor requires a gradient, which the operations do not compute.

    None is skipped.

    Raises:
        ValueError: If a tensor requires one and torch.no_grad() is not in force.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            msg = f"{name} must not require a gradient but within torch.no_grad()"
            raise ValueError(msg)


def check_apart(name: str, tensor: torch.Tensor) -> None:
    """Check that no two elements of a tensor share memory, because it will be written.

    Raises:
        ValueError: If some may, as in an expanded tensor.
    """
    if not _is_apart(tensor.shape, tensor.stride()):
        msg = (
            f"{name} must have elements that do not overlap, got strides {tensor.stride()} of "
            f"shape {tuple(tensor.shape)}"
        )
        raise ValueError(msg)


@functools.lru_cache(maxsize=1024)
def _is_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether each dimension's stride exceeds the span of all dimensions of shorter strides."""
    sizes = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1]
    spanned = 1
    for stride, size in sorted(sizes):
        if stride < spanned:
            return 0 in shape
        spanned += stride * (size - 1)
    return True


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is contiguous.

    Raises:
        ValueError: If it is not.
    """
    if not tensor.is_contiguous():
        msg = f"{name} must be contiguous, got strides {tensor.stride()}"
        raise ValueError(msg)


def check_at_least(name: str, value: int, minimum: int) -> int:
    """Check that a count is an integer of at least `minimum`; return it as a Python int.

    Raises:
        ValueError: If it is not.
    """
    # NumPy's integers are counts too, but Triton does not take them. True is an int, but kernels
    # do not take it as a number.
    if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
        msg = f"{name} must be an integer and at least {minimum}, got {value!r}"
        raise ValueError(msg)
    return int(value)


def check_positive(name: str, value: float) -> None:
    """Check that a value is a number, greater than zero and finite.

    Raises:
        ValueError: If it is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        msg = f"{name} must be a number greater than 0 and finite, got {value!r}"
        raise ValueError(msg)
