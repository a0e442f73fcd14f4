"""Reference of `jenga_kernels.state_scan`: the recurrence, token by token."""

import torch

from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from jenga_kernels.reference.recurrent.state_update import apply_token, initial_state, step_sizes


def state_scan(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    query_starts: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    checkpoints: Checkpoints | None = None,
    allow_tf32: bool = False,  # noqa: ARG001 - products here are exact
    longest_tokens: int | None = None,  # noqa: ARG001 - nothing here is cut
    segment_tokens: int | None = None,  # noqa: ARG001
    is_warp_specialized: bool | None = None,  # noqa: ARG001 - there is one kernel
    is_portable: bool = False,  # noqa: ARG001
    compile_ahead: bool = False,  # noqa: ARG001
) -> None:
    """Scan requests' tokens and write the states asked for; see the operation for the arguments."""
    steps = step_sizes(dt, dt_bias, dt_softplus=dt_softplus, dt_limits=dt_limits)
    starts = query_starts.tolist()
    begun = [initial_state(states, slot) for slot in initial_slots.tolist()]
    for request, slot in enumerate(state_slots.tolist()):
        start, end = starts[request], starts[request + 1]
        if slot <= NULL_SLOT:
            out[start:end] = 0
            continue
        kept = checkpoints_of(checkpoints, request)
        h = begun[request]
        for token in range(start, end):
            apply_token(h, out, x, steps, A, B, C, D, z, token)
            checkpoint_slot = kept.get(token + 1 - start, NULL_SLOT)
            if checkpoint_slot > NULL_SLOT:
                states[checkpoint_slot] = h.to(states.dtype)
        states[slot] = h.to(states.dtype)


def checkpoints_of(checkpoints: Checkpoints | None, request: int) -> dict[int, int]:
    """Slots of a request's checkpoints, by the number of tokens that they come after."""
    if checkpoints is None:
        return {}
    start, end = checkpoints.starts[request : request + 2].tolist()
    after_tokens = checkpoints.after_tokens[start:end].tolist()
    return dict(zip(after_tokens, checkpoints.slots[start:end].tolist(), strict=True))
