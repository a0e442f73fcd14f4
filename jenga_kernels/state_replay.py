"""The recurrence of a selective state space model for a few tokens, mostly without state writes."""

import torch

from jenga_kernels.checks.histories import InputHistory, check_history_part, check_replay
from jenga_kernels.checks.states import (
    check_contiguous_rows,
    check_not_expanded,
    check_recurrence,
    per_channel,
)
from jenga_kernels.checks.tensors import check_dtype, check_same_device, check_shape
from jenga_kernels.launches import launch, taken_by, with_reference
from jenga_kernels.reference import state_replay as reference
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import (
    Machine,
    line_elements,
    machine_of,
    overlapping,
    power_of_two,
)
from jenga_kernels.triton.mamba.replay import state_replay_kernel
from jenga_kernels.triton.mamba.replay_products import state_replay_products_kernel
from jenga_kernels.triton.mamba.replay_token import (
    OTHERS,
    replay_weights_kernel,
    state_replay_token_kernel,
)
from jenga_kernels.triton.recurrent.tiles import (
    LEAST_PRODUCT,
    state_replay_tiles,
    token_replay_tiles,
)


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
) -> None:
    """Apply the next token of each request, or the next few, to a state that is seldom written.

    The recurrence and its tensors are those of `jenga_kernels.state_update.state_update` with a
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

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit; on the CPU also if
            the history does not hold a request's tokens since its state.

    Source: ReplaySSM of vLLM (vllm-project/vllm). Its steps do not write the state. They multiply
        the inputs of the tokens since then with the output projections.
    """
    check_shape("A", A, (None,))
    check_recurrence(out, states, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_limits=dt_limits)
    num_tokens, num_heads, head_dim = x.shape
    num_slots, _, _, d_state = states.shape
    num_groups = B.shape[1]
    history_tokens = _check_history(history, x, states, num_groups)
    num_requests = check_replay(
        slots,
        query_starts,
        computed_tokens=computed_tokens,
        state_tokens=state_tokens,
        next_state_tokens=next_state_tokens,
        num_tokens=num_tokens,
        num_slots=num_slots,
        history_tokens=history_tokens,
    )
    check_same_device(x=x, slots=slots)
    if num_requests == 0:
        return
    D = per_channel(D, num_heads, head_dim)
    heads_per_group = num_heads // num_groups
    machine = machine_of(x.device)
    stride_slot, stride_head, stride_dim, _ = strides(states)
    arguments = {
        "out_ptr": out,
        "states_ptr": states,
        "history_x_ptr": history.x,
        "history_dt_ptr": history.dt,
        "history_B_ptr": history.B,
        "x_ptr": x,
        "dt_ptr": dt,
        "A_ptr": A,
        "B_ptr": B,
        "C_ptr": C,
        "D_ptr": D,
        "z_ptr": z,
        "dt_bias_ptr": dt_bias,
        "query_starts_ptr": query_starts,
        "slots_ptr": slots,
        "computed_tokens_ptr": computed_tokens,
        "state_tokens_ptr": state_tokens,
        "next_state_tokens_ptr": next_state_tokens,
        "dt_min": dt_limits[0],
        "dt_max": dt_limits[1],
        "stride_out_token": strides(out)[0],
        "stride_out_head": strides(out)[1],
        "stride_states_slot": stride_slot,
        "stride_states_head": stride_head,
        "stride_states_dim": stride_dim,
        "stride_history_x_slot": strides(history.x)[0],
        "stride_history_x_head": strides(history.x)[1],
        "stride_history_x_token": strides(history.x)[2],
        "stride_history_dt_slot": strides(history.dt)[0],
        "stride_history_dt_head": strides(history.dt)[1],
        "stride_history_B_slot": strides(history.B)[0],
        "stride_history_B_group": strides(history.B)[1],
        "stride_history_B_token": strides(history.B)[2],
        "stride_x_token": strides(x)[0],
        "stride_x_head": strides(x)[1],
        "stride_dt_token": strides(dt)[0],
        "stride_dt_head": strides(dt)[1],
        "stride_B_token": strides(B)[0],
        "stride_B_group": strides(B)[1],
        "stride_C_token": strides(C)[0],
        "stride_C_group": strides(C)[1],
        "stride_D_head": 0 if D is None else D.stride(0),
        "stride_D_dim": 0 if D is None else D.stride(1),
        "stride_z_token": 0 if z is None else strides(z)[0],
        "stride_z_head": 0 if z is None else strides(z)[1],
        "stride_slots": slots.stride(0),
        "HEADS_PER_GROUP": heads_per_group,
        "HEAD_DIM": head_dim,
        "D_STATE": d_state,
        "HISTORY_TOKENS": history_tokens,
        "IS_SOFTPLUS": dt_softplus,
        "HAS_LIMITS": dt_limits != (0.0, float("inf")),
        "BLOCK_N": max(2 * LEAST_PRODUCT, power_of_two(d_state)),
        "BLOCK_L": max(LEAST_PRODUCT, power_of_two(history_tokens)),
        "enable_fp_fusion": True,
    }
    block_line = max(LEAST_PRODUCT, line_elements(machine, d_state, states.element_size()))
    if query_starts is None:
        _replay_token(machine, arguments | {"BLOCK_LINE": block_line}, x, states, heads_per_group)
        return
    tiles = state_replay_tiles(
        machine,
        head_dim,
        d_state,
        state_element_bytes=states.element_size(),
        input_element_bytes=x.element_size(),
        history_tokens=history_tokens,
    )
    arguments |= {
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32x3",
        "BLOCK_P": tiles.block_dims,
        "num_warps": tiles.num_warps,
    }
    grid = (num_heads * -(-head_dim // tiles.block_dims), num_requests)
    if tiles.is_at_once:
        launch(state_replay_products_kernel, grid, x.device, **arguments)
    else:
        launch(state_replay_kernel, grid, x.device, **arguments, BLOCK_LINE=block_line)


def _replay_token(
    machine: Machine,
    arguments: dict[str, object],
    x: torch.Tensor,
    states: torch.Tensor,
    heads_per_group: int,
) -> None:
    """Serve one token of each request: compute the weights of histories, then read states."""
    num_requests, num_heads, head_dim = x.shape
    tiles = token_replay_tiles(
        machine, num_requests * num_heads, heads_per_group, head_dim, states.shape[3]
    )
    width = int(arguments["BLOCK_L"]) + OTHERS
    weights = torch.empty((num_requests, num_heads, width), dtype=torch.float32, device=x.device)
    arguments |= {
        "weights_ptr": weights,
        "stride_weights_request": num_heads * width,
        "WIDTH": width,
        "BLOCK_H": tiles.block_heads,
        "BLOCK_P": tiles.block_dims,
        "IS_OVERLAPPED": machine.has_dependent_launches,
    }
    num_blocks = num_heads // heads_per_group * -(-heads_per_group // tiles.block_heads)
    launch(
        replay_weights_kernel,
        (num_blocks, num_requests),
        x.device,
        **taken_by(replay_weights_kernel, arguments),
        num_warps=tiles.weights_warps,
    )
    num_blocks = num_heads * -(-head_dim // tiles.block_dims)
    launch(
        state_replay_token_kernel,
        (num_blocks, num_requests),
        x.device,
        **taken_by(state_replay_token_kernel, arguments),
        num_warps=tiles.num_warps,
        **overlapping(machine),
    )


def _check_history(
    history: InputHistory, x: torch.Tensor, states: torch.Tensor, num_groups: int
) -> int:
    """Check the tensors of a history; return history_tokens.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    num_slots, num_heads, head_dim, d_state = states.shape
    check_history_part("history.x", history.x, (num_slots, num_heads, None, head_dim), x.dtype)
    history_tokens = history.x.shape[2]
    sizes = (num_slots, num_groups, history_tokens, d_state)
    check_history_part("history.B", history.B, sizes, x.dtype)
    check_shape("history.dt", history.dt, (num_slots, num_heads, history_tokens))
    check_dtype("history.dt", history.dt, (torch.float32,))
    check_contiguous_rows("history.dt", history.dt)
    check_not_expanded("history.dt", history.dt)
    check_same_device(x=x, **{"history.x": history.x, "history.dt": history.dt})
    check_same_device(x=x, **{"history.B": history.B})
    return history_tokens
