"""Groups of parameters that the kernels of selective state space models share."""

from typing import NamedTuple

from jenga_kernels.triton.lib.groups import Pointer


class Inputs(NamedTuple):
    """Inputs of the recurrence.

    In Mamba-1, dt, A and dt_bias have dimensions for channels, and A for state elements too.
    """

    x_ptr: Pointer  # [num_tokens, num_heads, head_dim]
    dt_ptr: Pointer  # [num_tokens, num_heads] or [num_tokens, num_heads, head_dim]
    A_ptr: Pointer  # f32[num_heads] or f32[num_heads, head_dim, d_state]
    B_ptr: Pointer  # [num_tokens, num_groups, d_state]
    C_ptr: Pointer  # [num_tokens, num_groups, d_state]
    D_ptr: Pointer  # [num_heads, head_dim] or None
    z_ptr: Pointer  # [num_tokens, num_heads, head_dim] or None
    dt_bias_ptr: Pointer  # [num_heads] or [num_heads, head_dim], or None


class StateInputs(NamedTuple):
    """The inputs that states depend on, of a layer with a decay rate for each head."""

    x_ptr: Pointer  # [num_tokens, num_heads, head_dim]
    dt_ptr: Pointer  # [num_tokens, num_heads]
    A_ptr: Pointer  # f32[num_heads]
    B_ptr: Pointer  # [num_tokens, num_groups, d_state]
    dt_bias_ptr: Pointer  # [num_heads] or None


class WeightInputs(NamedTuple):
    """The inputs that weights of earlier tokens depend on, with a decay rate for each head."""

    dt_ptr: Pointer  # [num_tokens, num_heads]
    A_ptr: Pointer  # f32[num_heads]
    B_ptr: Pointer  # [num_tokens, num_groups, d_state]
    C_ptr: Pointer  # [num_tokens, num_groups, d_state]
    dt_bias_ptr: Pointer  # [num_heads] or None


class History(NamedTuple):
    """Inputs of the tokens since the state was written."""

    history_x_ptr: Pointer  # [num_slots, num_heads, history_tokens, head_dim]
    history_dt_ptr: Pointer  # f32[num_slots, num_heads, history_tokens]
    history_B_ptr: Pointer  # [num_slots, num_groups, history_tokens, d_state]


class StepLimits(NamedTuple):
    """Least and greatest step size."""

    dt_min: float
    dt_max: float


STRIDES = {
    "out": ("token", "head"),
    "states": ("slot", "head", "dim"),
    "history_x": ("slot", "head", "token"),
    "history_dt": ("slot", "head"),
    "history_B": ("slot", "group", "token"),
    "x": ("token", "head"),
    "dt": ("token", "head"),
    "B": ("token", "group"),
    "C": ("token", "group"),
    "D": ("head", "dim"),
    "z": ("token", "head"),
    "dt_bias": ("head",),
}
"""Tensor -> dimensions of which kernels take strides. See `addressing.named_strides`."""
