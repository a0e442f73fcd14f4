"""Reference of `jenga_kernels.causal_conv`."""

import torch

from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from jenga_kernels.reference.recurrent.conv_update import begun_inputs, convolved, keep_in_ring
from jenga_kernels.reference.recurrent.state_scan import checkpoints_of


def causal_conv(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    query_starts: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu: bool = True,
    checkpoints: Checkpoints | None = None,
    computed_tokens: torch.Tensor | None = None,
    input_gates: torch.Tensor | None = None,
    output_gates: torch.Tensor | None = None,
) -> None:
    """Convolve requests' tokens and keep the last inputs; see the operation for the arguments."""
    width = weight.shape[1]
    x = x if input_gates is None else x * input_gates
    starts = query_starts.tolist()
    begun = begun_inputs(states, initial_slots, width, computed_tokens)
    for request, slot in enumerate(state_slots.tolist()):
        start, end = starts[request], starts[request + 1]
        if slot <= NULL_SLOT:
            out[start:end] = 0
            continue
        before = begun[request]
        inputs = torch.cat([before, x[start:end].T.to(before.dtype)], dim=1)
        y = convolved(inputs, weight, bias, silu=silu).T
        if output_gates is not None:
            y = y * output_gates[start:end]
        out[start:end] = y.to(out.dtype)
        kept = checkpoints_of(checkpoints, request)
        for after, kept_slot in [*kept.items(), (end - start, slot)]:
            if kept_slot > NULL_SLOT and computed_tokens is not None:
                num_before = int(computed_tokens[request]) + after - (width - 1)
                last = inputs[:, max(after, after - num_before) : after + width - 1]
                nothing = last.new_empty(len(last), width - 1)
                keep_in_ring(
                    states[kept_slot], torch.cat([nothing, last], 1), max(0, num_before), width
                )
            elif kept_slot > NULL_SLOT:
                states[kept_slot, :, : width - 1] = inputs[:, after : after + width - 1].to(
                    states.dtype
                )
