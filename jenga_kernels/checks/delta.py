"""Checks of operations of the gated delta rule."""

import torch

from jenga_kernels.checks.states import check_contiguous_rows, check_not_expanded
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_dtype,
    check_no_gradients,
    check_positive,
    check_rows,
    check_same_device,
    check_shape,
)

MAX_KEY_DIM = 128
"""Greatest head_k_dim. All known models have it; the tiles of wider keys would not fit."""


def has_channel_decays(gates: torch.Tensor) -> bool:
    """Whether every key channel has its own decay.

    Args:
        gates: [num_tokens, num_v_heads] or [num_tokens, num_v_heads, head_k_dim].
    """
    return gates.dim() > 2  # noqa: PLR2004 - tokens, heads, channels


def check_delta_rule(
    out: torch.Tensor,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
) -> float:
    """Check the tensors of a gated delta rule; return the scale.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    check_shape("v", v, (None, None, None))
    num_tokens, num_v_heads, head_v_dim = v.shape
    check_shape("q", q, (num_tokens, None, None))
    _, num_qk_heads, head_k_dim = q.shape
    if num_qk_heads == 0 or num_v_heads % num_qk_heads:
        msg = f"q must have a number of heads that divides v's {num_v_heads}, got {num_qk_heads}"
        raise ValueError(msg)
    if not 1 <= head_k_dim <= MAX_KEY_DIM:
        msg = f"q must have 1 to {MAX_KEY_DIM} elements a head, got {head_k_dim}"
        raise ValueError(msg)
    check_shape("k", k, q.shape)
    check_shape("out", out, v.shape)
    check_shape("states", states, (None, num_v_heads, head_v_dim, head_k_dim))
    per_head = (num_v_heads, head_k_dim) if has_channel_decays(gates) else (num_v_heads,)
    check_shape("gates", gates, (num_tokens, *per_head))
    check_shape("betas", betas, (num_tokens, num_v_heads))
    if A_log is not None:
        check_shape("A_log", A_log, (num_v_heads,))
    if dt_bias is not None:
        if A_log is None:
            msg = "dt_bias must be None without A_log, where gates are ready, got a tensor"
            raise ValueError(msg)
        check_shape("dt_bias", dt_bias, per_head)

    check_dtype("v", v, FLOAT_DTYPES)
    check_dtype("states", states, FLOAT_DTYPES)
    for name, tensor in (("out", out), ("q", q), ("k", k)):
        check_dtype(name, tensor, (v.dtype,))
    weights = {"gates": gates, "betas": betas, "A_log": A_log, "dt_bias": dt_bias}
    for name, tensor in weights.items():
        if tensor is not None:
            check_dtype(name, tensor, FLOAT_DTYPES)

    check_rows("states", states)
    check_not_expanded("states", states)
    check_not_expanded("out", out)
    tensors = {"v": v, "out": out, "q": q, "k": k} | weights
    for name, tensor in tensors.items():
        if tensor is not None:
            check_contiguous_rows(name, tensor)
    check_same_device(**tensors, states=states)
    check_no_gradients(**tensors, states=states)
    if scale is None:
        return head_k_dim**-0.5
    check_positive("scale", scale)
    return scale
