"""Reference of `jenga_kernels.delta_replay`."""

import math

import torch

from jenga_kernels.checks.histories import DeltaHistory
from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.reference.recurrent.delta_update import (
    NORM_EPSILON,
    apply_change,
    delta_steps,
)
from jenga_kernels.reference.recurrent.state_update import initial_state, precision


def delta_replay(
    out: torch.Tensor,
    states: torch.Tensor,
    history: DeltaHistory,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    slots: torch.Tensor,
    computed_tokens: torch.Tensor,
    state_tokens: torch.Tensor,
    next_state_tokens: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    query_starts: torch.Tensor | None = None,
    writes_states: bool = False,  # noqa: ARG001 - the counts say so too
) -> None:
    """Apply each request's next tokens to a state that is seldom written; see the operation."""
    steps = delta_steps(
        q, k, v, gates, betas, A_log=A_log, dt_bias=dt_bias, scale=scale, qk_l2norm=qk_l2norm
    )
    heads_per_group = v.shape[1] // k.shape[1]
    lengths = torch.ones_like(steps.betas)
    if qk_l2norm:
        squares = k.to(precision(v)).square().sum(-1)
        lengths = torch.rsqrt(squares + NORM_EPSILON).repeat_interleave(heads_per_group, 1)
    log2_decays = steps.log_decays / math.log(2)
    starts = range(len(v) + 1) if query_starts is None else query_starts.tolist()
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
        rows = [history.changes[slot], history.keys[slot], history.decays[slot]]
        changes, keys, decays = (part.transpose(0, 1) for part in rows)
        for token in range(stored, computed):
            row = token % len(keys)
            decay = decays[row].to(h.dtype).exp2()
            key = keys[row].to(h.dtype).repeat_interleave(heads_per_group, 0)
            h.mul_(decay.reshape(len(decay), 1, -1))
            h.add_(changes[row].to(h.dtype)[:, :, None] * key[:, None, :])
        if stored < stored_next == computed:
            states[slot] = h.to(states.dtype)
        for number, token in enumerate(tokens, start=computed):
            change = apply_change(h, steps, token)
            out[token] = (h * steps.q[token].to(h.dtype)[:, None, :]).sum(-1).to(out.dtype)
            if number + 1 == stored_next:
                states[slot] = h.to(states.dtype)
            elif number >= stored_next:
                row = number % len(keys)
                changes[row] = (change * lengths[token].to(h.dtype)[:, None]).to(changes.dtype)
                keys[row] = k[token]
                decays[row] = log2_decays[token].reshape(decays[row].shape)
