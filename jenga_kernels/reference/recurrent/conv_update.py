"""Reference of `jenga_kernels.conv_update`, and the convolution it shares with `causal_conv`."""

import torch
from torch.nn import functional

from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.reference.recurrent.state_update import by_token, precision


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
    computed_tokens: torch.Tensor | None = None,
    input_gates: torch.Tensor | None = None,
    output_gates: torch.Tensor | None = None,
) -> None:
    """Convolve each request's next tokens; see the operation for the arguments."""
    width = weight.shape[1]
    x = x if input_gates is None else x * input_gates
    slots = by_token(state_slots).tolist()
    starts = range(len(x) + 1) if query_starts is None else query_starts.tolist()
    begun = begun_inputs(states, initial_slots, width, computed_tokens)
    for request, before in enumerate(begun):
        start, end = starts[request], starts[request + 1]
        if slots[request][0] <= NULL_SLOT:
            out[start:end] = 0
            continue
        inputs = torch.cat([before, x[start:end].T.to(before.dtype)], dim=1)
        y = convolved(inputs, weight, bias, silu=silu).T
        if output_gates is not None:
            y = y * output_gates[start:end]
        out[start:end] = y.to(out.dtype)
        if computed_tokens is not None:
            keep_in_ring(states[slots[request][0]], inputs, int(computed_tokens[request]), width)
            continue
        for token, slot in zip(range(end - start), slots[request], strict=False):
            if slot > NULL_SLOT:
                kept = inputs[:, token + 1 : token + width]
                states[slot, :, : width - 1] = kept.to(states.dtype)


def begun_inputs(
    states: torch.Tensor,
    initial_slots: torch.Tensor,
    width: int,
    computed_tokens: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Copy the inputs before each request's tokens, [dim, width - 1] each; zeros if none."""
    begun: list[torch.Tensor] = []
    for request, slot in enumerate(initial_slots.tolist()):
        computed = width - 1 if computed_tokens is None else int(computed_tokens[request])
        kept = torch.zeros_like(states[0, :, : width - 1], dtype=precision(states))
        for column in range(width - 1) if slot > NULL_SLOT else ():
            token = computed - (width - 1) + column
            if token >= 0:
                kept[:, column] = states[slot, :, token % states.shape[2]]
        begun.append(kept)
    return begun


def keep_in_ring(ring: torch.Tensor, inputs: torch.Tensor, computed: int, width: int) -> None:
    """Write a call's inputs [dim, width - 1 + num_tokens] to a ring [dim, num_columns]."""
    for index in range(width - 1, inputs.shape[1]):
        ring[:, (computed + index - (width - 1)) % ring.shape[1]] = inputs[:, index].to(ring.dtype)


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool
) -> torch.Tensor:
    """Compute outputs [dim, num_tokens] from inputs [dim, width - 1 + num_tokens]."""
    width = weight.shape[1]
    num_tokens = inputs.shape[1] - (width - 1)
    y = torch.zeros_like(inputs[:, :num_tokens])
    for tap in range(width):
        y = y + inputs[:, tap : tap + num_tokens] * weight[:, tap, None]
    if bias is not None:
        y = y + bias[:, None]
    return functional.silu(y) if silu else y
