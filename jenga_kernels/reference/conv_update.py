"""Reference of `jenga_kernels.conv_update`, and the convolution it shares with `causal_conv`."""

import torch
from torch.nn import functional

from jenga_kernels.reference.state_update import precision
from jenga_kernels.states import NULL_SLOT


def conv_update(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu: bool = True,
    query_starts: torch.Tensor | None = None,
) -> None:
    """Convolve each request's next tokens; see the operation for the arguments."""
    width = weight.shape[1]
    slots = state_slots.reshape(len(state_slots), -1).tolist()
    starts = range(len(x) + 1) if query_starts is None else query_starts.tolist()
    begun = [initial_inputs(states, slot, width) for slot in initial_slots.tolist()]
    for request, before in enumerate(begun):
        start, end = starts[request], starts[request + 1]
        if slots[request][0] <= NULL_SLOT:
            out[start:end] = 0
            continue
        inputs = torch.cat([before, x[start:end].T.to(before.dtype)], dim=1)
        out[start:end] = convolved(inputs, weight, bias, silu=silu).T.to(out.dtype)
        for token, slot in zip(range(end - start), slots[request], strict=False):
            if slot > NULL_SLOT:
                kept = inputs[:, token + 1 : token + width]
                states[slot, :, : width - 1] = kept.to(states.dtype)


def initial_inputs(states: torch.Tensor, slot: int, width: int) -> torch.Tensor:
    """A copy of the inputs kept in a slot, [dim, width - 1], or zeros."""
    kept = states[max(slot, NULL_SLOT), :, : width - 1].to(precision(states), copy=True)
    return kept if slot > NULL_SLOT else torch.zeros_like(kept)


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool
) -> torch.Tensor:
    """Outputs [dim, num_tokens] of inputs [dim, width - 1 + num_tokens]."""
    width = weight.shape[1]
    num_tokens = inputs.shape[1] - (width - 1)
    y = torch.zeros_like(inputs[:, :num_tokens])
    for tap in range(width):
        y = y + inputs[:, tap : tap + num_tokens] * weight[:, tap, None]
    if bias is not None:
        y = y + bias[:, None]
    return functional.silu(y) if silu else y
