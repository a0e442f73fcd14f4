"""Time decode steps that seldom write the state, compared with vLLM's kernel for that.

Our kernel and vLLM's that write the state in every step are timed too.

python -m perf.kernels.bench_state_replay [--only nemotron] [--peers vllm] [--dry-run]
"""

from collections.abc import Callable

import torch

from jenga_kernels.recurrent.state_replay import state_replay
from jenga_kernels.recurrent.state_update import state_update
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.kernels import bench_state_update
from perf.peers.attention_peers import UnsupportedError
from perf.shapes.state_replay_shapes import (
    FOUR_DRAFTS,
    LONG_HISTORY,
    NO_DRAFTS,
    ReplayBatch,
    make_replay_batch,
)
from perf.shapes.state_shapes import DRY_MODELS, MODELS

BATCHES = (1, 8, 64, 128, 256, 1024)
DRAFT_BATCHES = (8, 64, 256)
STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
MAX_ARENA_BYTES = 40 << 30


def jenga(batch: ReplayBatch) -> Callable[[], None]:
    tokens = batch.tokens

    def launch() -> None:
        state_replay(
            tokens.out,
            tokens.states,
            batch.history,
            tokens.x,
            tokens.dt,
            tokens.A,
            tokens.B,
            tokens.C,
            tokens.slots,
            batch.computed_tokens,
            batch.state_tokens,
            batch.next_state_tokens,
            D=tokens.D,
            dt_bias=tokens.dt_bias,
            query_starts=None if batch.query_tokens == 1 else tokens.query_starts,
        )

    return launch


def jenga_write(batch: ReplayBatch) -> Callable[[], None]:
    """Prepare our kernel for steps of few requests: it writes every state, and no history waits."""
    if batch.query_tokens > 1:
        msg = "takes one token of a request"
        raise UnsupportedError(msg)
    tokens, next_tokens = batch.tokens, batch.computed_tokens + 1

    def launch() -> None:
        state_replay(
            tokens.out,
            tokens.states,
            batch.history,
            tokens.x,
            tokens.dt,
            tokens.A,
            tokens.B,
            tokens.C,
            tokens.slots,
            batch.computed_tokens,
            batch.computed_tokens,
            next_tokens,
            D=tokens.D,
            dt_bias=tokens.dt_bias,
            writes_states=True,
        )

    return launch


def vllm(batch: ReplayBatch) -> Callable[[], None]:
    if batch.query_tokens > 1:
        msg = "takes one token of a request"
        raise UnsupportedError(msg)
    try:
        from vllm.model_executor.layers.mamba.ops import (
            selective_state_update_replayssm_output_only as module,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    tokens, history = batch.tokens, batch.history
    wide = bench_state_update.per_channel(tokens)
    # All layers of a model share these tensors in a step, so they are not timed.
    past = batch.computed_tokens - batch.state_tokens
    is_flush = (batch.next_state_tokens > batch.state_tokens).to(torch.int8)
    shape = (len(past), tokens.model.num_groups, batch.history_tokens)
    scores = torch.empty(shape, dtype=torch.float32, device=past.device)

    def launch() -> None:
        module.selective_state_update_replayssm_output_only(
            tokens.states,
            tokens.x,
            wide["dt"],
            wide["A"],
            tokens.B,
            tokens.C,
            D=wide["D"],
            dt_bias=wide["dt_bias"],
            dt_softplus=True,
            x_cache=history.x,
            dt_cache=history.dt,
            B_cache=history.B,
            bc_pre=scores,
            write_pos=past,
            is_flush=is_flush,
            max_cache_len=batch.history_tokens,
            state_batch_indices=tokens.slots,
            out=tokens.out,
        )

    return launch


def jenga_update(batch: ReplayBatch) -> Callable[[], None]:
    """Prepare our kernel that writes the state after every token."""
    tokens = batch.tokens

    def launch() -> None:
        state_update(
            tokens.out,
            tokens.states,
            tokens.x,
            tokens.dt,
            tokens.A,
            tokens.B,
            tokens.C,
            tokens.slots,
            batch.draft_slots,
            D=tokens.D,
            dt_bias=tokens.dt_bias,
            query_starts=None if batch.query_tokens == 1 else tokens.query_starts,
        )

    return launch


def vllm_update(batch: ReplayBatch) -> Callable[[], None]:
    """Prepare vLLM's kernel that writes the state after every token."""
    if batch.query_tokens == 1:
        return bench_state_update.vllm(batch.tokens)
    try:
        from vllm.model_executor.layers.mamba.ops import mamba_ssm
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    tokens = batch.tokens
    wide = bench_state_update.per_channel(tokens)
    accepted = torch.ones_like(tokens.slots)

    def launch() -> None:
        mamba_ssm.selective_state_update(
            tokens.states,
            tokens.x,
            wide["dt"],
            wide["A"],
            tokens.B,
            tokens.C,
            D=wide["D"],
            dt_bias=wide["dt_bias"],
            dt_softplus=True,
            state_batch_indices=batch.draft_slots,
            out=tokens.out,
            num_accepted_tokens=accepted,
            cu_seqlens=tokens.query_starts,
        )

    return launch


PEERS = {
    "jenga": jenga,
    "vllm": vllm,
    "jenga write": jenga_write,
    "jenga update": jenga_update,
    "vllm update": vllm_update,
}


def measure(benchmark: Benchmark, name: str, batch: ReplayBatch) -> None:
    """Add a row for each implementation that supports the batch.

    All rows use the bytes that a replay moves, so that the rates of a shape compare like its times.
    """
    num_bytes = batch.num_bytes
    details = {
        "num_requests": len(batch.tokens.slots),
        "num_written": batch.num_written,
        "query_tokens": batch.query_tokens,
        "history_tokens": batch.history_tokens,
        "num_heads": batch.tokens.model.num_heads,
        "state_dtype": str(batch.tokens.states.dtype),
    }
    for peer, prepare in PEERS.items():
        if peer != "jenga" and not benchmark.wants_peer(peer):
            continue
        try:
            timing = benchmark.measure(prepare(batch))
        except Exception as error:  # a peer that fails must not end the run
            if peer == "jenga":
                raise
            print(f"  {name}: no {peer}: {str(error)[:300]}", flush=True)
            continue
        benchmark.add(
            Row(
                shape=name,
                implementation=peer,
                timing=timing,
                num_bytes=num_bytes,
                details=details,
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_state_replay", __doc__ or "", ["tests/kernels/mamba/test_state_replay.py"], arguments
    )
    for model in DRY_MODELS if benchmark.is_dry else MODELS:
        if model.is_per_channel:
            continue
        for label, dtype in STATE_DTYPES.items():
            cases = [
                (f"b{size}", size, NO_DRAFTS) for size in ((3,) if benchmark.is_dry else BATCHES)
            ]
            cases += [
                (f"b{size} 4 drafts{text}", size, drafts)
                for size in ((3,) if benchmark.is_dry else DRAFT_BATCHES)
                for text, drafts in (("", FOUR_DRAFTS), (" long", LONG_HISTORY))
            ]
            for text, num_requests, drafts in cases:
                name = f"{model.name} {label} {text}"
                num_states = num_requests * drafts.query_tokens
                arena_bytes = 2 * num_states * model.state_elements * dtype.itemsize
                if benchmark.wants_shape(name) and arena_bytes <= MAX_ARENA_BYTES:
                    measure(
                        benchmark,
                        name,
                        make_replay_batch(
                            model, num_requests, dtype, benchmark.device, drafts=drafts
                        ),
                    )
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
