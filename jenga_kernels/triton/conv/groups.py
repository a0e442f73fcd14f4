"""Groups of parameters that the kernels of causal convolutions share."""

from typing import NamedTuple

from jenga_kernels.triton.lib.groups import Pointer


class Filters(NamedTuple):
    """Weights and biases of the channels."""

    weight_ptr: Pointer  # [dim, width]
    bias_ptr: Pointer  # [dim] or None


class Gates(NamedTuple):
    """Factors of inputs and outputs."""

    input_gates_ptr: Pointer  # [num_tokens, dim] or None
    output_gates_ptr: Pointer  # [num_tokens, dim] or None


STRIDES = {"out": ("token",), "states": ("slot", "dim", "column"), "x": ("token",)}
"""Tensor -> dimensions of which kernels take strides. See `addressing.named_strides`."""
