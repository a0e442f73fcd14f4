"""Only kernel of a fused `jenga_kernels.delta_scan`: chunks are prepared where they are scanned."""

from typing import NamedTuple

import triton
import triton.language as tl

from jenga_kernels.triton.delta.groups import Inputs
from jenga_kernels.triton.delta.rule import (
    decay_log2,
    rate_log2,
    sigmoid,
    unit_factors,
    unit_triangular_inverse,
)
from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import device_function, rounded
from jenga_kernels.triton.lib.groups import with_groups
from jenga_kernels.triton.lib.matmul import matmul, matmul_add
from jenga_kernels.triton.recurrent.groups import Checkpoints, Requests
from jenga_kernels.triton.recurrent.recurrence import checkpoint_range, mask_if, stretch_end


@device_function
def load_rows(ptr, tokens, stride_token, end, is_column):
    """Load rows of tokens, [T, N]; 0 from token `end` on."""
    mask = (tokens < end)[:, None] & is_column
    return tl.load(ptr + tokens[:, None] * stride_token, mask=mask, other=0.0)


@device_function
def load_numbers(ptr, tokens, stride_token, end):
    """Load a number of each token, [T]; 0 from token `end` on."""
    return tl.load(ptr + tokens * stride_token, mask=tokens < end, other=0.0)


@device_function
def both_products(q, k, right, N: tl.constexpr):
    """Products of queries, and of keys, with one right operand, f32[T, N] each."""
    of_queries = tl.zeros([q.shape[0], N], tl.float32)
    of_keys = tl.zeros([q.shape[0], N], tl.float32)
    left = q
    # A left operand that a loop carries is in shared memory. Each other one would take the
    # registers of a tile.
    for _ in range(2):
        of_queries = of_keys
        of_keys = matmul(left, right)
        left = k
    return of_queries, of_keys


class FusedTiles(NamedTuple):
    """Tiles and flags for which `delta_fused_kernel` is compiled."""

    HEADS_PER_GROUP: int
    HEAD_K_DIM: int
    HEAD_V_DIM: int
    IS_NORMALIZED: bool
    PRECISION: str
    BLOCK_T: int
    BLOCK_K: int
    BLOCK_V: int


@with_groups(inputs=Inputs, requests=Requests, checkpoints=Checkpoints, tiles=FusedTiles)
@triton.jit
def delta_fused_kernel(
    # Outputs
    out_ptr,  # [num_tokens, num_v_heads, head_v_dim]
    states_ptr,  # [num_slots, num_v_heads, head_v_dim, head_k_dim]
    # Inputs
    inputs,
    requests,
    checkpoints,
    # Scalars
    scale,
    # Strides, in elements
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_states_dim: tl.int64,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_gates_token: tl.int64,
    stride_betas_token: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_initial: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    tiles: tl.constexpr,
):
    """Scan request r in BLOCK_V values of one head, chunk by chunk, in program (b, r).

    Every chunk is prepared as in `delta_chunks_heads_kernel` and scanned as in `delta_scan_kernel`.
    """
    PRECISION: tl.constexpr = tiles.PRECISION
    BLOCKS: tl.constexpr = (tiles.HEAD_V_DIM + tiles.BLOCK_V - 1) // tiles.BLOCK_V
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    vs = (tl.program_id(0) % BLOCKS) * tiles.BLOCK_V + tl.arange(0, tiles.BLOCK_V)
    ks = tl.arange(0, tiles.BLOCK_K)
    tile = tl.arange(0, tiles.BLOCK_T)
    is_k = (ks < tiles.HEAD_K_DIM)[None, :]
    is_v = (vs < tiles.HEAD_V_DIM)[None, :]
    in_state = (ks < tiles.HEAD_K_DIM)[:, None] & is_v
    dtype = inputs.k_ptr.dtype.element_ty
    query_start = tl.load(requests.query_starts_ptr + request).to(tl.int64)
    num_tokens = tl.load(requests.query_starts_ptr + request + 1) - query_start.to(tl.int32)
    state_slot = tl.load(requests.state_slots_ptr + request * stride_slots)
    initial_slot = tl.load(requests.initial_slots_ptr + request * stride_initial)
    out_ptr += query_start * stride_out_token + head * stride_out_head + vs[None, :]

    if state_slot <= 0:
        for first in range(0, num_tokens, tiles.BLOCK_T):
            tokens = (first + tile).to(tl.int64)[:, None]
            zero = tl.full([tiles.BLOCK_T, tiles.BLOCK_V], 0.0, out_ptr.dtype.element_ty)
            tl.store(out_ptr + tokens * stride_out_token, zero, mask=is_v & (tokens < num_tokens))
        return

    group = head // tiles.HEADS_PER_GROUP
    q_ptr = inputs.q_ptr + (query_start * stride_q_token + group * stride_q_head + ks[None, :])
    k_ptr = inputs.k_ptr + (query_start * stride_k_token + group * stride_k_head + ks[None, :])
    v_ptr = inputs.v_ptr + (query_start * stride_v_token + head * stride_v_head + vs[None, :])
    gates_ptr = inputs.gates_ptr + (query_start * stride_gates_token + head)
    betas_ptr = inputs.betas_ptr + (query_start * stride_betas_token + head)
    rate = None
    bias = None
    if inputs.A_log_ptr is not None:
        rate = rate_log2(tl.load(inputs.A_log_ptr + head).to(tl.float32))
        if inputs.dt_bias_ptr is not None:
            bias = tl.load(inputs.dt_bias_ptr + head * stride_dt_bias_head).to(tl.float32)
    # Offsets of rows only. Those of all elements would stay in registers until the store.
    in_page = head * stride_states_head + vs[None, :] * stride_states_dim  # [1, V]
    initial = states_ptr + (page_offsets(initial_slot, stride_states_slot) + in_page)
    h = tl.load(initial + ks[:, None], mask=mask_if(initial_slot > 0, in_state), other=0.0).to(
        tl.float32
    )  # [K, V]
    is_past = tile[:, None] >= tile[None, :]

    start = 0
    stretch, last_stretch = checkpoint_range(checkpoints.checkpoint_starts_ptr, request)
    for s in range(stretch, last_stretch + 1):
        stop, slot = stretch_end(
            s,
            last_stretch,
            checkpoints.checkpoint_after_ptr,
            checkpoints.checkpoint_slots_ptr,
            num_tokens,
            state_slot,
        )
        # Hoisted numbers that are the same for all chunks would take more registers than there are.
        for first in tl.range(  # pyright: ignore[reportGeneralTypeIssues]
            start, stop, tiles.BLOCK_T, disable_licm=True
        ):
            tokens = (first + tile).to(tl.int64)
            live = tokens < stop
            rows = live[:, None]
            gates = load_numbers(gates_ptr, tokens, stride_gates_token, stop).to(tl.float32)
            betas = load_numbers(betas_ptr, tokens, stride_betas_token, stop).to(tl.float32)
            q = load_rows(q_ptr, tokens, stride_q_token, stop, is_k)  # [T, K]
            k = load_rows(k_ptr, tokens, stride_k_token, stop, is_k)  # [T, K]
            v = load_rows(v_ptr, tokens, stride_v_token, stop, is_v)  # [T, V]
            if inputs.A_log_ptr is not None:
                betas = tl.where(live, sigmoid(betas), 0.0)
            # Logarithms to base two of the decay from the chunk's start through each token. Their
            # differences must be accurate after any amount of decay.
            decays = tl.where(live, decay_log2(gates, rate, bias), 0.0)
            decays = tl.cumsum(decays.to(tl.float64) if dtype == tl.float32 else decays, 0)
            # With a condition on sums over tokens, betas are computed once, and passed to the
            # threads that need them.
            betas = tl.where(decays <= 0.0, betas, 0.0)
            total = tl.sum(tl.where(tile == tiles.BLOCK_T - 1, decays, 0.0), 0)
            since_start = tl.exp2(decays.to(tl.float32))[:, None]
            until_end = tl.exp2((total - decays).to(tl.float32))[:, None]
            decay = tl.exp2(total.to(tl.float32))
            factors = scale
            if tiles.IS_NORMALIZED:
                factors = scale * unit_factors(q)[:, None]  # [T, 1]
                k = rounded(k.to(tl.float32) * unit_factors(k)[:, None], dtype)
            q = rounded(q.to(tl.float32) * factors, dtype)
            exponent = (decays[:, None] - decays[None, :]).to(tl.float32)
            between = tl.exp2(tl.where(is_past, exponent, float("-inf")))  # [T, T]
            # Each token's change of the state subtracts the parts that earlier changes of the chunk
            # hold under its key. This is a unit triangular system for all changes at once.
            scores, lower = both_products(q, k, tl.trans(k), tiles.BLOCK_T)
            scores = rounded(scores * between, dtype)
            lower = lower * between * betas[:, None]
            solution = unit_triangular_inverse(lower, tiles.BLOCK_T, PRECISION) * betas[None, :]

            # Values replace those that the state before the chunk holds under the keys.
            before = rounded(h, dtype)
            y, held = both_products(q, k, before, tiles.BLOCK_V)
            missing = v.to(tl.float32) - held * since_start  # [T, V]
            changes = matmul(rounded(solution, dtype), rounded(missing, dtype))
            y = rounded(matmul_add(scores, rounded(changes, dtype), y * since_start), dtype)
            tl.store(out_ptr + tokens[:, None] * stride_out_token, y, mask=rows & is_v)
            kept = rounded(changes * until_end, dtype)
            h = matmul_add(tl.trans(k), kept, h * decay)
        start = stop
        state_ptr = states_ptr + (page_offsets(slot, stride_states_slot) + in_page)
        tl.store(
            state_ptr + ks[:, None],
            rounded(h, states_ptr.dtype.element_ty),
            mask=mask_if(slot > 0, in_state),
        )
