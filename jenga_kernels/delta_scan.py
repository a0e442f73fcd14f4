"""The gated delta rule over prompts, with states in pages."""

import torch
import triton

from jenga_kernels.checks import check_same_device, check_shape
from jenga_kernels.delta import check_delta_rule
from jenga_kernels.launches import taken_by
from jenga_kernels.states import (
    Checkpoints,
    check_checkpoints,
    check_query_starts,
    check_slots,
    check_slots_apart,
)
from jenga_kernels.triton.addressing import strides
from jenga_kernels.triton.delta_chunks_channels import delta_chunks_channels_kernel
from jenga_kernels.triton.delta_chunks_heads import delta_chunks_heads_kernel
from jenga_kernels.triton.delta_scan import delta_scan_kernel
from jenga_kernels.triton.delta_tiles import (
    DeltaTiles,
    delta_scan_tiles,
    has_hopper_delta_scan,
)
from jenga_kernels.triton.state_tiles import CHUNK_CHANNELS
from jenga_kernels.triton.tiles import machine_of, overlapping


def delta_scan(
    out: torch.Tensor,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    query_starts: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    checkpoints: Checkpoints | None = None,
    is_portable: bool = False,
) -> None:
    """Scan requests' tokens: read each one's state, apply every token, write the states asked for.

    With g the exponential of a token's gate, a number or one for each column, the state H
    [head_v_dim, head_k_dim] of a head becomes g H + beta (v - g H k) k^T, and its output is H q,
    times the scale.

    Requests whose state slot is `NULL_SLOT` are padding: their output is zero and nothing else is
    read or written. No request may write a slot that another one reads or writes. While it runs, a
    call takes memory for two rows of a chunk per token and value head, and for copies of queries
    and keys.

    Args:
        out: Written in place, shape and dtype of v.
        states: Written in place, [num_slots, num_v_heads, head_v_dim, head_k_dim], bfloat16,
            float16 or float32; any strides that are multiples of 16 bytes, last dimension
            contiguous.
        q: Queries, [num_tokens, num_qk_heads, head_k_dim], dtype of v; the value heads that share
            one are next to each other. At most 128 elements a head.
        k: Keys, shape and dtype of q.
        v: Values, [num_tokens, num_v_heads, head_v_dim], bfloat16, float16 or float32.
        gates: Natural logarithms of the decays, [num_tokens, num_v_heads], or [num_tokens,
            num_v_heads, head_k_dim] where every key channel decays on its own; at most 0. With
            A_log they are projections, and the logarithms -exp(A_log) softplus(gates + dt_bias).
        betas: How far a value replaces what the state holds under its key, [num_tokens,
            num_v_heads]. With A_log they are projections, which pass through a sigmoid.
        query_starts: Where each request's tokens begin, and the end, i32[num_requests + 1].
        initial_slots: Where each request's state is read, i32[num_requests]; `NULL_SLOT` begins
            with zero.
        state_slots: Where each request's last state is written, i32[num_requests].
        A_log: Logarithms of the decay rates, [num_v_heads]; None where gates and betas are ready.
        dt_bias: Added to gates, shape of one token's.
        scale: Factor of the queries; None means head_k_dim ** -0.5.
        qk_l2norm: Whether queries and keys are brought to length one.
        checkpoints: States to write besides the last ones.
        is_portable: Whether to use the kernels of all GPUs where there are others for this one.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.

    Source: the rule is that of "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv
    2412.06464), with a decay for each channel that of "Kimi Linear" (arXiv 2510.26692), its form by
    chunks section 3 of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
    (arXiv 2406.06484).
    """
    scale = check_delta_rule(
        out, states, q, k, v, gates, betas, A_log=A_log, dt_bias=dt_bias, scale=scale
    )
    num_tokens, num_v_heads, head_v_dim = v.shape
    _, num_qk_heads, head_k_dim = q.shape
    num_slots = states.shape[0]
    num_requests = check_query_starts(query_starts, num_tokens)
    check_shape("initial_slots", initial_slots, (num_requests,))
    check_shape("state_slots", state_slots, (num_requests,))
    check_slots("initial_slots", initial_slots, num_slots)
    check_slots("state_slots", state_slots, num_slots)
    check_checkpoints(checkpoints, query_starts, num_slots)
    check_same_device(
        v=v, query_starts=query_starts, initial_slots=initial_slots, state_slots=state_slots
    )
    check_slots_apart(initial_slots, state_slots, checkpoints=checkpoints)
    if num_requests == 0:
        return
    machine = machine_of(v.device)
    is_per_channel = gates.dim() > 2  # noqa: PLR2004 - tokens, heads, channels
    tiles = delta_scan_tiles(
        machine, head_k_dim, head_v_dim, v.element_size(), is_per_channel=is_per_channel
    )
    is_ahead = not is_portable and has_hopper_delta_scan(machine, head_k_dim, v, tiles.block_tokens)
    num_chunks = num_tokens // tiles.block_tokens + num_requests
    if checkpoints is not None:
        num_chunks += checkpoints.slots.shape[0]
    chunks = _chunk_tensors(v, num_qk_heads, num_chunks, tiles, is_per_channel=is_per_channel)
    kernel = delta_chunks_channels_kernel if is_per_channel else delta_chunks_heads_kernel
    kernel[(num_v_heads, num_chunks)](
        **chunks,
        q_ptr=q,
        k_ptr=k,
        gates_ptr=gates,
        betas_ptr=betas,
        A_log_ptr=A_log,
        dt_bias_ptr=dt_bias,
        query_starts_ptr=query_starts,
        state_slots_ptr=state_slots,
        checkpoint_starts_ptr=None if checkpoints is None else checkpoints.starts,
        checkpoint_after_ptr=None if checkpoints is None else checkpoints.after_tokens,
        scale=scale,
        num_requests=num_requests,
        num_tokens=num_tokens,
        stride_q_token=strides(q)[0],
        stride_q_head=strides(q)[1],
        stride_k_token=strides(k)[0],
        stride_k_head=strides(k)[1],
        stride_gates_token=strides(gates)[0],
        stride_gates_head=strides(gates)[1] if is_per_channel else 0,
        stride_betas_token=strides(betas)[0],
        stride_dt_bias_head=0 if dt_bias is None else strides(dt_bias)[0],
        stride_slots=state_slots.stride(0),
        HEADS_PER_GROUP=num_v_heads // num_qk_heads,
        HEAD_K_DIM=head_k_dim,
        IS_NORMALIZED=qk_l2norm,
        PRECISION="ieee" if v.dtype == torch.float32 else "tf32",
        BLOCK_T=tiles.block_tokens,
        BLOCK_K=tiles.block_keys,
        IS_OVERLAPPED=is_ahead,
        num_warps=tiles.chunk_warps,
        num_stages=1,
        enable_fp_fusion=True,
    )
    stride_slot, stride_head, stride_dim, _ = strides(states)
    arguments = chunks | {
        "out_ptr": out,
        "states_ptr": states,
        "v_ptr": v,
        "query_starts_ptr": query_starts,
        "initial_slots_ptr": initial_slots,
        "state_slots_ptr": state_slots,
        "checkpoint_starts_ptr": None if checkpoints is None else checkpoints.starts,
        "checkpoint_after_ptr": None if checkpoints is None else checkpoints.after_tokens,
        "checkpoint_slots_ptr": None if checkpoints is None else checkpoints.slots,
        "num_tokens_of_all": num_tokens,
        "num_chunks": num_chunks,
        "stride_out_token": strides(out)[0],
        "stride_out_head": strides(out)[1],
        "stride_states_slot": stride_slot,
        "stride_states_head": stride_head,
        "stride_states_dim": stride_dim,
        "stride_v_token": strides(v)[0],
        "stride_v_head": strides(v)[1],
        "stride_initial": initial_slots.stride(0),
        "stride_slots": state_slots.stride(0),
        "HEADS_PER_GROUP": num_v_heads // num_qk_heads,
        "HEAD_K_DIM": head_k_dim,
        "HEAD_V_DIM": head_v_dim,
        "IS_PER_CHANNEL": is_per_channel,
        "BLOCK_T": tiles.block_tokens,
        "BLOCK_K": tiles.block_keys,
        "enable_fp_fusion": True,
    }
    if is_ahead:
        # Gluon is not for the interpreter.
        from jenga_kernels.triton.chunks_hopper import chunk_descriptor  # noqa: PLC0415
        from jenga_kernels.triton.delta_scan_hopper import (  # noqa: PLC0415
            delta_scan_hopper_kernel as scan_kernel,
        )

        block_values = CHUNK_CHANNELS
        arguments |= {"v_descriptor": chunk_descriptor(v), "num_warps": 4}
        for name in ("queries", "keys", "kept_keys", "scores", "solution"):
            rows = chunks[f"{name}_ptr"]
            descriptor = None if rows is None else chunk_descriptor(rows.transpose(0, 1))
            arguments[f"{name}_descriptor"] = descriptor
        arguments |= {"IS_OVERLAPPED": machine.has_dependent_launches} | overlapping(machine)
    else:
        scan_kernel, block_values = delta_scan_kernel, tiles.block_values
        arguments |= {
            "BLOCK_V": block_values,
            "num_warps": tiles.scan_warps,
            "num_stages": tiles.scan_stages,
        }
    grid = (triton.cdiv(head_v_dim, block_values) * num_v_heads, num_requests)
    scan_kernel[grid](**taken_by(scan_kernel, arguments))


def _chunk_tensors(
    v: torch.Tensor, num_qk_heads: int, num_chunks: int, tiles: DeltaTiles, *, is_per_channel: bool
) -> dict[str, torch.Tensor | None]:
    """What the first kernel leaves for the second, by the names of the kernels' arguments."""
    num_tokens, num_v_heads, _ = v.shape

    def empty(*shape: int, dtype: torch.dtype = v.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    keys = (num_v_heads if is_per_channel else num_qk_heads, num_tokens, tiles.block_keys)
    squares = (num_v_heads, num_tokens, tiles.block_tokens)
    chunks = {
        "queries_ptr": empty(*keys),
        "keys_ptr": empty(*keys),
        "kept_keys_ptr": None,
        "scores_ptr": empty(*squares),
        "solution_ptr": empty(*squares),
        "since_start_ptr": None,
        "until_end_ptr": None,
    }
    if is_per_channel:
        chunks["kept_keys_ptr"] = empty(*keys)
        decays = (num_v_heads, num_chunks, tiles.block_keys)
    else:
        chunks["since_start_ptr"] = empty(*squares[:2], dtype=torch.float32)
        chunks["until_end_ptr"] = empty(*squares[:2], dtype=torch.float32)
        decays = (num_v_heads, num_chunks)
    return chunks | {"decays_ptr": empty(*decays, dtype=torch.float32)}
