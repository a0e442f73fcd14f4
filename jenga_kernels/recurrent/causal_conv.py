"""The short causal convolution of a recurrent layer over prompts, with states in pages."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.states import (
    Checkpoints,
    check_computed_tokens,
    check_convolution,
    check_no_overlap,
    check_prompts,
    checkpoint_tensors,
)
from jenga_kernels.checks.tensors import check_same_device, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.recurrent import causal_conv as reference
from jenga_kernels.triton.conv.causal_conv import causal_conv_kernel
from jenga_kernels.triton.conv.groups import STRIDES
from jenga_kernels.triton.lib.addressing import alignment, named_strides, strides
from jenga_kernels.triton.lib.tiles import machine_of, power_of_two
from jenga_kernels.triton.recurrent.tiles import conv_tiles

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `causal_conv`, in the same order, with the tensors of the checkpoints."""

    out: torch.Tensor
    states: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    query_starts: torch.Tensor
    initial_slots: torch.Tensor
    state_slots: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    checkpoint_starts: torch.Tensor | None
    checkpoint_after: torch.Tensor | None
    checkpoint_slots: torch.Tensor | None
    computed_tokens: torch.Tensor | None
    input_gates: torch.Tensor | None
    output_gates: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


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
    given = (
        out,
        states,
        x,
        weight,
        query_starts,
        initial_slots,
        state_slots,
        bias,
        silu,
        *checkpoint_tensors(checkpoints),
        computed_tokens,
        input_gates,
        output_gates,
    )
    call = call_like(_calls, *given)
    if call.launches is None or shows_values(x):  # on a CPU, values are checked in every call
        call.launches = _launches(_Arguments(*given), checkpoints)
    # A call's signature does not say where tensors lie.
    for name, rows in (("x", x), ("input_gates", input_gates), ("output_gates", output_gates)):
        if rows is not None:
            check_no_overlap("out", out, name, rows)
    call.run(dict(zip(_POINTERS, given, strict=True)))


def _launches(given: _Arguments, checkpoints: Checkpoints | None) -> list[Launch]:
    """Check a call, and list the launches that serve its prompts.

    Raises:
        ValueError: If something does not fit.
    """
    check_convolution(
        given.out,
        given.states,
        given.x,
        given.weight,
        bias=given.bias,
        input_gates=given.input_gates,
        output_gates=given.output_gates,
    )
    inputs = [rows for rows in (given.x, given.input_gates, given.output_gates) if rows is not None]
    num_tokens, dim = given.x.shape
    num_requests = check_prompts(
        given.query_starts,
        given.initial_slots,
        given.state_slots,
        checkpoints,
        num_tokens=num_tokens,
        num_slots=given.states.shape[0],
    )
    if given.computed_tokens is not None:
        check_computed_tokens(given.computed_tokens, num_requests)
    check_same_device(
        x=given.x, query_starts=given.query_starts, computed_tokens=given.computed_tokens
    )
    if num_requests == 0:
        return []
    width = given.weight.shape[1]
    tiles = conv_tiles(machine_of(given.x.device), dim)
    blocks = num_tokens // tiles.block_tokens + num_requests
    constants = {
        "num_requests": num_requests,
        **named_strides(given._asdict(), STRIDES),
        "stride_weight_dim": given.weight.stride(0),
        "stride_weight_column": given.weight.stride(1),
        "stride_initial": given.initial_slots.stride(0),
        "stride_slots": given.state_slots.stride(0),
        "stride_computed": 0 if given.computed_tokens is None else given.computed_tokens.stride(0),
        "stride_input_gates": 0 if given.input_gates is None else strides(given.input_gates)[0],
        "stride_output_gates": 0 if given.output_gates is None else strides(given.output_gates)[0],
        "DIM": dim,
        "WIDTH": width,
        "NUM_COLUMNS": None if given.computed_tokens is None else given.states.shape[2],
        "IS_SILU": given.silu,
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
