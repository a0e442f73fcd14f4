"""One step, or a few, of the recurrence of a selective state space model, with states in pages."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.states import (
    check_recurrence,
    check_slots_apart,
    check_steps,
    per_channel,
)
from jenga_kernels.checks.tensors import check_same_device, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.recurrent import state_update as reference
from jenga_kernels.triton.lib.addressing import named_strides
from jenga_kernels.triton.lib.tiles import machine_of, power_of_two
from jenga_kernels.triton.mamba.groups import STRIDES
from jenga_kernels.triton.mamba.update import state_update_kernel
from jenga_kernels.triton.recurrent.tiles import state_update_tiles

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `state_update`, in the same order."""

    out: torch.Tensor
    states: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    initial_slots: torch.Tensor
    state_slots: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool
    dt_limits: tuple[float, float]
    query_starts: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.state_update)
def state_update(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    query_starts: torch.Tensor | None = None,
) -> None:
    """Apply the next token of each request, or the next few, to its state.

    The recurrence and its tensors are those of `jenga_kernels.state_scan`. If a call has
    several tokens and some may be rejected, each token's state goes to a slot of its own. The next
    call begins at the slot of the last accepted token.

    Requests whose first state slot is `NULL_SLOT` are padding: their output is zero, and nothing
    else is read or written. No request may write a slot that another one reads or writes.

    Args:
        out: Outputs, written in place, shape and dtype of x.
        states: States, written in place, [num_slots, num_heads, head_dim, d_state], bfloat16,
            float16 or float32; any strides that are multiples of 16 bytes, last dimension
            contiguous.
        x: Inputs, [num_tokens, num_heads, head_dim], bfloat16, float16 or float32.
        dt: Projected step sizes, [num_tokens, num_heads], or [num_tokens, num_heads, head_dim] if
            A has one per channel.
        A: Decay rates, f32[num_heads], or f32[num_heads, head_dim, d_state]; below 0.
        B: Input projections, [num_tokens, num_groups, d_state], dtype of x; the heads of a group
            are next to each other.
        C: Output projections, shape and dtype of B.
        initial_slots: Slot from which each request's state is read, i32[num_requests]; `NULL_SLOT`
            begins with zero.
        state_slots: Slot to which the state after each token is written, i32[num_requests] or
            i32[num_requests, max_tokens]; `NULL_SLOT` drops it.
        D: Weight of the input itself, [num_heads] or [num_heads, head_dim].
        z: Gates, shape and dtype of x.
        dt_bias: Bias that is added to dt, shape of one token's dt.
        dt_softplus: Whether step sizes pass through softplus.
        dt_limits: Least and greatest step size.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1], at most max_tokens each. None means one token each.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    given = (
        out,
        states,
        x,
        dt,
        A,
        B,
        C,
        initial_slots,
        state_slots,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limits,
        query_starts,
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
    check_recurrence(
        given.out,
        given.states,
        given.x,
        given.dt,
        given.A,
        given.B,
        given.C,
        D=given.D,
        z=given.z,
        dt_bias=given.dt_bias,
        dt_limits=given.dt_limits,
    )
    num_tokens, num_heads, head_dim = given.x.shape
    num_slots, _, _, d_state = given.states.shape
    slots = check_steps(
        given.initial_slots, given.state_slots, given.query_starts, num_tokens, num_slots
    )
    check_same_device(
        x=given.x,
        initial_slots=given.initial_slots,
        state_slots=given.state_slots,
        query_starts=given.query_starts,
    )
    check_slots_apart(given.initial_slots, slots, query_starts=given.query_starts)
    num_requests = slots.shape[0]
    if num_requests == 0 or num_tokens == 0:
        return []
    D = per_channel(given.D, num_heads, head_dim)
    tiles = state_update_tiles(
        machine_of(given.x.device),
        head_dim,
        d_state,
        given.states.element_size(),
        num_states=num_requests * num_heads,
    )
    constants = {
        "dt_min": given.dt_limits[0],
        "dt_max": given.dt_limits[1],
        **named_strides(given._asdict() | {"D": D}, STRIDES),
        "stride_initial": given.initial_slots.stride(0),
        "stride_slots_request": slots.stride(0),
        "stride_slots_token": slots.stride(1),
        "HEADS_PER_GROUP": num_heads // given.B.shape[1],
        "HEAD_DIM": head_dim,
        "D_STATE": d_state,
        "IS_PER_CHANNEL": given.A.dim() > 1,
        "IS_SOFTPLUS": given.dt_softplus,
        "HAS_LIMITS": given.dt_limits != (0.0, float("inf")),
        "BLOCK_P": tiles.block_dims,
        "BLOCK_N": power_of_two(d_state),
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
    }
    grid = (triton.cdiv(head_dim, tiles.block_dims) * num_heads, num_requests)
    return [Launch(kernel=state_update_kernel, grid=grid, constants=constants)]
