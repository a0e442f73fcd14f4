"""Rotation of heads before they are stored in few bits, so that no element stands out.

A few elements of a key or a value are often far greater than the others. Quantisation steps wide
enough for them leave almost no precision for the others. An element of a rotated head is a sum of
many elements with pseudo-random signs, so all are about equally great. If queries are rotated like
keys, the scores do not change. Results are rotated back. The product with the matrix is PyTorch's.

    >>> import torch
    >>> rotation = hadamard_rotation(64, torch.float32, torch.device("cpu"))
    >>> q, k = torch.ones(2, 64)
    >>> (q @ rotation.forward) @ (k @ rotation.forward) / rotation.gain
    tensor(64.)
    >>> bool((q @ rotation.forward @ rotation.back == q).all())
    True

Source: QuaRot (arXiv 2404.00456) for caches; its transform is the randomised one of QuIP# (arXiv
2402.04396).
"""

import functools
from typing import NamedTuple

import torch

_SEED = 0x51C64A5


class Rotation(NamedTuple):
    """A rotation of rows, up to a power of two that makes all elements exact in any dtype.

    Attributes:
        forward: Matrix that rotates rows, multiplied from the right, [dim, dim].
        back: Matrix that undoes the rotation, multiplied from the right, [dim, dim].
        gain: Ratio of the product of two rotated rows to that of the rows: 1 or 2.
    """

    forward: torch.Tensor
    back: torch.Tensor
    gain: float


@functools.cache
def hadamard_rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Get a rotation: random signs, which are always the same, then a Hadamard matrix.

    If `dim` is not a power of two, each run of elements is rotated on its own. A run is as long as
    the greatest power of two that divides `dim`.

    Args:
        dim: Elements of a row.
        dtype: Element type of the rows and the matrices.
        device: Device of the matrices.

    Raises:
        ValueError: If `dim` is less than 1, or `dtype` is not a floating-point type.
    """
    if dim < 1:
        msg = f"dim must be at least 1, got {dim}"
        raise ValueError(msg)
    if not dtype.is_floating_point:
        msg = f"dtype must be one of floating-point numbers, got {dtype}"
        raise ValueError(msg)
    run = dim & -dim
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < run:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
    signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(_SEED)) * 2 - 1
    divisor = 1 << ((run.bit_length() - 1) // 2)
    forward = signs * torch.block_diag(*[block] * (dim // run)) / divisor
    gain = run / divisor**2
    return Rotation(
        forward=forward.to(device, dtype), back=(forward.T / gain).to(device, dtype), gain=gain
    )
