"""The recurrence of a selective state space model for a few tokens, mostly without state writes."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.histories import InputHistory, check_history_part, check_replay
from jenga_kernels.checks.states import (
    check_contiguous_rows,
    check_not_expanded,
    check_recurrence,
    per_channel,
)
from jenga_kernels.checks.tensors import check_dtype, check_same_device, check_shape, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.recurrent import state_replay as reference
from jenga_kernels.triton.lib.addressing import named_strides
from jenga_kernels.triton.lib.tiles import (
    Machine,
    line_elements,
    machine_of,
    overlapping,
    power_of_two,
)
from jenga_kernels.triton.mamba.groups import STRIDES
from jenga_kernels.triton.mamba.replay import state_replay_kernel
from jenga_kernels.triton.mamba.replay_products import state_replay_products_kernel
from jenga_kernels.triton.mamba.replay_token import (
    OTHERS,
    replay_weights_kernel,
    state_replay_token_kernel,
)
from jenga_kernels.triton.mamba.replay_write import state_replay_write_kernel
from jenga_kernels.triton.recurrent.tiles import (
    LEAST_PRODUCT,
    state_replay_tiles,
    state_update_tiles,
    token_replay_tiles,
    write_registers,
)

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `state_replay`, in the same order, with the tensors of the history."""

    out: torch.Tensor
    states: torch.Tensor
    history_x: torch.Tensor
    history_dt: torch.Tensor
    history_B: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    slots: torch.Tensor
    computed_tokens: torch.Tensor
    state_tokens: torch.Tensor
    next_state_tokens: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool
    dt_limits: tuple[float, float]
    query_starts: torch.Tensor | None
    writes_states: bool


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.state_replay)
def state_replay(
    out: torch.Tensor,
    states: torch.Tensor,
    history: InputHistory,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    slots: torch.Tensor,
    computed_tokens: torch.Tensor,
    state_tokens: torch.Tensor,
    next_state_tokens: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    query_starts: torch.Tensor | None = None,
    writes_states: bool = False,
) -> None:
    """Apply the next token of each request, or the next few, to a state that is seldom written.

    The recurrence and its tensors are those of `jenga_kernels.state_update` with a
    decay rate for each head (Mamba-2). That operation reads and writes the whole state for each
    token. This one reads an older state and a history: the inputs of the tokens since then. It
    writes only the inputs of its own tokens to the history. It writes the state only if
    `next_state_tokens` asks for it.

    Tokens may be rejected. The next call then has fewer computed tokens, and overwrites the
    rejected ones in the history.

    Requests whose slot is `NULL_SLOT` are padding: their output is zero, and nothing else is read
    or written. No two requests may have the same slot.

    Args:
        out: Outputs, written in place, shape and dtype of x.
        states: States, written in place, [num_slots, num_heads, head_dim, d_state], bfloat16,
            float16 or float32; any strides that are multiples of 16 bytes, last dimension
            contiguous.
        history: Inputs of recent tokens, written in place; x and B have the dtype of x.
        x: Inputs, [num_tokens, num_heads, head_dim], bfloat16, float16 or float32.
        dt: Projected step sizes, [num_tokens, num_heads].
        A: Decay rates, f32[num_heads]; below 0.
        B: Input projections, [num_tokens, num_groups, d_state], dtype of x; the heads of a group
            are next to each other.
        C: Output projections, shape and dtype of B.
        slots: Slot of each request's state and history, i32[num_requests], any stride.
        computed_tokens: Number of tokens of each request before this call, i32[num_requests].
        state_tokens: Number of them that its state includes, i32[num_requests]. The others are in
            the history. 0 begins with zero, whatever the slot holds.
        next_state_tokens: Number of tokens that its state includes after the call,
            i32[num_requests]. Either state_tokens, and no state is written, or at least
            computed_tokens and at most the end of the call's own tokens. See
            `jenga_kernels.checks.histories.next_states`.
        D: Weight of the input itself, [num_heads] or [num_heads, head_dim].
        z: Gates, shape and dtype of x.
        dt_bias: Bias that is added to dt, [num_heads].
        dt_softplus: Whether step sizes pass through softplus.
        dt_limits: Least and greatest step size.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1]. None means one token each. A call may update the state of a
            request without tokens.
        writes_states: Whether the call writes every state after its token. Every request then has
            one token, query_starts is None, and next_state_tokens is computed_tokens + 1. A kernel
            of its own serves such a call. It does what `state_update` does, after it has added
            the tokens of the history, if there are any.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit; on the CPU also if
            the history does not hold a request's tokens since its state.

    Source: ReplaySSM of vLLM (vllm-project/vllm). Its steps do not write the state. They multiply
        the inputs of the tokens since then with the output projections.
    """
    given = (
        out,
        states,
        history.x,
        history.dt,
        history.B,
        x,
        dt,
        A,
        B,
        C,
        slots,
        computed_tokens,
        state_tokens,
        next_state_tokens,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limits,
        query_starts,
        writes_states,
    )
    call = call_like(_calls, *given)
    if call.launches is None or shows_values(x):  # on a CPU, values are checked in every call
        call.launches = _launches(_Arguments(*given))
    tensors = dict(zip(_POINTERS, given, strict=True))
    if query_starts is None and not writes_states:
        width = _weights_width(history.x.shape[2])
        tensors["weights_ptr"] = x.new_empty(*x.shape[:2], width, dtype=torch.float32)
    call.run(tensors)


def _launches(given: _Arguments) -> list[Launch]:
    """Check a call, and list the launches of a step.

    Raises:
        ValueError: If something does not fit.
    """
    check_shape("A", given.A, (None,))
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
    _check_history(given)
    history_tokens = given.history_x.shape[2]
    num_requests = check_replay(
        given.slots,
        given.query_starts,
        computed_tokens=given.computed_tokens,
        state_tokens=given.state_tokens,
        next_state_tokens=given.next_state_tokens,
        num_tokens=num_tokens,
        num_slots=num_slots,
        history_tokens=history_tokens,
        writes_states=given.writes_states,
    )
    check_same_device(x=given.x, slots=given.slots)
    if num_requests == 0:
        return []
    D = per_channel(given.D, num_heads, head_dim)
    machine = machine_of(given.x.device)
    constants = {
        "dt_min": given.dt_limits[0],
        "dt_max": given.dt_limits[1],
        **named_strides(given._asdict() | {"D": D}, STRIDES),
        "stride_slots": given.slots.stride(0),
        "HEADS_PER_GROUP": num_heads // given.B.shape[1],
        "HEAD_DIM": head_dim,
        "D_STATE": d_state,
        "HISTORY_TOKENS": history_tokens,
        "IS_SOFTPLUS": given.dt_softplus,
        "HAS_LIMITS": given.dt_limits != (0.0, float("inf")),
        "BLOCK_N": max(2 * LEAST_PRODUCT, power_of_two(d_state)),
        "BLOCK_L": _block_history(history_tokens),
        "enable_fp_fusion": True,
    }
    if given.writes_states:
        return _write_launches(machine, constants, given)
    line = line_elements(machine, d_state, given.states.element_size())
    block_line = {"BLOCK_LINE": max(LEAST_PRODUCT, line)}
    if given.query_starts is None:
        return _token_launches(machine, constants | block_line, given)
    tiles = state_replay_tiles(
        machine,
        head_dim,
        d_state,
        state_element_bytes=given.states.element_size(),
        input_element_bytes=given.x.element_size(),
        history_tokens=history_tokens,
    )
    constants |= {
        "PRECISION": "ieee" if given.x.dtype == torch.float32 else "tf32x3",
        "BLOCK_P": tiles.block_dims,
        "num_warps": tiles.num_warps,
    }
    grid = (num_heads * triton.cdiv(head_dim, tiles.block_dims), num_requests)
    if tiles.is_at_once:
        return [Launch(kernel=state_replay_products_kernel, grid=grid, constants=constants)]
    return [Launch(kernel=state_replay_kernel, grid=grid, constants=constants | block_line)]


def _write_launches(
    machine: Machine, constants: dict[str, object], given: _Arguments
) -> list[Launch]:
    """List the launch for one token of each request if every state is written."""
    num_requests, num_heads, head_dim = given.x.shape
    d_state = given.states.shape[3]
    tiles = state_update_tiles(
        machine,
        head_dim,
        d_state,
        given.states.element_size(),
        num_states=num_requests * num_heads,
    )
    constants = constants | {
        "BLOCK_P": tiles.block_dims,
        "BLOCK_N": power_of_two(d_state),
        "num_warps": tiles.num_warps,
        "maxnreg": write_registers(tiles.block_dims * power_of_two(d_state)),
    }
    grid = (num_heads * triton.cdiv(head_dim, tiles.block_dims), num_requests)
    return [Launch(kernel=state_replay_write_kernel, grid=grid, constants=constants)]


def _token_launches(
    machine: Machine, constants: dict[str, object], given: _Arguments
) -> list[Launch]:
    """List the launches for one token of each request: weights of histories, then states."""
    num_requests, num_heads, head_dim = given.x.shape
    heads_per_group = num_heads // given.B.shape[1]
    tiles = token_replay_tiles(
        machine, num_requests * num_heads, heads_per_group, head_dim, given.states.shape[3]
    )
    width = _weights_width(given.history_x.shape[2])
    constants |= {
        "stride_weights_request": num_heads * width,
        "WIDTH": width,
        "BLOCK_H": tiles.block_heads,
        "BLOCK_P": tiles.block_dims,
        "IS_OVERLAPPED": machine.has_dependent_launches,
    }
    num_groups = num_heads // heads_per_group
    num_blocks = num_groups * triton.cdiv(heads_per_group, tiles.block_heads)
    weights = Launch(
        kernel=replay_weights_kernel,
        grid=(num_blocks, num_requests),
        constants=constants | {"num_warps": tiles.weights_warps},
    )
    num_blocks = num_heads * triton.cdiv(head_dim, tiles.block_dims)
    states = Launch(
        kernel=state_replay_token_kernel,
        grid=(num_blocks, num_requests),
        constants=constants | {"num_warps": tiles.num_warps} | overlapping(machine),
    )
    return [weights, states]


def _block_history(history_tokens: int) -> int:
    """Return the tokens of a tile that has all of a history."""
    return max(LEAST_PRODUCT, power_of_two(history_tokens))


def _weights_width(history_tokens: int) -> int:
    """Return the number of weights that a head has for one token: of the history, and others."""
    return _block_history(history_tokens) + OTHERS


def _check_history(given: _Arguments) -> None:
    """Check the tensors of a history.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    x, dt, B = given.history_x, given.history_dt, given.history_B
    num_slots, num_heads, head_dim, d_state = given.states.shape
    check_history_part("history.x", x, (num_slots, num_heads, None, head_dim), given.x.dtype)
    history_tokens = x.shape[2]
    sizes = (num_slots, given.B.shape[1], history_tokens, d_state)
    check_history_part("history.B", B, sizes, given.x.dtype)
    check_shape("history.dt", dt, (num_slots, num_heads, history_tokens))
    check_dtype("history.dt", dt, (torch.float32,))
    check_contiguous_rows("history.dt", dt)
    check_not_expanded("history.dt", dt)
    check_same_device(x=given.x, **{"history.x": x, "history.dt": dt, "history.B": B})
