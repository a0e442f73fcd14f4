"""What the tests of the two convolutions share."""

import torch

from tests.kernels.recurrent.state_cases import StatePages
from tests.kernels.support import DEVICE, randn


def conv_tensors(num_tokens, dim, width, dtype, rng):
    """x, weight and bias; x is a slice of wider rows, as a projection gives it."""
    return {
        "x": randn((num_tokens, 2 * dim), dtype, rng)[:, dim:],
        "weight": randn((dim, width), dtype, rng),
        "bias": randn((dim,), dtype, rng),
    }


def conv_states(num_slots, dim, width, dtype, *, is_dim_last=True) -> StatePages:
    """States [num_slots, dim, width - 1] in pages shared with other layers, every element NaN."""
    shape = (width - 1, dim) if is_dim_last else (dim, width - 1)
    arena = torch.full((num_slots, 2, *shape), float("nan")).to(dtype).to(DEVICE)
    states = arena[:, 1]
    return StatePages(states.transpose(1, 2) if is_dim_last else states, arena)
