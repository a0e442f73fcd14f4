"""Reference of `jenga_kernels.state_update`, and the recurrence that scans share with it."""

import torch
from torch.nn import functional

from jenga_kernels.checks.states import NULL_SLOT


def state_update(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    query_starts: torch.Tensor | None = None,
) -> None:
    """Apply each request's next tokens to its state; see the operation for the arguments."""
    steps = step_sizes(dt, dt_bias, dt_softplus=dt_softplus, dt_limits=dt_limits)
    slots = by_token(state_slots).tolist()
    starts = range(len(x) + 1) if query_starts is None else query_starts.tolist()
    begun = [initial_state(states, slot) for slot in initial_slots.tolist()]
    for request, h in enumerate(begun):
        tokens = range(starts[request], starts[request + 1])
        if slots[request][0] <= NULL_SLOT:
            out[tokens.start : tokens.stop] = 0
            continue
        for token, slot in zip(tokens, slots[request], strict=False):
            apply_token(h, out, x, steps, A, B, C, D, z, token)
            if slot > NULL_SLOT:
                states[slot] = h.to(states.dtype)


def precision(tensor: torch.Tensor) -> torch.dtype:
    """Element type to compute in: float32, or the tensor's own if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def by_token(state_slots: torch.Tensor) -> torch.Tensor:
    """View slots with a column for each token of a request, [num_requests, max_tokens]."""
    return state_slots[:, None] if state_slots.dim() == 1 else state_slots


def initial_state(states: torch.Tensor, slot: int) -> torch.Tensor:
    """Copy the state in a slot; zeros for the null slot."""
    h = torch.zeros_like(states[0]) if slot <= NULL_SLOT else states[slot].clone()
    return h.to(precision(states))


def step_sizes(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    *,
    dt_softplus: bool,
    dt_limits: tuple[float, float],
) -> torch.Tensor:
    """Compute step sizes from projected ones, shape of dt."""
    steps = dt.to(precision(dt))
    if dt_bias is not None:
        steps = steps + dt_bias
    if dt_softplus:
        steps = functional.softplus(steps)
    return steps.clamp(*dt_limits)


def apply_token(
    h: torch.Tensor,
    out: torch.Tensor,
    x: torch.Tensor,
    steps: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    token: int,
) -> None:
    """Apply one token to the states of all heads, [num_heads, head_dim, d_state], in place."""
    num_heads, head_dim, _ = h.shape
    heads_per_group = num_heads // B.shape[1]
    b = B[token].repeat_interleave(heads_per_group, 0).to(h.dtype)  # [num_heads, d_state]
    c = C[token].repeat_interleave(heads_per_group, 0).to(h.dtype)
    x_t = x[token].to(h.dtype)  # [num_heads, head_dim]
    step = steps[token].reshape(num_heads, -1).to(h.dtype)  # [num_heads, head_dim or 1]
    rates = A.reshape(num_heads, -1, A.shape[-1] if A.dim() > 1 else 1)
    h.mul_(torch.exp(step[:, :, None] * rates))
    h.add_((step * x_t)[:, :, None] * b[:, None, :])
    y = (h * c[:, None, :]).sum(-1)
    if D is not None:
        y = y + D.reshape(num_heads, -1).expand(num_heads, head_dim) * x_t
    if z is not None:
        y = y * functional.silu(z[token].to(h.dtype))
    out[token] = y.to(out.dtype)
