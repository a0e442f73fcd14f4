"""A step, or a few, of the short causal convolution of a recurrent layer, with states in pages."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.states import (
    check_convolution,
    check_ring,
    check_slots_apart,
    check_steps,
)
from jenga_kernels.checks.tensors import check_same_device, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.recurrent import conv_update as reference
from jenga_kernels.triton.conv.conv_update import conv_update_kernel
from jenga_kernels.triton.conv.groups import STRIDES
from jenga_kernels.triton.lib.addressing import alignment, named_strides, strides
from jenga_kernels.triton.lib.tiles import machine_of
from jenga_kernels.triton.recurrent.tiles import conv_update_tiles

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `conv_update`, in the same order."""

    out: torch.Tensor
    states: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    initial_slots: torch.Tensor
    state_slots: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    query_starts: torch.Tensor | None
    computed_tokens: torch.Tensor | None
    input_gates: torch.Tensor | None
    output_gates: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.conv_update)
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
    """Convolve the next token of each request, or the next few, with the inputs before them.

    If a call has several tokens and some may be rejected, each token's state goes to a slot of its
    own. The next call begins at the slot of the last accepted token.

    Requests whose first state slot is `NULL_SLOT` are padding: their output is zero, and nothing
    else is read or written. No request may write a slot that another one reads or writes.

    Args:
        out: Outputs, written in place, shape and dtype of x; may be x.
        states: States, written in place, [num_slots, dim, width - 1] or more columns, of which the
            first width - 1 are used, oldest input first (but see computed_tokens); bfloat16,
            float16 or float32, any strides.
        x: Inputs, [num_tokens, dim], bfloat16, float16 or float32, last dimension contiguous.
        weight: Weights, [dim, width] with width 2 to 4; the last column is that of the token
            itself.
        initial_slots: Slot from which each request's state is read, i32[num_requests]; `NULL_SLOT`
            begins with zero.
        state_slots: Slot to which the state after each token is written, i32[num_requests] or
            i32[num_requests, max_tokens]; `NULL_SLOT` drops it.
        bias: Bias that is added to every output, [dim].
        silu: Whether outputs pass through SiLU.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1], at most max_tokens each. None means one token each.
        computed_tokens: Number of tokens of each request before this call, i32[num_requests]. If
            given, states are rings: column t % num_columns holds the input of token t. A ring has
            at least width - 2 columns, plus the most tokens of a call. A request then has one slot,
            the same in initial_slots and state_slots, both i32[num_requests]. Nothing is read from
            the slot before the request's first token. A rejected token is overwritten by the next
            call, which has fewer computed tokens.
        input_gates: Factors of x, whose product is rounded to the dtype of x; shape and dtype of x,
            last dimension contiguous.
        output_gates: Factors of the outputs, applied after SiLU; shape, dtype and layout as for
            input_gates.

    Raises:
        ValueError: If a shape, dtype, stride or device does not fit.
    """
    given = (
        out,
        states,
        x,
        weight,
        initial_slots,
        state_slots,
        bias,
        silu,
        query_starts,
        computed_tokens,
        input_gates,
        output_gates,
    )
    call = call_like(_calls, *given)
    if call.launches is None or shows_values(x):  # on a CPU, values are checked in every call
        call.launches = _launches(_Arguments(*given))
    call.run(dict(zip(_POINTERS, given, strict=True)))


def _launches(given: _Arguments) -> list[Launch]:
    """Check a call, and list the launches of a step.

    Raises:
        ValueError: If something does not fit.
    """
    state_slots = given.state_slots
    check_convolution(
        given.out,
        given.states,
        given.x,
        given.weight,
        bias=given.bias,
        input_gates=given.input_gates,
        output_gates=given.output_gates,
    )
    num_tokens, dim = given.x.shape
    check_same_device(
        x=given.x,
        initial_slots=given.initial_slots,
        state_slots=state_slots,
        query_starts=given.query_starts,
        computed_tokens=given.computed_tokens,
    )
    if given.computed_tokens is not None:
        check_ring(
            given.states,
            given.weight,
            given.computed_tokens,
            given.initial_slots,
            state_slots,
            query_starts=given.query_starts,
            num_tokens=num_tokens,
        )
        state_slots = state_slots[:, None].expand(-1, given.states.shape[2])
    slots = check_steps(
        given.initial_slots, state_slots, given.query_starts, num_tokens, given.states.shape[0]
    )
    check_slots_apart(given.initial_slots, slots, query_starts=given.query_starts)
    num_requests = slots.shape[0]
    if num_requests == 0 or num_tokens == 0:
        return []
    width = given.weight.shape[1]
    inputs = [rows for rows in (given.x, given.input_gates, given.output_gates) if rows is not None]
    tiles = conv_update_tiles(machine_of(given.x.device), dim)
    constants = {
        **named_strides(given._asdict(), STRIDES),
        "stride_weight_dim": given.weight.stride(0),
        "stride_weight_column": given.weight.stride(1),
        "stride_initial": given.initial_slots.stride(0),
        "stride_slots_request": slots.stride(0),
        "stride_slots_token": slots.stride(1),
        "stride_computed": 0 if given.computed_tokens is None else given.computed_tokens.stride(0),
        "stride_input_gates": 0 if given.input_gates is None else strides(given.input_gates)[0],
        "stride_output_gates": 0 if given.output_gates is None else strides(given.output_gates)[0],
        "DIM": dim,
        "WIDTH": width,
        "NUM_COLUMNS": None if given.computed_tokens is None else given.states.shape[2],
        "IS_SILU": given.silu,
        "X_ALIGNMENT": min(alignment(strides(rows)[0]) for rows in inputs),
        "BLOCK_D": tiles.block_dims,
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
    }
    grid = (triton.cdiv(dim, tiles.block_dims), num_requests)
    return [Launch(kernel=conv_update_kernel, grid=grid, constants=constants)]
