"""The gated delta rule over prompts, with states in pages."""

from collections.abc import Iterator

import torch
import triton

from jenga_kernels.checks.delta import check_delta_rule
from jenga_kernels.checks.states import (
    Checkpoints,
    check_checkpoints,
    check_query_starts,
    check_slots,
    check_slots_apart,
    checkpoint_tensors,
)
from jenga_kernels.checks.tensors import check_same_device, check_shape, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, rebased, with_reference
from jenga_kernels.reference import delta_scan as reference
from jenga_kernels.triton.delta.chunks_channels import delta_chunks_channels_kernel
from jenga_kernels.triton.delta.chunks_heads import delta_chunks_heads_kernel
from jenga_kernels.triton.delta.scan import delta_scan_kernel
from jenga_kernels.triton.delta.tiles import (
    DeltaTiles,
    delta_scan_tiles,
    has_hopper_delta_scan,
    hopper_programs,
)
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import machine_of, overlapping

CHUNK_ROWS = ("queries", "keys", "kept_keys", "scores", "solution")
"""Results of the first kernel that the second one loads by TMA."""

_calls: Calls = {}


@with_reference(reference.delta_scan)
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
    is_portable: bool | None = None,
) -> None:
    """Scan requests' tokens: read each one's state, apply every token, write the states asked for.

    Let g be the exponential of a token's gate, one number or one for each column. The state H
    [head_v_dim, head_k_dim] of a head becomes g H + beta (v - g H k) k^T. The output is H q, times
    the scale.

    Requests whose state slot is `NULL_SLOT` are padding: their output is zero, and nothing else is
    read or written. No request may write a slot that another one reads or writes. While it runs, a
    call allocates two rows of a chunk's length for each token and value head, and copies of queries
    and keys.

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
            [num_tokens, num_v_heads], from 0 to 2; with greater ones, a state grows from token to
            token. With A_log they are projections, which pass through a sigmoid.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1].
        initial_slots: Slot from which each request's state is read, i32[num_requests]; `NULL_SLOT`
            begins with zero.
        state_slots: Slot to which each request's last state is written, i32[num_requests].
        A_log: Logarithms of the decay rates, [num_v_heads]. None means that gates and betas are
            not projections.
        dt_bias: Bias that is added to gates, shape of one token's gates.
        scale: Factor of the queries. None means head_k_dim ** -0.5.
        qk_l2norm: Whether queries and keys are scaled to length one.
        checkpoints: States to write in addition to the last ones.
        is_portable: Whether to use the generic kernels on a GPU that has kernels of its own
            (Hopper). None means True only if each head has one decay and the kernel for Hopper
            would leave multiprocessors idle, as for one prompt of few heads. On an H100, that
            kernel takes 1.08 times as long for one prompt of 2048 tokens through 32 heads, and 0.88
            times if every channel has its own decay (`perf.kernels.bench_delta`).

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.

    Source: the rule is that of "Gated Delta Networks: Improving Mamba2 with Delta Rule"
    (arXiv 2412.06464). With a decay for each channel, it is that of "Kimi Linear"
    (arXiv 2510.26692). Its form by chunks is section 3 of "Parallelizing Linear Transformers with
    the Delta Rule over Sequence Length" (arXiv 2406.06484).
    """
    kept = checkpoint_tensors(checkpoints)
    call = call_like(
        _calls,
        out,
        states,
        q,
        k,
        v,
        gates,
        betas,
        query_starts,
        initial_slots,
        state_slots,
        A_log,
        dt_bias,
        scale,
        qk_l2norm,
        *kept.values(),
        is_portable,
    )
    is_first = call.launches is None
    if is_first or shows_values(v):  # on a CPU, values are checked in every call
        scale = check_delta_rule(
            out, states, q, k, v, gates, betas, A_log=A_log, dt_bias=dt_bias, scale=scale
        )
        num_slots = states.shape[0]
        num_requests = check_query_starts(query_starts, v.shape[0])
        check_shape("initial_slots", initial_slots, (num_requests,))
        check_shape("state_slots", state_slots, (num_requests,))
        check_slots("initial_slots", initial_slots, num_slots)
        check_slots("state_slots", state_slots, num_slots)
        check_checkpoints(checkpoints, query_starts, num_slots)
        check_same_device(
            v=v, query_starts=query_starts, initial_slots=initial_slots, state_slots=state_slots
        )
        check_slots_apart(initial_slots, state_slots, checkpoints=checkpoints)
    num_requests = len(state_slots)
    if num_requests == 0:
        return
    tensors = {
        "out_ptr": out,
        "states_ptr": states,
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "gates_ptr": gates,
        "betas_ptr": betas,
        "A_log_ptr": A_log,
        "dt_bias_ptr": dt_bias,
        "query_starts_ptr": query_starts,
        "initial_slots_ptr": initial_slots,
        "state_slots_ptr": state_slots,
        **kept,
    }
    if is_first:
        is_per_channel = gates.dim() > 2  # noqa: PLR2004 - tokens, heads, channels
        call.facts = tiles = delta_scan_tiles(
            machine_of(v.device),
            q.shape[2],
            v.shape[2],
            v.element_size(),
            is_per_channel=is_per_channel,
        )
        tensors |= _chunk_tensors(tensors, tiles)
        call.launches = list(
            _launches(tensors, tiles, scale=scale, is_normalized=qk_l2norm, is_portable=is_portable)
        )
    else:
        tensors |= _chunk_tensors(tensors, call.facts)
    call.run(tensors)


def _launches(
    tensors: dict[str, torch.Tensor | None],
    tiles: DeltaTiles,
    *,
    scale: float,
    is_normalized: bool,
    is_portable: bool | None,
) -> Iterator[Launch]:
    """List the launches of a call: a kernel that prepares its chunks, then one that scans them.

    Args:
        tensors: Tensors of the call, and those that the first kernel writes for the second.
        tiles: Tiles of both kernels.
        scale: Factor of the queries.
        is_normalized: Whether queries and keys are scaled to length one.
        is_portable: Whether to use the generic kernels; None where these are faster.
    """
    out, states, q, k, v, gates, betas, dt_bias, initial_slots, state_slots, decays = (
        tensors[f"{name}_ptr"]
        for name in (
            *("out", "states", "q", "k", "v", "gates", "betas", "dt_bias"),
            *("initial_slots", "state_slots", "decays"),
        )
    )
    machine = machine_of(v.device)
    num_tokens, num_v_heads, head_v_dim = v.shape
    _, num_qk_heads, head_k_dim = q.shape
    num_requests, num_chunks = len(state_slots), decays.shape[1]
    is_per_channel = gates.dim() > 2  # noqa: PLR2004 - tokens, heads, channels
    is_ahead = not is_portable and has_hopper_delta_scan(machine, head_k_dim, v, tiles.block_tokens)
    num_programs = hopper_programs(v) * num_requests
    if is_ahead and is_portable is None and not is_per_channel:
        is_ahead = num_programs >= machine.num_processors
    # If there are more programs than multiprocessors, two share one's shared memory. With a decay
    # for each channel, the loads of one program leave no room for a second one.
    is_shared = not is_per_channel and num_programs > machine.num_processors
    # A program that waits for the first kernel must not hold all the shared memory of a
    # multiprocessor, because the first kernel needs it.
    is_overlapped = is_ahead and is_shared and machine.has_dependent_launches
    stride_slot, stride_head, stride_dim, _ = strides(states)
    precision = "float16" if is_normalized else "tf32"
    if v.dtype == torch.float32:
        precision = "ieee"
    shared = {
        "stride_slots": state_slots.stride(0),
        "HEADS_PER_GROUP": num_v_heads // num_qk_heads,
        "HEAD_K_DIM": head_k_dim,
        "BLOCK_T": tiles.block_tokens,
        "BLOCK_K": tiles.block_keys,
        "enable_fp_fusion": True,
    }
    yield Launch(
        kernel=delta_chunks_channels_kernel if is_per_channel else delta_chunks_heads_kernel,
        grid=(num_v_heads, num_chunks),
        constants=shared
        | {
            "scale": scale,
            "num_requests": num_requests,
            "num_tokens": num_tokens,
            "stride_q_token": strides(q)[0],
            "stride_q_head": strides(q)[1],
            "stride_k_token": strides(k)[0],
            "stride_k_head": strides(k)[1],
            "stride_gates_token": strides(gates)[0],
            "stride_gates_head": strides(gates)[1] if is_per_channel else 0,
            "stride_betas_token": strides(betas)[0],
            "stride_dt_bias_head": 0 if dt_bias is None else strides(dt_bias)[0],
            "IS_NORMALIZED": is_normalized,
            "PRECISION": precision,
            "IS_OVERLAPPED": is_overlapped,
            "num_warps": tiles.chunk_warps,
            "num_stages": 1,
            "maxnreg": tiles.chunk_registers,
        },
    )
    walk = shared | {
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
        "HEAD_V_DIM": head_v_dim,
        "IS_PER_CHANNEL": is_per_channel,
    }
    if is_ahead:
        stages = {"NUM_STAGES": 2 if is_shared else 3, "IS_OVERLAPPED": is_overlapped}
        options = overlapping(machine) if is_overlapped else {}
        yield _launch_ahead(tensors, walk | stages | options)
        return
    block_values = tiles.block_values
    yield Launch(
        kernel=delta_scan_kernel,
        grid=(triton.cdiv(head_v_dim, block_values) * num_v_heads, num_requests),
        constants=walk
        | {
            "BLOCK_V": block_values,
            "num_warps": tiles.scan_warps,
            "num_stages": tiles.scan_stages,
        },
    )


def _launch_ahead(tensors: dict[str, torch.Tensor | None], walk: dict[str, object]) -> Launch:
    """Build the launch of the scan over chunks on Hopper, which loads ahead."""
    # Triton's interpreter cannot run Gluon.
    from jenga_kernels.triton.delta.hopper.scan import delta_scan_hopper_kernel  # noqa: PLC0415
    from jenga_kernels.triton.recurrent.hopper.chunks import chunk_descriptor  # noqa: PLC0415

    v = tensors["v_ptr"]
    descriptors = {"v_descriptor": chunk_descriptor(v)}
    for name in CHUNK_ROWS:
        rows = tensors[f"{name}_ptr"]
        descriptor = None if rows is None else chunk_descriptor(rows.transpose(0, 1))
        descriptors[f"{name}_descriptor"] = descriptor
    constants = {name: rebased(descriptor, None) for name, descriptor in descriptors.items()}
    return Launch(
        kernel=delta_scan_hopper_kernel,
        grid=(hopper_programs(v), len(tensors["state_slots_ptr"])),
        constants=walk | constants | {"num_warps": 4},
        descriptors=tuple((f"{name}_descriptor", f"{name}_ptr") for name in ("v", *CHUNK_ROWS)),
    )


def _chunk_tensors(
    tensors: dict[str, torch.Tensor | None], tiles: DeltaTiles
) -> dict[str, torch.Tensor | None]:
    """Allocate results of the first kernel for the second, by the names of their arguments."""
    q, v, gates = tensors["q_ptr"], tensors["v_ptr"], tensors["gates_ptr"]
    num_tokens, num_v_heads, _ = v.shape
    num_chunks = num_tokens // tiles.block_tokens + len(tensors["state_slots_ptr"])
    checkpoint_slots = tensors["checkpoint_slots_ptr"]
    if checkpoint_slots is not None:
        num_chunks += len(checkpoint_slots)

    def empty(*shape: int, dtype: torch.dtype = v.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    is_per_channel = gates.dim() > 2  # noqa: PLR2004 - tokens, heads, channels
    keys = (num_v_heads if is_per_channel else q.shape[1], num_tokens, tiles.block_keys)
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
