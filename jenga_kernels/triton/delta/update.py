"""Kernel of `jenga_kernels.delta_update`."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta.groups import Inputs
from jenga_kernels.triton.delta.rule import (
    decay_log2,
    inverse_length,
    rate_log2,
    sigmoid,
)
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import rounded, widened
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.recurrent.groups import Requests
from jenga_kernels.triton.recurrent.recurrence import line_sums, mask_if

_INT32_MAX = tl.constexpr(2**31 - 1)


class UpdateTiles(NamedTuple):
    """Tiles and flags for which `delta_update_kernel` is compiled."""

    stride_states_dim: int
    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    HEAD_V_DIM: int
    IS_PER_CHANNEL: bool
    IS_NORMALIZED: bool
    BLOCK_K: int
    BLOCK_V: int
    BLOCK_LINE: int


@with_groups(inputs=Inputs, requests=Requests, tiles=UpdateTiles)
@triton.jit
def delta_update_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_v_dim, head_k_dim]
    # Inputs
    inputs,
    requests,
    # Scalars
    scale,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
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
    stride_initial: tl.int64,
    stride_slots_request: tl.int64,
    stride_slots_token: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Update BLOCK_V rows of one head of request r in program (b, r); requests vary slowest."""
    q_ptr = inputs.q_ptr
    k_ptr = inputs.k_ptr
    v_ptr = inputs.v_ptr
    gates_ptr = inputs.gates_ptr
    betas_ptr = inputs.betas_ptr
    dt_bias_ptr = inputs.dt_bias_ptr
    state_slots_ptr = requests.state_slots_ptr
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
    first = request.to(tl.int64)
    num_tokens = 1
    if requests.query_starts_ptr is not None:
        first = tl.load(requests.query_starts_ptr + request).to(tl.int64)
        num_tokens = tl.load(requests.query_starts_ptr + request + 1) - tl.load(
            requests.query_starts_ptr + request
        )
    state_slots_ptr += request * stride_slots_request
    out_ptr += first * stride_out_token + head * stride_out_head + vs
    # Padding has no branch, so that no load waits for either slot, nor one slot for the other.
    is_request = tl.load(state_slots_ptr) > 0
    initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    has_state = is_request & (initial_slot > 0)
    rows = vs[None, :, None]
    if tiles.HEAD_V_DIM * tiles.stride_states_dim > _INT32_MAX:
        rows = rows.to(tl.int64)
    # Added one by one, so that a product and a sum are one instruction.
    states_ptr += head * stride_states_head + ks[:, None, :]
    states_ptr += rows * tiles.stride_states_dim
    initial = states_ptr + page_offsets(initial_slot, stride_states_slot)
    h = widened(tl.load(initial, mask=mask_if(has_state, in_state), other=0.0))  # [lines, V, line]

    group = head // tiles.HEADS_PER_GROUP
    q_ptr += first * stride_q_token + group * stride_q_head + ks
    k_ptr += first * stride_k_token + group * stride_k_head + ks
    v_ptr += first * stride_v_token + head * stride_v_head + vs
    gates_ptr += first * stride_gates_token + head * stride_gates_head
    betas_ptr += first * stride_betas_token + head
    if tiles.IS_PER_CHANNEL:
        gates_ptr += ks
    rate = None
    bias = None
    if inputs.A_log_ptr is not None:
        rate = rate_log2(tl.load(inputs.A_log_ptr + head).to(tl.float32))
        if dt_bias_ptr is not None:
            dt_bias_ptr += head * stride_dt_bias_head
            if tiles.IS_PER_CHANNEL:
                bias = tl.load(dt_bias_ptr + ks, mask=is_k, other=0.0).to(
                    tl.float32
                )  # [lines, line]
            else:
                bias = tl.load(dt_bias_ptr).to(tl.float32)
    for _ in range(num_tokens):
        # If it were loaded after a result's store, it would be awaited on its own.
        slot = tl.load(state_slots_ptr)
        q = widened(tl.load(q_ptr, mask=is_k, other=0.0))  # [lines, line]
        k = widened(tl.load(k_ptr, mask=is_k, other=0.0))  # [lines, line]
        v = tl.load(v_ptr, mask=is_v, other=0.0).to(tl.float32)  # [V]
        if tiles.IS_NORMALIZED:
            q *= inverse_length(tl.sum(q * q))
            k *= inverse_length(tl.sum(k * k))
        beta = tl.load(betas_ptr).to(tl.float32)
        if inputs.A_log_ptr is not None:
            beta = sigmoid(beta)
        if tiles.IS_PER_CHANNEL:
            gate = tl.load(gates_ptr, mask=is_k, other=0.0).to(tl.float32)  # [lines, line]
            h *= tl.exp2(decay_log2(gate, rate, bias))[:, None, :]
        else:
            h *= tl.exp2(decay_log2(tl.load(gates_ptr).to(tl.float32), rate, bias))
        # Replace the value that the state holds under the key, to the degree of beta.
        k = k[:, None, :]
        change = beta * (v - line_sums(h * k))  # [V]
        h += change[None, :, None] * k
        y = line_sums(h * (q * scale)[:, None, :])  # [V]
        y = tl.where(is_request, y, 0.0)
        tl.store(out_ptr, rounded(y, out_ptr.dtype.element_ty), mask=is_v)
        kept = states_ptr + page_offsets(slot, stride_states_slot)
        tl.store(
            kept,
            rounded(h, states_ptr.dtype.element_ty),
            mask=mask_if(is_request & (slot > 0), in_state),
        )
        q_ptr += stride_q_token
        k_ptr += stride_k_token
        v_ptr += stride_v_token
        gates_ptr += stride_gates_token
        betas_ptr += stride_betas_token
        out_ptr += stride_out_token
        state_slots_ptr += stride_slots_token
