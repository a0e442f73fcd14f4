"""One step, or a few, of the gated delta rule, with states in pages."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.delta import check_delta_rule, has_channel_decays
from jenga_kernels.checks.states import check_slots_apart, check_steps
from jenga_kernels.checks.tensors import check_same_device, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.recurrent import delta_update as reference
from jenga_kernels.triton.delta.groups import STRIDES
from jenga_kernels.triton.delta.tiles import delta_update_tiles
from jenga_kernels.triton.delta.update import delta_update_kernel
from jenga_kernels.triton.lib.addressing import named_strides
from jenga_kernels.triton.lib.tiles import machine_of, power_of_two

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `delta_update`, in the same order."""

    out: torch.Tensor
    states: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: torch.Tensor
    betas: torch.Tensor
    initial_slots: torch.Tensor
    state_slots: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    scale: float | None
    qk_l2norm: bool
    query_starts: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.delta_update)
def delta_update(
    out: torch.Tensor,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    query_starts: torch.Tensor | None = None,
) -> None:
    """Apply the next token of each request, or the next few, to its state.

    The rule and its tensors are those of `jenga_kernels.delta_scan`. If a call has
    several tokens and some may be rejected, each token's state goes to a slot of its own. The next
    call begins at the slot of the last accepted token.

    Requests whose first state slot is `NULL_SLOT` are padding: their output is zero, and nothing
    else is read or written. No request may write a slot that another one reads or writes.

    Args:
        out: Outputs, written in place, shape and dtype of v.
        states: States, written in place, [num_slots, num_v_heads, head_v_dim, head_k_dim],
            bfloat16, float16 or float32; any strides that are multiples of 16 bytes, last dimension
            contiguous.
        q: Queries, [num_tokens, num_qk_heads, head_k_dim], dtype of v; the value heads that share
            one are next to each other. At most 128 elements a head.
        k: Keys, shape and dtype of q.
        v: Values, [num_tokens, num_v_heads, head_v_dim], bfloat16, float16 or float32.
        gates: Natural logarithms of the decays, [num_tokens, num_v_heads], or [num_tokens,
            num_v_heads, head_k_dim] if every key channel has its own decay; at most 0. With A_log
            they are projections, and the logarithms are -exp(A_log) softplus(gates + dt_bias).
        betas: Degree to which a value replaces the one that the state holds under its key,
            [num_tokens, num_v_heads]. With A_log they are projections, which pass through a
            sigmoid.
        initial_slots: Slot from which each request's state is read, i32[num_requests]; `NULL_SLOT`
            begins with zero.
        state_slots: Slot to which the state after each token is written, i32[num_requests] or
            i32[num_requests, max_tokens]; `NULL_SLOT` drops it.
        A_log: Logarithms of the decay rates, [num_v_heads]. None means that gates and betas are
            not projections.
        dt_bias: Bias that is added to gates, shape of one token's gates.
        scale: Factor of the queries. None means head_k_dim ** -0.5.
        qk_l2norm: Whether queries and keys are scaled to length one.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1], at most max_tokens each. None means one token each.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    given = (
        out,
        states,
        q,
        k,
        v,
        gates,
        betas,
        initial_slots,
        state_slots,
        A_log,
        dt_bias,
        scale,
        qk_l2norm,
        query_starts,
    )
    call = call_like(_calls, *given)
    if call.launches is None or shows_values(v):  # on a CPU, values are checked in every call
        call.launches = _launches(_Arguments(*given))
    call.run(dict(zip(_POINTERS, given, strict=True)))


def _launches(given: _Arguments) -> list[Launch]:
    """Check a call, and list the launches of a step.

    Raises:
        ValueError: If something does not fit.
    """
    scale = check_delta_rule(
        given.out,
        given.states,
        given.q,
        given.k,
        given.v,
        given.gates,
        given.betas,
        A_log=given.A_log,
        dt_bias=given.dt_bias,
        scale=given.scale,
    )
    num_tokens, num_v_heads, head_v_dim = given.v.shape
    _, num_qk_heads, head_k_dim = given.q.shape
    slots = check_steps(
        given.initial_slots,
        given.state_slots,
        given.query_starts,
        num_tokens,
        given.states.shape[0],
    )
    check_same_device(
        v=given.v,
        initial_slots=given.initial_slots,
        state_slots=given.state_slots,
        query_starts=given.query_starts,
    )
    check_slots_apart(given.initial_slots, slots, query_starts=given.query_starts)
    num_requests = slots.shape[0]
    if num_requests == 0 or num_tokens == 0:
        return []
    tiles = delta_update_tiles(
        machine_of(given.v.device), head_k_dim, head_v_dim, given.states.element_size()
    )
    constants = {
        "scale": scale,
        **named_strides(given._asdict(), STRIDES),
        "stride_initial": given.initial_slots.stride(0),
        "stride_slots_request": slots.stride(0),
        "stride_slots_token": slots.stride(1),
        "HEADS_PER_GROUP": num_v_heads // num_qk_heads,
        "HEAD_K_DIM": head_k_dim,
        "HEAD_V_DIM": head_v_dim,
        "IS_PER_CHANNEL": has_channel_decays(given.gates),
        "IS_NORMALIZED": given.qk_l2norm,
        "BLOCK_K": power_of_two(head_k_dim),
        "BLOCK_V": tiles.block_values,
        "BLOCK_LINE": tiles.block_line,
        "num_warps": 1,
        "enable_fp_fusion": True,
    }
    grid = (triton.cdiv(head_v_dim, tiles.block_values) * num_v_heads, num_requests)
    return [Launch(kernel=delta_update_kernel, grid=grid, constants=constants)]
