"""Rotating heads before they are stored in few bits, so that no element stands out.

A few elements of a key or a value are often far greater than the others, and steps that reach them
leave next to none for these. Rotated, each is a sum of many with signs as good as random, and all
are about as great. Queries, rotated like keys, give the scores they gave before; results are
rotated back. The product with the matrix is PyTorch's.

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
    """A rotation of rows, up to a power of two, so that all elements are exact in any dtype.

    Attributes:
        forward: What rows are multiplied with from the right, [dim, dim].
        back: What rotated rows are multiplied with to be what they were, [dim, dim].
        gain: Products of two rotated rows are so many times those of the rows: 1 or 2.
    """

    forward: torch.Tensor
    back: torch.Tensor
    gain: float


@functools.cache
def hadamard_rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Rotate by a Hadamard matrix behind signs that are random, but always the same.

    Where `dim` is no power of two, runs of as many elements as the greatest one that divides it are
    rotated each.

    Args:
        dim: Elements of a row.
        dtype: Of the rows and the matrices.
        device: Where the matrices lie.

    Raises:
        ValueError: If `dim` is less than 1, or `dtype` is not one of floating-point numbers.
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
