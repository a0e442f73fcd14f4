"""Kernel of `jenga_kernels.delta_replay` that serves all tokens of a call at once.

Each head has one decay, so scores of keys and queries are products, and decays are their factors.
"""

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
from jenga_kernels.triton.lib.device import device_function, rounded, widened
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import matmul, matmul_add
from jenga_kernels.triton.recurrent.groups import ReplayRequests
from jenga_kernels.triton.recurrent.recurrence import column_sums, mask_if, row_sums
from jenga_kernels.triton.recurrent.replay import (
    add_state_products,
    decays_between,
    decays_until,
    rows_of_call,
    rows_of_history,
    write_changes,
)


@device_function
def decays_of(
    history_ptr,
    gates_ptr,
    stride_gates_token,
    stored,
    ages,
    num_past,
    num_all,
    rate,
    bias,
    HISTORY_TOKENS: tl.constexpr,
):
    """Logarithms to base two of the decays of tokens since the state; 0 where there is no token."""
    rows = ((stored + ages) % HISTORY_TOKENS).to(tl.int64)
    tokens = (ages - num_past).to(tl.int64)
    is_new = (ages >= num_past) & (ages < num_all)
    past = tl.load(history_ptr + rows, mask=ages < num_past, other=0.0)
    gates = tl.load(gates_ptr + tokens * stride_gates_token, mask=is_new, other=0.0)
    new = tl.where(is_new, decay_log2(gates.to(tl.float32), rate, bias), 0.0)
    return past + new


class ProductsTiles(NamedTuple):
    """Tiles and flags for which `delta_replay_products_kernel` is compiled."""

    stride_states_dim: int
    stride_changes_token: int
    stride_keys_token: int
    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    HEAD_V_DIM: int
    HISTORY_TOKENS: int
    IS_NORMALIZED: bool
    PRECISION: str
    BLOCK_K: int
    BLOCK_V: int
    BLOCK_L: int


@with_groups(history=History, inputs=Inputs, requests=ReplayRequests, tiles=ProductsTiles)
@triton.jit
def delta_replay_products_kernel(
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
    stride_betas_token: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Serve BLOCK_V rows of one head of request r in program (b, r); requests vary slowest.

    The tokens since the state are rows of one tile, those of the history first, then those of the
    call. The value of a state under a key is the stored one, decayed, plus the changes of each
    token since then.
    """
    PRECISION: tl.constexpr = tiles.PRECISION
    BLOCKS: tl.constexpr = (tiles.HEAD_V_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    request = tl.program_id(1)
    vs = block * tiles.BLOCK_V + tl.arange(0, tiles.BLOCK_V)
    # A row has two halves, so that only half of a float32 state is split into parts at a time.
    ks = tl.arange(0, tiles.BLOCK_K // 2)
    far_ks = tiles.BLOCK_K // 2 + ks
    ages = tl.arange(0, tiles.BLOCK_L)  # indices of the tokens since the state, the oldest first
    is_v = vs < tiles.HEAD_V_DIM
    in_state = is_v[:, None] & (ks < tiles.HEAD_K_DIM)[None, :]
    in_far_state = is_v[:, None] & (far_ks < tiles.HEAD_K_DIM)[None, :]
    slot = tl.load(requests.slots_ptr + request * stride_slots)
    computed = tl.load(requests.computed_tokens_ptr + request)
    stored = tl.load(requests.state_tokens_ptr + request)
    stored_next = tl.load(requests.next_state_tokens_ptr + request)
    first = request.to(tl.int64)
    num_tokens = 1
    if requests.query_starts_ptr is not None:
        first = tl.load(requests.query_starts_ptr + request).to(tl.int64)
        num_tokens = (tl.load(requests.query_starts_ptr + request + 1) - first).to(tl.int32)
    out_ptr += first * stride_out_token + head * stride_out_head
    if slot <= 0:
        for _ in range(num_tokens):
            zero = tl.full([tiles.BLOCK_V], 0.0, out_ptr.dtype.element_ty)
            tl.store(out_ptr + vs, zero, mask=is_v)
            out_ptr += stride_out_token
        return

    group = head // tiles.HEADS_PER_GROUP
    q_ptr = inputs.q_ptr + (first * stride_q_token + group * stride_q_head)
    k_ptr = inputs.k_ptr + (first * stride_k_token + group * stride_k_head)
    v_ptr = inputs.v_ptr + (first * stride_v_token + head * stride_v_head)
    gates_ptr = inputs.gates_ptr + (first * stride_gates_token + head)
    betas_ptr = inputs.betas_ptr + (first * stride_betas_token + head)
    history_changes_ptr = history.history_changes_ptr + (
        page_offsets(slot, stride_changes_slot) + head * stride_changes_head
    )
    history_keys_ptr = history.history_keys_ptr + (
        page_offsets(slot, stride_keys_slot) + group * stride_keys_head
    )
    history_decays_ptr = history.history_decays_ptr + (
        page_offsets(slot, stride_decays_slot) + head * stride_decays_head
    )
    states_ptr += page_offsets(slot, stride_states_slot) + head * stride_states_head
    state = states_ptr + vs[:, None].to(tl.int64) * tiles.stride_states_dim + ks[None, :]
    far_state = state + tiles.BLOCK_K // 2
    # The other half is loaded after the products of this one. Both would not fit into registers.
    S = tl.load(state, mask=mask_if(stored > 0, in_state), other=0.0)  # [V, K / 2]

    num_past = computed - stored
    num_all = num_past + num_tokens
    rows = ((stored + ages) % tiles.HISTORY_TOKENS).to(tl.int64)
    tokens = (ages - num_past).to(tl.int64)
    is_past = ages < num_past
    is_new = (ages >= num_past) & (ages < num_all)
    keys = rows_of_history(
        history_keys_ptr, rows, is_past, ks, tiles.HEAD_K_DIM, tiles.stride_keys_token
    )
    keys = rows_of_call(k_ptr, tokens, is_new, ks, keys, tiles.HEAD_K_DIM, stride_k_token)
    far_keys = rows_of_history(
        history_keys_ptr, rows, is_past, far_ks, tiles.HEAD_K_DIM, tiles.stride_keys_token
    )
    far_keys = rows_of_call(
        k_ptr, tokens, is_new, far_ks, far_keys, tiles.HEAD_K_DIM, stride_k_token
    )
    q = rows_of_call(q_ptr, tokens, is_new, ks, 0.0, tiles.HEAD_K_DIM, stride_q_token)
    far_q = rows_of_call(q_ptr, tokens, is_new, far_ks, 0.0, tiles.HEAD_K_DIM, stride_q_token)
    in_changes = is_v[:, None] & is_past[None, :]
    changes = history_changes_ptr + rows[None, :] * tiles.stride_changes_token + vs[:, None]
    changes = tl.load(changes, mask=in_changes, other=0.0).to(tl.float32)  # [V, L]
    in_call = is_v[:, None] & is_new[None, :]
    v = v_ptr + tokens[None, :] * stride_v_token + vs[:, None]
    v = tl.load(v, mask=in_call, other=0.0).to(tl.float32)  # [V, L]
    betas = tl.load(betas_ptr + tokens * stride_betas_token, mask=is_new, other=0.0)
    betas = betas.to(tl.float32)
    rate = None
    bias = None
    if inputs.A_log_ptr is not None:
        betas = sigmoid(betas)
        rate = rate_log2(tl.load(inputs.A_log_ptr + head).to(tl.float32))
        if inputs.dt_bias_ptr is not None:
            bias = tl.load(inputs.dt_bias_ptr + head).to(tl.float32)
    # Logarithms of each token's decay, and of the next token's.
    logs = decays_of(
        history_decays_ptr,
        gates_ptr,
        stride_gates_token,
        stored,
        ages,
        num_past,
        num_all,
        rate,
        bias,
        tiles.HISTORY_TOKENS,
    )
    next_logs = decays_of(
        history_decays_ptr,
        gates_ptr,
        stride_gates_token,
        stored,
        ages + 1,
        num_past,
        num_all,
        rate,
        bias,
        tiles.HISTORY_TOKENS,
    )
    since_state = tl.exp2(tl.cumsum(logs, 0))  # [L]
    between = decays_between(next_logs, ages)  # [L, L]
    is_before = ages[None, :] < ages[:, None]

    k_scores = matmul_add(far_keys, tl.trans(far_keys), matmul(keys, tl.trans(keys)))  # [L, L]
    q_scores = matmul_add(far_q, tl.trans(far_keys), matmul(q, tl.trans(keys)))
    q_factors = tl.full([tiles.BLOCK_L], 1.0, tl.float32) * scale
    k_factors = tl.full([tiles.BLOCK_L], 1.0, tl.float32)
    if tiles.IS_NORMALIZED:
        is_own = ages[None, :] == ages[:, None]
        k_factors = inverse_length(row_sums(tl.where(is_own, k_scores, 0.0)))
        wide_q, wide_far_q = widened(q), widened(far_q)
        q_factors *= inverse_length(row_sums(wide_q * wide_q + wide_far_q * wide_far_q))
    nothing = tl.full([tiles.BLOCK_V, tiles.BLOCK_L], 0.0, tl.float32)
    held = add_state_products(S, keys, nothing)  # [V, L]
    y = add_state_products(S, q, nothing)
    far_S = tl.load(far_state, mask=mask_if(stored > 0, in_far_state), other=0.0)
    held = add_state_products(far_S, far_keys, held)
    y = add_state_products(far_S, far_q, y)
    held *= since_state[None, :]
    y *= since_state[None, :]
    rates = betas * k_factors
    changes += rates[None, :] * tl.where(in_call, v - held * k_factors[None, :], 0.0)
    # Subtract from each token's change the earlier changes under its key.
    k_scores *= tl.where(is_before, between, 0.0) * (rates * k_factors)[:, None]
    for t in range(num_past, num_all):
        scores = column_sums(tl.where((ages == t)[:, None], k_scores, 0.0))  # [L]
        found = row_sums(changes * scores[None, :])  # [V]
        changes -= tl.where((ages == t)[None, :], found[:, None], 0.0)
    q_scores *= tl.where(ages[None, :] <= ages[:, None], between, 0.0)
    y += tl.dot(changes, tl.trans(q_scores), input_precision=PRECISION)
    y *= q_factors[None, :]
    out_ptrs = out_ptr + tokens[None, :] * stride_out_token + vs[:, None]
    tl.store(out_ptrs, rounded(y, out_ptr.dtype.element_ty), mask=in_call)

    is_kept = is_new & (stored + ages >= stored_next)
    kept_rows = history_changes_ptr + rows[None, :] * tiles.stride_changes_token + vs[:, None]
    kept_changes = rounded(changes, history_changes_ptr.dtype.element_ty)
    tl.store(kept_rows, kept_changes, mask=is_v[:, None] & is_kept[None, :])
    if block == 0:
        tl.store(history_decays_ptr + rows, logs, mask=is_kept)
        if head % tiles.HEADS_PER_GROUP == 0:
            kept_keys = history_keys_ptr + rows[:, None] * tiles.stride_keys_token + ks[None, :]
            is_k = is_kept[:, None] & (ks < tiles.HEAD_K_DIM)[None, :]
            tl.store(kept_keys, keys, mask=is_k)
            is_far_k = is_kept[:, None] & (far_ks < tiles.HEAD_K_DIM)[None, :]
            tl.store(kept_keys + tiles.BLOCK_K // 2, far_keys, mask=is_far_k)

    if stored_next > stored:
        decay, weights = decays_until(logs, next_logs, ages, stored_next - stored - 1)
        changes *= weights[None, :]
        is_begun = stored > 0
        wide_keys, wide_far_keys = keys.to(tl.float32), far_keys.to(tl.float32)
        write_changes(state, in_state, is_begun, decay, changes, wide_keys, PRECISION)
        write_changes(far_state, in_far_state, is_begun, decay, changes, wide_far_keys, PRECISION)
