"""Time steps of the gated delta rule that seldom write the state, compared with always writing it.

python -m perf.kernels.bench_delta_replay [--only qwen3-next] [--peers vllm] [--dry-run]
"""

from collections.abc import Callable

import torch

from jenga_kernels.recurrent.delta_replay import delta_replay
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.kernels import bench_delta
from perf.peers.attention_peers import UnsupportedError
from perf.shapes.delta_replay_shapes import DeltaReplayBatch, make_delta_replay_batch
from perf.shapes.delta_shapes import DELTA_MODELS, DRY_DELTA_MODELS
from perf.shapes.state_replay_shapes import FOUR_DRAFTS, LONG_HISTORY, NO_DRAFTS

BATCHES = (1, 8, 64, 128, 256, 1024)
DRAFT_BATCHES = (8, 64, 256)
STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
MAX_ARENA_BYTES = 40 << 30


def jenga(batch: DeltaReplayBatch) -> Callable[[], None]:
    tokens = batch.tokens

    def launch() -> None:
        delta_replay(
            tokens.out,
            tokens.states,
            batch.history,
            *tokens.qkv,
            tokens.gates,
            tokens.betas,
            batch.slots,
            batch.computed_tokens,
            batch.state_tokens,
            batch.next_state_tokens,
            A_log=tokens.A_log,
            dt_bias=tokens.dt_bias,
            query_starts=None if batch.query_tokens == 1 else tokens.query_starts,
        )

    return launch


def jenga_write(batch: DeltaReplayBatch) -> Callable[[], None]:
    """Prepare our kernel for steps of few requests: it writes every state, and no history waits."""
    if batch.query_tokens > 1:
        msg = "takes one token of a request"
        raise UnsupportedError(msg)
    tokens, next_tokens = batch.tokens, batch.computed_tokens + 1

    def launch() -> None:
        delta_replay(
            tokens.out,
            tokens.states,
            batch.history,
            *tokens.qkv,
            tokens.gates,
            tokens.betas,
            batch.slots,
            batch.computed_tokens,
            batch.computed_tokens,
            next_tokens,
            A_log=tokens.A_log,
            dt_bias=tokens.dt_bias,
            writes_states=True,
        )

    return launch


def jenga_update(batch: DeltaReplayBatch) -> Callable[[], None]:
    """Prepare our kernel that writes the state after every token."""
    return bench_delta.jenga_update(batch.tokens)


def vllm_update(batch: DeltaReplayBatch) -> Callable[[], None]:
    """Prepare vLLM's kernel, which writes the state after every token. vLLM has no other one."""
    return bench_delta.vllm_update(batch.tokens)


PEERS = {
    "jenga": jenga,
    "jenga write": jenga_write,
    "jenga update": jenga_update,
    "vllm update": vllm_update,
}


def measure(benchmark: Benchmark, name: str, batch: DeltaReplayBatch) -> None:
    """Add a row for each implementation that supports the batch.

    All rows use the bytes that a replay moves, so that the rates of a shape compare like its times.
    """
    num_bytes = batch.num_bytes
    details = {
        "num_requests": len(batch.slots),
        "num_written": batch.num_written,
        "query_tokens": batch.query_tokens,
        "history_tokens": batch.history_tokens,
        "num_v_heads": batch.tokens.model.num_v_heads,
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
        "bench_delta_replay", __doc__ or "", ["tests/kernels/delta/test_delta_replay.py"], arguments
    )
    for model in DRY_DELTA_MODELS if benchmark.is_dry else DELTA_MODELS:
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
                        make_delta_replay_batch(
                            model, num_requests, dtype, benchmark.device, drafts=drafts
                        ),
                    )
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
