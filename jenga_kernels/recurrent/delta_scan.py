"""The gated delta rule over prompts, with states in pages."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.delta import check_delta_rule, has_channel_decays
from jenga_kernels.checks.states import Checkpoints, check_prompts, checkpoint_tensors
from jenga_kernels.checks.tensors import check_same_device, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, rebased, with_reference
from jenga_kernels.reference.recurrent import delta_scan as reference
from jenga_kernels.triton.delta.chunks_channels import delta_chunks_channels_kernel
from jenga_kernels.triton.delta.chunks_heads import delta_chunks_heads_kernel
from jenga_kernels.triton.delta.groups import STRIDES
from jenga_kernels.triton.delta.scan import delta_scan_kernel
from jenga_kernels.triton.delta.tiles import (
    DeltaTiles,
    delta_scan_tiles,
    has_hopper_delta_scan,
    hopper_programs,
)
from jenga_kernels.triton.lib.addressing import named_strides
from jenga_kernels.triton.lib.tiles import machine_of, overlapping

CHUNK_ROWS = ("queries", "keys", "kept_keys", "scores", "solution")
"""Results of the first kernel that the second one loads by TMA."""

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `delta_scan`, in the same order, with the tensors of the checkpoints."""

    out: torch.Tensor
    states: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: torch.Tensor
    betas: torch.Tensor
    query_starts: torch.Tensor
    initial_slots: torch.Tensor
    state_slots: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    scale: float | None
    qk_l2norm: bool
    checkpoint_starts: torch.Tensor | None
    checkpoint_after: torch.Tensor | None
    checkpoint_slots: torch.Tensor | None
    is_portable: bool | None


_POINTERS = pointer_names(_Arguments)


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
    given = (
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
        *checkpoint_tensors(checkpoints),
        is_portable,
    )
    call = call_like(_calls, *given)
    is_first = call.launches is None
    if is_first or shows_values(v):  # on a CPU, values are checked in every call
        scale = _check(_Arguments(*given), checkpoints)
    if len(state_slots) == 0:
        return
    if is_first:
        call.facts = delta_scan_tiles(
            machine_of(v.device),
            q.shape[2],
            v.shape[2],
            v.element_size(),
            is_per_channel=has_channel_decays(gates),
        )
    chunks = _chunk_tensors(q, v, gates, state_slots, checkpoints, call.facts)
    if is_first:
        call.launches = list(_launches(_Arguments(*given), scale, call.facts, chunks))
    call.run(dict(zip(_POINTERS, given, strict=True)) | chunks)


def _check(given: _Arguments, checkpoints: Checkpoints | None) -> float:
    """Check a call, and return the factor of its queries.

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
    check_prompts(
        given.query_starts,
        given.initial_slots,
        given.state_slots,
        checkpoints,
        num_tokens=given.v.shape[0],
        num_slots=given.states.shape[0],
    )
    check_same_device(v=given.v, query_starts=given.query_starts)
    return scale


def _launches(
    given: _Arguments,
    scale: float,
    tiles: DeltaTiles,
    chunks: dict[str, torch.Tensor | None],
) -> Iterator[Launch]:
    """List the launches of a call: a kernel that prepares its chunks, then one that scans them.

    Args:
        given: Arguments of the call.
        scale: Factor of the queries.
        tiles: Tiles of both kernels.
        chunks: Tensors that the first kernel writes for the second.
    """
    machine = machine_of(given.v.device)
    num_tokens, num_v_heads, head_v_dim = given.v.shape
    _, num_qk_heads, head_k_dim = given.q.shape
    num_requests, num_chunks = len(given.state_slots), chunks["decays_ptr"].shape[1]
    is_per_channel = has_channel_decays(given.gates)
    is_ahead = not given.is_portable and has_hopper_delta_scan(
        machine, head_k_dim, given.v, tiles.block_tokens
    )
    num_programs = hopper_programs(given.v) * num_requests
    if is_ahead and given.is_portable is None and not is_per_channel:
        is_ahead = num_programs >= machine.num_processors
    # If there are more programs than multiprocessors, two share one's shared memory. With a decay
    # for each channel, the loads of one program leave no room for a second one.
    is_shared = not is_per_channel and num_programs > machine.num_processors
    # A program that waits for the first kernel must not hold all the shared memory of a
    # multiprocessor, because the first kernel needs it.
    is_overlapped = is_ahead and is_shared and machine.has_dependent_launches
    precision = "float16" if given.qk_l2norm else "tf32"
    if given.v.dtype == torch.float32:
        precision = "ieee"
    shared = {
        **named_strides(given._asdict(), STRIDES),
        "stride_slots": given.state_slots.stride(0),
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
            "IS_NORMALIZED": given.qk_l2norm,
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
        "stride_initial": given.initial_slots.stride(0),
        "HEAD_V_DIM": head_v_dim,
        "IS_PER_CHANNEL": is_per_channel,
    }
    if is_ahead:
        stages = {"NUM_STAGES": 2 if is_shared else 3, "IS_OVERLAPPED": is_overlapped}
        options = overlapping(machine) if is_overlapped else {}
        yield _launch_ahead(given, chunks, walk | stages | options)
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


def _launch_ahead(
    given: _Arguments, chunks: dict[str, torch.Tensor | None], walk: dict[str, object]
) -> Launch:
    """Build the launch of the scan over chunks on Hopper, which loads ahead."""
    # Triton's interpreter cannot run Gluon.
    from jenga_kernels.triton.delta.hopper.scan import delta_scan_hopper_kernel  # noqa: PLC0415
    from jenga_kernels.triton.recurrent.hopper.chunks import chunk_descriptor  # noqa: PLC0415

    descriptors = {"v_descriptor": chunk_descriptor(given.v)}
    for name in CHUNK_ROWS:
        rows = chunks[f"{name}_ptr"]
        descriptor = None if rows is None else chunk_descriptor(rows.transpose(0, 1))
        descriptors[f"{name}_descriptor"] = descriptor
    constants = {name: rebased(descriptor, None) for name, descriptor in descriptors.items()}
    return Launch(
        kernel=delta_scan_hopper_kernel,
        grid=(hopper_programs(given.v), len(given.state_slots)),
        constants=walk | constants | {"num_warps": 4},
        descriptors=tuple((f"{name}_descriptor", f"{name}_ptr") for name in ("v", *CHUNK_ROWS)),
    )


def _chunk_tensors(
    q: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    state_slots: torch.Tensor,
    checkpoints: Checkpoints | None,
    tiles: DeltaTiles,
) -> dict[str, torch.Tensor | None]:
    """Allocate results of the first kernel for the second, by the names of their arguments."""
    num_tokens, num_v_heads, _ = v.shape
    num_chunks = num_tokens // tiles.block_tokens + len(state_slots)
    if checkpoints is not None:
        num_chunks += len(checkpoints.slots)

    def empty(*shape: int, dtype: torch.dtype = v.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    is_per_channel = has_channel_decays(gates)
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
