"""Time prompts through recurrent layers, with our kernels and those of vLLM and mamba-ssm.

All run on the same pages.

python -m perf.kernels.bench_state_scan [--only 8192] [--peers vllm] [--dry-run]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.recurrent.state_scan import state_scan
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import UnsupportedError
from perf.shapes.state_shapes import DRY_MODELS, MODELS, SPREAD_MODELS, StateBatch, make_state_batch

PROMPTS = {
    "1x2048": [2048],
    "1x8192": [8192],
    "4x2048": [2048] * 4,
    "16 odd": [517, 33, 1200, 740, 5, 999, 250, 611] * 2,
}
DRY_PROMPTS = {"5+40": [5, 40]}
CHUNK_TOKENS = 256
"""Length of the peers' chunks, in tokens, as vLLM chooses it for these models."""

CHECKPOINT_TOKENS = 512
"""Number of tokens between two checkpoints in the rows with checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Chunks in vLLM's description. Each has at most CHUNK_TOKENS tokens of a single request.

    Attributes:
        starts: Index of each chunk's first token, and the end of the last chunk.
        requests: Index of each chunk's request.
        last: Index of each request's last chunk.
    """

    starts: torch.Tensor
    requests: torch.Tensor
    last: torch.Tensor


def chunks_of(batch: StateBatch) -> Chunks:
    starts, requests, last = [0], [], []
    for request, (begin, end) in enumerate(
        zip(batch.query_starts.tolist(), batch.query_starts.tolist()[1:], strict=False)
    ):
        for first in range(begin, end, CHUNK_TOKENS):
            starts.append(min(first + CHUNK_TOKENS, end))
            requests.append(request)
        last.append(len(requests) - 1)
    lists = (torch.tensor(values, dtype=torch.int32) for values in (starts, requests, last))
    starts, requests, last = (values.to(batch.x.device) for values in lists)
    return Chunks(starts=starts, requests=requests, last=last)


def jenga(
    batch: StateBatch,
    checkpoints: Checkpoints | None = None,
    *,
    segment_tokens: int | None = None,
    is_warp_specialized: bool | None = None,
    is_portable: bool = False,
) -> Callable[[], None]:
    """Prepare our operation.

    Args:
        batch: Tokens and states to scan.
        checkpoints: States to keep. None means none.
        segment_tokens: Length of the segments that requests are cut into. None means the
            operation's own choice.
        is_warp_specialized: Whether two warp groups share a chunk on Hopper. None means the
            operation's own choice.
        is_portable: Whether to use the generic kernels.
    """
    none = torch.zeros_like(batch.slots)
    longest_tokens = int(batch.query_starts.diff().max())

    def launch() -> None:
        state_scan(
            batch.out,
            batch.states,
            batch.x,
            batch.dt,
            batch.A,
            batch.B,
            batch.C,
            batch.query_starts,
            none,
            batch.slots,
            D=batch.D,
            dt_bias=batch.dt_bias,
            checkpoints=checkpoints,
            longest_tokens=longest_tokens,
            segment_tokens=segment_tokens,
            is_warp_specialized=is_warp_specialized,
            is_portable=is_portable,
        )

    return launch


def jenga_whole(
    batch: StateBatch, *, is_warp_specialized: bool | None = None, is_portable: bool = False
) -> Callable[[], None]:
    """Prepare our operation without cutting requests into segments."""
    if batch.model.is_per_channel:
        msg = "layers whose channels decay on their own have no such kernel"
        raise UnsupportedError(msg)
    return jenga(
        batch,
        segment_tokens=-(-len(batch.x) // 64) * 64,
        is_warp_specialized=is_warp_specialized,
        is_portable=is_portable,
    )


def jenga_halves(batch: StateBatch) -> Callable[[], None]:
    """Prepare our operation with segments of half the longest request."""
    longest_tokens = int(batch.query_starts.diff().max())
    return jenga(batch, segment_tokens=-(-longest_tokens // 128) * 64)


def jenga_checkpoints(batch: StateBatch) -> Callable[[], None]:
    """Prepare our operation with a checkpoint every CHECKPOINT_TOKENS tokens.

    All checkpoints of a request go to one slot, to limit the size of the arena.
    """
    bounds, after_tokens = [0], []
    for length in batch.query_starts.diff().tolist():
        after_tokens += range(CHECKPOINT_TOKENS, length, CHECKPOINT_TOKENS)
        bounds.append(len(after_tokens))
    device = batch.x.device
    slots = batch.slots.cpu().repeat_interleave(torch.tensor(bounds).diff())
    return jenga(
        batch,
        Checkpoints(
            starts=torch.tensor(bounds, dtype=torch.int32, device=device),
            after_tokens=torch.tensor(after_tokens, dtype=torch.int32, device=device),
            slots=slots.to(device),
        ),
    )


def vllm_channels(batch: StateBatch) -> Callable[[], None]:
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_scan_fn

    # The kernel requires tokens innermost, as in vLLM's layer, and overwrites dt. These copies are
    # not timed.
    x, dt, b, c = (tensor[:, 0].T.contiguous() for tensor in (batch.x, batch.dt, batch.B, batch.C))
    has_initial = torch.zeros(len(batch.slots), dtype=torch.bool, device=x.device)

    def launch() -> None:
        selective_scan_fn(
            x,
            batch.states[:, 0],
            dt,
            batch.A[0],
            b,
            c,
            batch.D[0],
            None,
            batch.dt_bias[0],
            delta_softplus=True,
            query_start_loc=batch.query_starts,
            cache_indices=batch.slots,
            has_initial_state=has_initial,
        )

    return launch


def vllm(batch: StateBatch) -> Callable[[], None]:
    try:
        if batch.model.is_per_channel:
            return vllm_channels(batch)
        from vllm.model_executor.layers.mamba.ops.ssd_combined import (
            mamba_chunk_scan_combined_varlen,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    chunks = chunks_of(batch)
    slots = batch.slots.long()

    def launch() -> None:
        final = mamba_chunk_scan_combined_varlen(
            batch.x,
            batch.dt,
            batch.A,
            batch.B,
            batch.C,
            chunk_size=CHUNK_TOKENS,
            D=batch.D,
            z=None,
            dt_bias=batch.dt_bias,
            seq_idx=chunks.requests,
            cu_seqlens=batch.query_starts,
            cu_chunk_seqlens=chunks.starts,
            last_chunk_indices=chunks.last,
            initial_states=None,
            dt_softplus=True,
            dt_limit=(0.0, float("inf")),
            out=batch.out,
            state_dtype=batch.states.dtype,
        )
        batch.states[slots] = final

    return launch


def mamba_ssm(batch: StateBatch) -> Callable[[], None]:
    if batch.model.is_per_channel:
        msg = "its scan over channels is compiled and takes no requests of different lengths"
        raise UnsupportedError(msg)
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    lengths = batch.query_starts.diff()
    requests = torch.arange(len(lengths), device=lengths.device, dtype=torch.int32)
    seq_idx = requests.repeat_interleave(lengths)[None]
    slots = batch.slots.long()

    def launch() -> None:
        _, final = mamba_chunk_scan_combined(
            batch.x[None],
            batch.dt[None],
            batch.A,
            batch.B[None],
            batch.C[None],
            CHUNK_TOKENS,
            D=batch.D,
            dt_bias=batch.dt_bias,
            seq_idx=seq_idx,
            cu_seqlens=batch.query_starts,
            dt_softplus=True,
            return_varlen_states=True,
        )
        batch.states[slots] = final.to(batch.states.dtype)

    return launch


OURS = ("jenga", "jenga-keep-512")
"""Implementations that are measured whatever peers are selected."""

PEERS = {
    "jenga": jenga,
    "jenga-keep-512": jenga_checkpoints,
    "jenga-whole": jenga_whole,
    "jenga-halves": jenga_halves,
    "jenga-lone": partial(jenga_whole, is_warp_specialized=True),
    "jenga-shared": partial(jenga_whole, is_warp_specialized=False),
    "jenga-plain": partial(jenga_whole, is_portable=True),
    "vllm": vllm,
    "mamba-ssm": mamba_ssm,
}


def num_flops(batch: StateBatch) -> int:
    """Return the recurrence's own operations: decay, input and output of each state element."""
    return 6 * len(batch.x) * batch.model.state_elements


def measure(benchmark: Benchmark, name: str, batch: StateBatch) -> None:
    """Add a row for each implementation that supports the batch."""
    state_bytes = batch.model.state_elements * batch.states.element_size()
    token_bytes = batch.model.token_elements * batch.x.element_size()
    for peer, prepare in PEERS.items():
        if peer not in OURS and not benchmark.wants_peer(peer):
            continue
        try:
            timing = benchmark.measure(prepare(batch))
        except Exception as error:  # a peer that fails must not end the run
            if peer in OURS:
                raise
            print(f"  {name}: no {peer}: {str(error)[:300]}", flush=True)
            continue
        benchmark.add(
            Row(
                shape=name,
                implementation=peer,
                timing=timing,
                num_bytes=len(batch.x) * token_bytes + len(batch.slots) * state_bytes,
                num_flops=num_flops(batch),
                details={"num_tokens": len(batch.x), "num_requests": len(batch.slots)},
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_state_scan", __doc__ or "", ["tests/kernels/mamba/test_state_scan.py"], arguments
    )
    for model in DRY_MODELS if benchmark.is_dry else (*MODELS, *SPREAD_MODELS):
        for label, lengths in (DRY_PROMPTS if benchmark.is_dry else PROMPTS).items():
            name = f"{model.name} {label}"
            if benchmark.wants_shape(name):
                batch = make_state_batch(model, lengths, torch.float32, benchmark.device)
                measure(benchmark, name, batch)
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
