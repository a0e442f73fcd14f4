"""Reference of `jenga_kernels.delta_update`, and the rule that scans share with it."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.reference.recurrent.state_update import by_token, initial_state, precision

NORM_EPSILON = 1e-6
"""Number added to a squared length before its root."""


def delta_update(
    out: torch.Tensor,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    query_starts: torch.Tensor | None = None,
) -> None:
    """Apply each request's next tokens to its state; see the operation for the arguments."""
    steps = delta_steps(
        q, k, v, gates, betas, A_log=A_log, dt_bias=dt_bias, scale=scale, qk_l2norm=qk_l2norm
    )
    slots = by_token(state_slots).tolist()
    starts = range(len(v) + 1) if query_starts is None else query_starts.tolist()
    begun = [initial_state(states, slot) for slot in initial_slots.tolist()]
    for request, h in enumerate(begun):
        tokens = range(starts[request], starts[request + 1])
        if slots[request][0] <= NULL_SLOT:
            out[tokens.start : tokens.stop] = 0
            continue
        for token, slot in zip(tokens, slots[request], strict=False):
            out[token] = apply_token(h, steps, token).to(out.dtype)
            if slot > NULL_SLOT:
                states[slot] = h.to(states.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSteps:
    """Inputs of the rule for each token, each tensor in at least float32.

    Attributes:
        q: Queries times scale, [num_tokens, num_v_heads, head_k_dim].
        k: Keys, shape of q.
        v: Values, [num_tokens, num_v_heads, head_v_dim].
        log_decays: Natural logarithms of factors of the state, [num_tokens, num_v_heads, 1 or
            head_k_dim].
        betas: Degrees to which values replace those of the state, [num_tokens, num_v_heads].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decays: torch.Tensor
    betas: torch.Tensor

    @property
    def decays(self) -> torch.Tensor:
        """Factors of the state, shape of log_decays."""
        return self.log_decays.exp()


def delta_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> DeltaSteps:
    """Compute everything that tokens need except the state."""
    dtype = precision(v)
    q, k, v, betas = (tensor.to(dtype) for tensor in (q, k, v, betas))
    gates = gates.to(dtype) if gates.dim() > betas.dim() else gates.to(dtype)[..., None]
    if qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON) for x in (q, k))
    if A_log is not None:
        if dt_bias is not None:
            gates = gates + dt_bias.to(dtype).reshape(gates.shape[1], -1)
        gates = -A_log.to(dtype).exp()[:, None] * functional.softplus(gates)
        betas = betas.sigmoid()
    heads_per_group = v.shape[1] // q.shape[1]
    return DeltaSteps(
        q=q.repeat_interleave(heads_per_group, 1) * (scale or q.shape[-1] ** -0.5),
        k=k.repeat_interleave(heads_per_group, 1),
        v=v,
        log_decays=gates,
        betas=betas,
    )


def apply_token(h: torch.Tensor, steps: DeltaSteps, token: int) -> torch.Tensor:
    """Apply a token to the states of all heads, [num_v_heads, head_v_dim, head_k_dim], in place.

    Returns:
        Its output, [num_v_heads, head_v_dim].
    """
    apply_change(h, steps, token)
    return (h * steps.q[token].to(h.dtype)[:, None, :]).sum(-1)


def apply_change(h: torch.Tensor, steps: DeltaSteps, token: int) -> torch.Tensor:
    """Apply a token to the states of all heads, [num_v_heads, head_v_dim, head_k_dim], in place.

    Returns:
        Its change under its key, [num_v_heads, head_v_dim].
    """
    k, v = (tensor[token].to(h.dtype) for tensor in (steps.k, steps.v))
    h.mul_(steps.log_decays[token].to(h.dtype).exp()[:, None, :])
    held = (h * k[:, None, :]).sum(-1)
    change = steps.betas[token].to(h.dtype)[:, None] * (v - held)
    h.add_(change[:, :, None] * k[:, None, :])
    return change
