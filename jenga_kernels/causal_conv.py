"""The short causal convolution of a recurrent layer over prompts, with states in pages."""

import torch
import triton

from jenga_kernels.checks.states import (
    Checkpoints,
    check_checkpoints,
    check_computed_tokens,
    check_convolution,
    check_no_overlap,
    check_query_starts,
    check_slots,
    check_slots_apart,
    checkpoint_tensors,
)
from jenga_kernels.checks.tensors import check_same_device, check_shape, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, with_reference
from jenga_kernels.reference import causal_conv as reference
from jenga_kernels.triton.conv.causal_conv import causal_conv_kernel
from jenga_kernels.triton.lib.addressing import alignment, strides
from jenga_kernels.triton.lib.tiles import machine_of, power_of_two
from jenga_kernels.triton.recurrent.tiles import conv_tiles

_calls: Calls = {}


@with_reference(reference.causal_conv)
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
    """Convolve requests' tokens, each with the inputs before it, and keep the last inputs.

    The state of a request is its last width - 1 inputs, oldest first. Requests whose state slot is
    `NULL_SLOT` are padding: their output is zero, and nothing else is read or written. No request
    may write a slot that another one reads or writes.

    Args:
        out: Outputs, written in place, shape and dtype of x, not overlapping x.
        states: States, written in place, [num_slots, dim, width - 1] or more columns, of which the
            first width - 1 are used; bfloat16, float16 or float32, any strides.
        x: Inputs, [num_tokens, dim], bfloat16, float16 or float32, last dimension contiguous.
        weight: Weights, [dim, width] with width 2 to 4; the last column is that of the token
            itself.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1].
        initial_slots: Slot from which each request's state is read, i32[num_requests]; `NULL_SLOT`
            begins with zero.
        state_slots: Slot to which each request's last state is written, i32[num_requests].
        bias: Bias that is added to every output, [dim].
        silu: Whether outputs pass through SiLU.
        checkpoints: States to write in addition to the last ones.
        computed_tokens: Number of tokens of each request before this call, i32[num_requests]. If
            given, states are rings: column t % num_columns holds the input of token t. Columns that
            hold none of the last width - 1 inputs are not written.
        input_gates: Factors of x, whose product is rounded to the dtype of x; shape and dtype of x,
            last dimension contiguous, not overlapping out.
        output_gates: Factors of the outputs, applied after SiLU; shape, dtype and layout as for
            input_gates.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    kept = checkpoint_tensors(checkpoints)
    call = call_like(
        _calls,
        out,
        states,
        x,
        weight,
        query_starts,
        initial_slots,
        state_slots,
        bias,
        silu,
        *kept.values(),
        computed_tokens,
        input_gates,
        output_gates,
    )
    if call.launches is None or shows_values(x):  # on a CPU, values are checked in every call
        call.launches = _launches(
            out,
            states,
            x,
            weight,
            query_starts,
            initial_slots,
            state_slots,
            bias=bias,
            silu=silu,
            checkpoints=checkpoints,
            computed_tokens=computed_tokens,
            input_gates=input_gates,
            output_gates=output_gates,
        )
    # A call's signature does not say where tensors lie.
    for name, rows in (("x", x), ("input_gates", input_gates), ("output_gates", output_gates)):
        if rows is not None:
            check_no_overlap("out", out, name, rows)
    call.run(
        {
            "out_ptr": out,
            "states_ptr": states,
            "x_ptr": x,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "query_starts_ptr": query_starts,
            "initial_slots_ptr": initial_slots,
            "state_slots_ptr": state_slots,
            "computed_tokens_ptr": computed_tokens,
            "input_gates_ptr": input_gates,
            "output_gates_ptr": output_gates,
            **kept,
        }
    )


def _launches(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    query_starts: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    silu: bool,
    checkpoints: Checkpoints | None,
    computed_tokens: torch.Tensor | None,
    input_gates: torch.Tensor | None,
    output_gates: torch.Tensor | None,
) -> list[Launch]:
    """Check a call, and list the launches that serve its prompts.

    Raises:
        ValueError: If something does not fit.
    """
    check_convolution(
        out, states, x, weight, bias=bias, input_gates=input_gates, output_gates=output_gates
    )
    inputs = [rows for rows in (x, input_gates, output_gates) if rows is not None]
    num_tokens, dim = x.shape
    num_requests = check_query_starts(query_starts, num_tokens)
    check_shape("initial_slots", initial_slots, (num_requests,))
    check_shape("state_slots", state_slots, (num_requests,))
    check_slots("initial_slots", initial_slots, states.shape[0])
    check_slots("state_slots", state_slots, states.shape[0])
    check_checkpoints(checkpoints, query_starts, states.shape[0])
    if computed_tokens is not None:
        check_computed_tokens(computed_tokens, num_requests)
    check_same_device(
        x=x,
        query_starts=query_starts,
        initial_slots=initial_slots,
        state_slots=state_slots,
        computed_tokens=computed_tokens,
    )
    check_slots_apart(initial_slots, state_slots, checkpoints=checkpoints)
    if num_requests == 0:
        return []
    width = weight.shape[1]
    tiles = conv_tiles(machine_of(x.device), dim)
    blocks = num_tokens // tiles.block_tokens + num_requests
    stride_slot, stride_dim, stride_column = strides(states)
    constants = {
        "num_requests": num_requests,
        "stride_out_token": strides(out)[0],
        "stride_states_slot": stride_slot,
        "stride_states_dim": stride_dim,
        "stride_states_column": stride_column,
        "stride_x_token": strides(x)[0],
        "stride_weight_dim": weight.stride(0),
        "stride_weight_column": weight.stride(1),
        "stride_initial": initial_slots.stride(0),
        "stride_slots": state_slots.stride(0),
        "stride_computed": 0 if computed_tokens is None else computed_tokens.stride(0),
        "stride_input_gates": 0 if input_gates is None else strides(input_gates)[0],
        "stride_output_gates": 0 if output_gates is None else strides(output_gates)[0],
        "DIM": dim,
        "WIDTH": width,
        "NUM_COLUMNS": None if computed_tokens is None else states.shape[2],
        "IS_SILU": silu,
        "X_ALIGNMENT": min(alignment(strides(rows)[0]) for rows in inputs),
        "BLOCK_T": tiles.block_tokens,
        "BLOCK_D": tiles.block_dims,
        "BLOCK_W": power_of_two(width),
        "RUN_TOKENS": tiles.run_tokens,
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
    }
    grid = (triton.cdiv(dim, tiles.block_dims), blocks)
    return [Launch(kernel=causal_conv_kernel, grid=grid, constants=constants)]
