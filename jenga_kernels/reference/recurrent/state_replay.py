"""Reference of `jenga_kernels.state_replay`."""

import torch

from jenga_kernels.checks.histories import InputHistory
from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.reference.recurrent.state_update import apply_token, initial_state, step_sizes


def state_replay(
    out: torch.Tensor,
    states: torch.Tensor,
    history: InputHistory,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    slots: torch.Tensor,
    computed_tokens: torch.Tensor,
    state_tokens: torch.Tensor,
    next_state_tokens: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    query_starts: torch.Tensor | None = None,
    writes_states: bool = False,  # noqa: ARG001 - the counts say so too
) -> None:
    """Apply each request's next tokens to a state that is seldom written; see the operation."""
    steps = step_sizes(dt, dt_bias, dt_softplus=dt_softplus, dt_limits=dt_limits)
    starts = range(len(x) + 1) if query_starts is None else query_starts.tolist()
    counts = zip(
        slots.tolist(),
        computed_tokens.tolist(),
        state_tokens.tolist(),
        next_state_tokens.tolist(),
        strict=True,
    )
    for request, (slot, computed, stored, stored_next) in enumerate(counts):
        tokens = range(starts[request], starts[request + 1])
        if slot <= NULL_SLOT:
            out[tokens.start : tokens.stop] = 0
            continue
        h = initial_state(states, slot if stored else NULL_SLOT)
        past = [history.x[slot], history.dt[slot], history.B[slot]]
        past_x, past_steps, past_B = (inputs.transpose(0, 1) for inputs in past)
        nowhere = torch.empty_like(past_x)
        for token in range(stored, computed):
            row = token % len(past_x)
            apply_token(h, nowhere, past_x, past_steps, A, past_B, past_B, None, None, row)
        if stored < stored_next == computed:
            states[slot] = h.to(states.dtype)
        for number, token in enumerate(tokens, start=computed):
            apply_token(h, out, x, steps, A, B, C, D, z, token)
            if number + 1 == stored_next:
                states[slot] = h.to(states.dtype)
            elif number >= stored_next:
                row = number % len(past_x)
                past_x[row] = x[token]
                past_steps[row] = steps[token]
                past_B[row] = B[token]
