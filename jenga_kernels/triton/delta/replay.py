"""Kernel of `jenga_kernels.delta_replay` that serves the tokens of a call one by one."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta.groups import History, Inputs
from jenga_kernels.triton.delta.rule import (
    decay_log2,
    inverse_length,
    rate_log2,
    sigmoid,
)
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import device_function, rounded, rounded_product, widened
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.recurrent.groups import ReplayRequests
from jenga_kernels.triton.recurrent.recurrence import column_sums, line_sums, mask_if, row_sums
from jenga_kernels.triton.recurrent.replay import write_rows

_INT32_MAX = tl.constexpr(2**31 - 1)


@device_function
def past_decays(
    ptr,
    rows,
    next_rows,
    ages,
    num_past,
    ks,
    is_k,
    STRIDE: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
):
    """Weights of a history's changes after the last one, and the decay of the state before them.

    Each is a sum of the logarithms after the token. A difference of sums from the start would have
    an error as large as these sums.

    Returns:
        Weights of the tokens, [L] or [L, K], and the state's decay, a scalar or [K].
    """
    is_past = ages < num_past
    is_before_last = ages + 1 < num_past
    if IS_PER_CHANNEL:
        logs = ptr + rows[:, None] * STRIDE + ks[None, :]
        logs = tl.load(logs, mask=is_past[:, None] & is_k[None, :], other=0.0)
        behind = ptr + next_rows[:, None] * STRIDE + ks[None, :]
        behind = tl.load(behind, mask=is_before_last[:, None] & is_k[None, :], other=0.0)
        return tl.exp2(tl.cumsum(behind, 0, reverse=True)), tl.exp2(column_sums(logs))
    else:
        logs = tl.load(ptr + rows * STRIDE, mask=is_past, other=0.0)
        behind = tl.load(ptr + next_rows * STRIDE, mask=is_before_last, other=0.0)
        weights = tl.exp2(tl.cumsum(behind, 0, reverse=True))
        return weights, tl.exp2(tl.sum(logs, 0))


@device_function
def in_lines(row, LINES: tl.constexpr, LINE: tl.constexpr):
    """Reshape a row of [K] to [lines, 1, line], the layout of states here."""
    return tl.reshape(row, [LINES, LINE])[:, None, :]


class ReplayTiles(NamedTuple):
    """Tiles and flags for which `delta_replay_kernel` is compiled."""

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
    PRECISION: str
    BLOCK_K: int
    BLOCK_V: int
    BLOCK_L: int
    BLOCK_LINE: int


@with_groups(history=History, inputs=Inputs, requests=ReplayRequests, tiles=ReplayTiles)
@triton.jit
def delta_replay_kernel(  # noqa: PLR0912 - options are compiled in or out, each an `if`
    # Outputs
    out_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_v_dim, head_k_dim]
    history,
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
    """Serve BLOCK_V rows of one head of request r in program (b, r); requests vary slowest.

    The state is read as it was some tokens ago. Its value under a key is the old one, decayed, plus
    a sum over the changes since then. Each token of the call is added to these.
    """
    PRECISION: tl.constexpr = tiles.PRECISION
    q_ptr = inputs.q_ptr
    k_ptr = inputs.k_ptr
    v_ptr = inputs.v_ptr
    gates_ptr = inputs.gates_ptr
    betas_ptr = inputs.betas_ptr
    dt_bias_ptr = inputs.dt_bias_ptr
    BLOCKS: tl.constexpr = (tiles.HEAD_V_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    LINES: tl.constexpr = tiles.BLOCK_K // tiles.BLOCK_LINE
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    request = tl.program_id(1)
    vs = block * tiles.BLOCK_V + tl.arange(0, tiles.BLOCK_V)
    ks = tl.arange(0, tiles.BLOCK_K)
    ages = tl.arange(0, tiles.BLOCK_L)  # indices of the tokens since the state, the oldest first
    # A row of a state consists of cache lines. Few threads hold a part of each line, so they sum
    # most of a row by themselves.
    lines = (
        tl.arange(0, LINES)[:, None] * tiles.BLOCK_LINE + tl.arange(0, tiles.BLOCK_LINE)[None, :]
    )
    is_v = vs < tiles.HEAD_V_DIM
    is_k = ks < tiles.HEAD_K_DIM
    in_line = lines < tiles.HEAD_K_DIM  # [lines, line]
    in_state = is_v[None, :, None] & in_line[:, None, :]
    slot = tl.load(requests.slots_ptr + request * stride_slots)
    computed = tl.load(requests.computed_tokens_ptr + request)
    stored = tl.load(requests.state_tokens_ptr + request)
    stored_next = tl.load(requests.next_state_tokens_ptr + request)
    first = request.to(tl.int64)
    num_tokens = 1
    if requests.query_starts_ptr is not None:
        first = tl.load(requests.query_starts_ptr + request).to(tl.int64)
        num_tokens = (tl.load(requests.query_starts_ptr + request + 1) - first).to(tl.int32)
    out_ptr += first * stride_out_token + head * stride_out_head + vs
    if slot <= 0:
        for _ in range(num_tokens):
            tl.store(out_ptr, tl.full([tiles.BLOCK_V], 0.0, out_ptr.dtype.element_ty), mask=is_v)
            out_ptr += stride_out_token
        return

    group = head // tiles.HEADS_PER_GROUP
    keeps_key = (block == 0) & (head % tiles.HEADS_PER_GROUP == 0)
    q_ptr += first * stride_q_token + group * stride_q_head
    k_ptr += first * stride_k_token + group * stride_k_head
    v_ptr += first * stride_v_token + head * stride_v_head + vs
    gates_ptr += first * stride_gates_token + head * stride_gates_head
    betas_ptr += first * stride_betas_token + head
    history_changes_ptr = history.history_changes_ptr + (
        page_offsets(slot, stride_changes_slot) + head * stride_changes_head + vs
    )
    history_keys_ptr = history.history_keys_ptr + (
        page_offsets(slot, stride_keys_slot) + group * stride_keys_head + ks
    )
    history_decays_ptr = history.history_decays_ptr + (
        page_offsets(slot, stride_decays_slot) + head * stride_decays_head
    )
    state_rows = vs[None, :, None]
    if tiles.HEAD_V_DIM * tiles.stride_states_dim > _INT32_MAX:
        state_rows = state_rows.to(tl.int64)
    states_ptr += page_offsets(slot, stride_states_slot) + head * stride_states_head
    S = states_ptr + state_rows * tiles.stride_states_dim + lines[:, None, :]
    S = tl.load(S, mask=mask_if(stored > 0, in_state), other=0.0)  # [lines, V, line]
    num_past = computed - stored
    rows = ((stored + ages) % tiles.HISTORY_TOKENS).to(tl.int64)
    next_rows = ((stored + ages + 1) % tiles.HISTORY_TOKENS).to(tl.int64)
    is_past = (ages < num_past)[:, None]
    keys = history_keys_ptr[None, :] + rows[:, None] * tiles.stride_keys_token
    keys = widened(tl.load(keys, mask=is_past & is_k[None, :], other=0.0))  # [L, K]
    changes = history_changes_ptr[None, :] + rows[:, None] * tiles.stride_changes_token
    changes = widened(tl.load(changes, mask=is_past & is_v[None, :], other=0.0))  # [L, V]
    weights, decay = past_decays(
        history_decays_ptr,
        rows,
        next_rows,
        ages,
        num_past,
        ks,
        is_k,
        tiles.stride_decays_token,
        tiles.IS_PER_CHANNEL,
    )
    S = widened(S)
    if tiles.IS_PER_CHANNEL:
        keys *= weights
        decay = in_lines(decay, LINES, tiles.BLOCK_LINE)
    # Keys and weights of the history, and decay of the state, for a state that is written.
    kept_keys = keys
    kept_weights = weights
    kept_decay = decay
    rate = None
    bias = None
    if inputs.A_log_ptr is not None:
        rate = rate_log2(tl.load(inputs.A_log_ptr + head).to(tl.float32))
        if dt_bias_ptr is not None:
            dt_bias_ptr += head * stride_dt_bias_head
            if tiles.IS_PER_CHANNEL:
                bias = tl.load(dt_bias_ptr + ks, mask=is_k, other=0.0).to(tl.float32)  # [K]
            else:
                bias = tl.load(dt_bias_ptr).to(tl.float32)

    for t in range(num_tokens):
        q = widened(tl.load(q_ptr + ks, mask=is_k, other=0.0))  # [K]
        key = tl.load(k_ptr + ks, mask=is_k, other=0.0)
        k = widened(key)  # [K]
        line_q = widened(tl.load(q_ptr + lines, mask=in_line, other=0.0))[:, None, :]
        line_k = widened(tl.load(k_ptr + lines, mask=in_line, other=0.0))[:, None, :]
        v = tl.load(v_ptr, mask=is_v, other=0.0).to(tl.float32)  # [V]
        q_factor = scale
        k_factor = 1.0
        if tiles.IS_NORMALIZED:
            q_factor *= inverse_length(line_sums(rounded_product(line_q, line_q)))
            k_factor = inverse_length(line_sums(rounded_product(line_k, line_k)))
        beta = tl.load(betas_ptr).to(tl.float32)
        if inputs.A_log_ptr is not None:
            beta = sigmoid(beta)
        if tiles.IS_PER_CHANNEL:
            gate = tl.load(gates_ptr + ks, mask=is_k, other=0.0).to(tl.float32)  # [K]
            log_decay = decay_log2(gate, rate, bias)
            step_decay = tl.exp2(log_decay)
            keys *= step_decay[None, :]
            decay *= in_lines(step_decay, LINES, tiles.BLOCK_LINE)
            held = line_sums(S * (line_k * decay))
            y = line_sums(S * (line_q * decay))
            k_scores = row_sums(keys * k[None, :])  # [L]
            q_scores = row_sums(keys * q[None, :])
        else:
            log_decay = decay_log2(tl.load(gates_ptr).to(tl.float32), rate, bias)
            step_decay = tl.exp2(log_decay)
            weights *= step_decay
            decay *= step_decay
            held = line_sums(S * line_k) * decay
            y = line_sums(S * line_q) * decay
            k_scores = row_sums(keys * k[None, :]) * weights  # [L]
            q_scores = row_sums(keys * q[None, :]) * weights
        held += column_sums(rounded_product(changes, k_scores[:, None]))
        y += column_sums(rounded_product(changes, q_scores[:, None]))
        # Replace the value that the state holds under the key, to the degree of beta.
        change = beta * k_factor * (v - held * k_factor)  # [V]
        y = (y + change * line_sums(rounded_product(line_k, line_q))) * q_factor
        tl.store(out_ptr, rounded(y, out_ptr.dtype.element_ty), mask=is_v)
        is_own = ages == num_past + t
        keys = tl.where(is_own[:, None], k[None, :], keys)
        changes = tl.where(is_own[:, None], change[None, :], changes)
        if not tiles.IS_PER_CHANNEL:
            weights = tl.where(is_own, 1.0, weights)
        if computed + t >= stored_next:
            row = ((computed + t) % tiles.HISTORY_TOKENS).to(tl.int64)
            kept = rounded(change, history_changes_ptr.dtype.element_ty)
            tl.store(history_changes_ptr + row * tiles.stride_changes_token, kept, mask=is_v)
            tl.store(
                history_keys_ptr + row * tiles.stride_keys_token, key, mask=mask_if(keeps_key, is_k)
            )
            kept_decays = history_decays_ptr + row * tiles.stride_decays_token
            if tiles.IS_PER_CHANNEL:
                tl.store(kept_decays + ks, log_decay, mask=mask_if(block == 0, is_k))
            else:
                tl.store(kept_decays, log_decay, mask=block == 0)
        else:
            kept_keys = keys
            kept_weights = weights
            kept_decay = decay
        q_ptr += stride_q_token
        k_ptr += stride_k_token
        v_ptr += stride_v_token
        gates_ptr += stride_gates_token
        betas_ptr += stride_betas_token
        out_ptr += stride_out_token

    if stored_next > stored:
        if not tiles.IS_PER_CHANNEL:
            changes *= kept_weights[:, None]
        write_rows(
            states_ptr + tl.reshape(state_rows, [tiles.BLOCK_V, 1]) * tiles.stride_states_dim,
            is_v[:, None],
            stored > 0,
            tl.reshape(kept_decay, [1, tiles.BLOCK_K]) if tiles.IS_PER_CHANNEL else kept_decay,
            tl.trans(tl.where((ages < stored_next - stored)[:, None], changes, 0.0)),
            kept_keys,
            tiles.HEAD_K_DIM,
            PRECISION,
        )
