"""Kernel of `jenga_kernels.delta_replay` that adds one token to each state and writes the state."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta.groups import History, Inputs
from jenga_kernels.triton.delta.rule import decay_log2, inverse_length, rate_log2, sigmoid
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import rounded, widened
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.recurrent.groups import ReplaySlots
from jenga_kernels.triton.recurrent.recurrence import line_sums, mask_if

_INT32_MAX = tl.constexpr(2**31 - 1)


class WriteTiles(NamedTuple):
    """Tiles and flags for which `delta_replay_write_kernel` is compiled."""

    stride_states_dim: int
    stride_changes_token: int
    stride_keys_token: int
    stride_decays_token: int
    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    HEAD_V_DIM: int
    HISTORY_TOKENS: int
    IS_PER_CHANNEL: bool
    IS_NORMALIZED: bool
    BLOCK_K: int
    BLOCK_V: int
    BLOCK_LINE: int


@with_groups(history=History, inputs=Inputs, requests=ReplaySlots, tiles=WriteTiles)
@triton.jit
def delta_replay_write_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_requests, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_v_dim, head_k_dim]
    # Inputs
    history,
    inputs,
    requests,
    # Scalars
    scale,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_changes_slot: tl.int64,
    stride_changes_head: tl.int64,
    stride_keys_slot: tl.int64,
    stride_keys_head: tl.int64,
    stride_decays_slot: tl.int64,
    stride_decays_head: tl.int64,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_gates_token: tl.int64,
    stride_gates_head: tl.int64,
    stride_betas_token: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Update BLOCK_V rows of one head of request r in program (b, r); requests vary slowest.

    It is `delta_update_kernel` for one token, after a loop over the history. Usually the history is
    empty, because the call before has written the state too. So everything else is loaded first.
    """
    BLOCKS: tl.constexpr = (tiles.HEAD_V_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    vs = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_V + tl.arange(0, tiles.BLOCK_V)
    # A row consists of cache lines. Few threads hold a part of each line, so they sum most of a row
    # by themselves.
    ks = (
        tl.arange(0, tiles.BLOCK_K // tiles.BLOCK_LINE)[:, None] * tiles.BLOCK_LINE
        + tl.arange(0, tiles.BLOCK_LINE)[None, :]
    )
    is_v = vs < tiles.HEAD_V_DIM
    is_k = ks < tiles.HEAD_K_DIM  # [lines, line]
    in_state = is_v[None, :, None] & is_k[:, None, :]
    token = request.to(tl.int64)
    group = head // tiles.HEADS_PER_GROUP
    # Padding has no branch, so that no load waits for the slot.
    slot = tl.load(requests.slots_ptr + request * stride_slots)
    computed = tl.load(requests.computed_tokens_ptr + request)
    stored = tl.load(requests.state_tokens_ptr + request)
    is_request = slot > 0
    rows = vs[None, :, None]
    if tiles.HEAD_V_DIM * tiles.stride_states_dim > _INT32_MAX:
        rows = rows.to(tl.int64)
    # Added one by one, so that a product and a sum are one instruction.
    states_ptr += head * stride_states_head + ks[:, None, :]
    states_ptr += rows * tiles.stride_states_dim
    states_ptr += page_offsets(slot, stride_states_slot)
    h = tl.load(states_ptr, mask=mask_if(is_request & (stored > 0), in_state), other=0.0)
    q_ptr = inputs.q_ptr + (token * stride_q_token + group * stride_q_head + ks)
    q = tl.load(q_ptr, mask=is_k, other=0.0)  # [lines, line]
    k_ptr = inputs.k_ptr + (token * stride_k_token + group * stride_k_head + ks)
    k = tl.load(k_ptr, mask=is_k, other=0.0)  # [lines, line]
    v_ptr = inputs.v_ptr + (token * stride_v_token + head * stride_v_head + vs)
    v = tl.load(v_ptr, mask=is_v, other=0.0).to(tl.float32)  # [V]
    beta = tl.load(inputs.betas_ptr + token * stride_betas_token + head).to(tl.float32)
    gates_ptr = inputs.gates_ptr + (token * stride_gates_token + head * stride_gates_head)
    if tiles.IS_PER_CHANNEL:
        gate = tl.load(gates_ptr + ks, mask=is_k, other=0.0).to(tl.float32)  # [lines, line]
    else:
        gate = tl.load(gates_ptr).to(tl.float32)
    rate = None
    bias = None
    if inputs.A_log_ptr is not None:
        rate = rate_log2(tl.load(inputs.A_log_ptr + head).to(tl.float32))
        beta = sigmoid(beta)
        if inputs.dt_bias_ptr is not None:
            dt_bias_ptr = inputs.dt_bias_ptr + head * stride_dt_bias_head
            if tiles.IS_PER_CHANNEL:
                bias = tl.load(dt_bias_ptr + ks, mask=is_k, other=0.0).to(tl.float32)
            else:
                bias = tl.load(dt_bias_ptr).to(tl.float32)

    h = widened(h)  # [lines, V, line]
    for age in range(tl.where(is_request, computed - stored, 0)):
        row = ((stored + age) % tiles.HISTORY_TOKENS).to(tl.int64)
        past_change = history.history_changes_ptr + (
            page_offsets(slot, stride_changes_slot) + head * stride_changes_head
        )
        past_change += row * tiles.stride_changes_token + vs
        past_change = tl.load(past_change, mask=is_v, other=0.0).to(tl.float32)  # [V]
        past_key = history.history_keys_ptr + (
            page_offsets(slot, stride_keys_slot) + group * stride_keys_head
        )
        past_key += row * tiles.stride_keys_token + ks
        past_key = widened(tl.load(past_key, mask=is_k, other=0.0))  # [lines, line]
        past_decay = history.history_decays_ptr + (
            page_offsets(slot, stride_decays_slot) + head * stride_decays_head
        )
        past_decay += row * tiles.stride_decays_token
        if tiles.IS_PER_CHANNEL:
            past_decay = tl.load(past_decay + ks, mask=is_k, other=0.0)
            h *= tl.exp2(past_decay)[:, None, :]
        else:
            h *= tl.exp2(tl.load(past_decay))
        h += past_change[None, :, None] * past_key[:, None, :]
    q = widened(q)
    k = widened(k)
    if tiles.IS_NORMALIZED:
        q *= inverse_length(tl.sum(q * q))
        k *= inverse_length(tl.sum(k * k))
    if tiles.IS_PER_CHANNEL:
        h *= tl.exp2(decay_log2(gate, rate, bias))[:, None, :]
    else:
        h *= tl.exp2(decay_log2(gate, rate, bias))
    # Replace the value that the state holds under the key, to the degree of beta.
    k = k[:, None, :]
    change = beta * (v - line_sums(h * k))  # [V]
    h += change[None, :, None] * k
    y = line_sums(h * (q * scale)[:, None, :])  # [V]
    y = tl.where(is_request, y, 0.0)
    out_ptr += token * stride_out_token + head * stride_out_head + vs
    tl.store(out_ptr, rounded(y, out_ptr.dtype.element_ty), mask=is_v)
    tl.store(
        states_ptr,
        rounded(h, states_ptr.dtype.element_ty),
        mask=mask_if(is_request, in_state),
    )
