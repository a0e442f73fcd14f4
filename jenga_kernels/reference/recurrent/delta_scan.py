"""Reference of `jenga_kernels.delta_scan`: the rule, token by token."""

import torch

from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from jenga_kernels.plans.delta_plan import DeltaPlan
from jenga_kernels.reference.recurrent.delta_update import apply_token, delta_steps
from jenga_kernels.reference.recurrent.state_scan import checkpoints_of
from jenga_kernels.reference.recurrent.state_update import initial_state


def delta_scan(
    out: torch.Tensor,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    query_starts: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    checkpoints: Checkpoints | None = None,
    is_portable: bool | None = None,  # noqa: ARG001 - there is one kernel
    plan: DeltaPlan | None = None,  # noqa: ARG001 - there is one way
) -> None:
    """Scan requests' tokens and write the states asked for; see the operation for the arguments."""
    steps = delta_steps(
        q, k, v, gates, betas, A_log=A_log, dt_bias=dt_bias, scale=scale, qk_l2norm=qk_l2norm
    )
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
            out[token] = apply_token(h, steps, token).to(out.dtype)
            checkpoint_slot = kept.get(token + 1 - start, NULL_SLOT)
            if checkpoint_slot > NULL_SLOT:
                states[checkpoint_slot] = h.to(states.dtype)
        states[slot] = h.to(states.dtype)
